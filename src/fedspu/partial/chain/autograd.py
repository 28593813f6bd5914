"""The fast path for small networks that are one chain of layers.

Small networks spend their time between operations, not in them. A chain of
convolutions, batch norms, ReLUs, 2x2 max-pools and linear layers runs as one autograd
function with a backward pass written by hand: it keeps only what that backward pass
reads, pools by comparing neighbours, and carries gradient only for the channels that
need it. Frozen neurons of the first layer lead only to frozen weights: they need none.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedspu.compiled.library import find
from fedspu.partial.block_gradients import Convolution
from fedspu.partial.chain.find import Link, find_chain, is_watched, trace
from fedspu.partial.chain.native.models import Kernels, NativeForward
from fedspu.partial.chain.native.stages import NotAChainError
from fedspu.partial.chain.pooling import halves, pool, unpool
from fedspu.partial.clamped_norms import clamping_norms
from fedspu.partial.interception import replaced_forward
from fedspu.partial.memory_format import picks_channels, usual_forward
from fedspu.partial.norms import batch_norm_back, batch_norm_back_, centre, track
from fedspu.partial.remake import pack, unpack
from fedspu.partial.spans import (
    Span,
    Spans,
    is_same,
    num_in,
    spread,
    take_span,
    take_spans,
)
from fedspu.partial.weight import How, PartialWeight, refuse_to_compile

MIN_VALUES = 100_000
"""The chain is faster from this many input values times first-layer outputs on."""


@contextmanager
def running_chain(
    model: nn.Module,
    spans: Mapping[str, Spans],
    trainable: Mapping[str, Tensor],
    how: How,
    num_hooks: int,
    kernels: Kernels,
) -> Iterator[None]:
    """Inside, a chain in training runs as one operation; any other model as usual.

    ``trainable`` are the leaves by the name of their parameter; ``num_hooks`` is how
    many forward hooks of each kind we put on every layer ourselves.
    """
    native = _native(model, spans, trainable, how, kernels)
    stages = _stages(model, find_chain(model), spans, list(trainable), how)
    has_code = kernels != "torch" and find().library is not None
    around = clamping_norms(model) if has_code else nullcontext
    may_be_last = not how.is_lean or picks_channels(model)
    usual = usual_forward(model, num_hooks, around) if may_be_last else None
    if native is None and not stages:
        with replaced_forward(model, usual) if usual else nullcontext():
            yield
        return
    leaves, own = list(trainable.values()), usual or model.forward
    mode = model.training

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            refuse_to_compile()
        if len(args) != 1 or kwargs or is_watched(model, num_hooks):
            return own(*args, **kwargs)
        out = None if native is None else native(args[0])
        if out is not None:
            return out
        is_ours = all(_has_its_leaves(stage, leaves) for stage in stages)
        if not (stages and is_ours and model.training == mode):
            return own(*args)
        if not _runs(stages, args[0]):
            return own(*args)
        return Chain.apply(args[0], stages, *leaves)  # type: ignore[no-untyped-call]  # torch has no hints here

    with replaced_forward(model, forward):
        yield


def _native(
    model: nn.Module,
    spans: Mapping[str, Spans],
    trainable: Mapping[str, Tensor],
    how: How,
    kernels: Kernels,
) -> NativeForward | None:
    """The compiled code for this model, if it may and can be used."""
    if kernels == "torch" or find().library is None or trace(model).graph is None:
        return None
    try:
        return NativeForward(model, spans, trainable, how.is_truncated, native_value)
    except NotAChainError:
        return None


def _has_its_leaves(stage: "Stage", leaves: list[Tensor]) -> bool:
    """Whether a stage's weights are those that train, not others put in for a call."""
    norm: Any = stage.link.norm
    tensors = [stage.link.layer.weight, stage.link.layer.bias]
    tensors += [norm.weight, norm.bias] if norm is not None else []
    return all(
        slot is None or getattr(tensor, "leaf", tensor) is leaves[slot]
        for tensor, slot in zip(tensors, stage.slots, strict=True)
    )


def _runs(stages: list["Stage"], x: Any) -> bool:
    """Whether the chain can run instead of the model, on this input in this mode."""
    first = stages[0].link.layer.weight
    return (
        torch.is_grad_enabled()
        and isinstance(x, Tensor)
        and x.numel() * len(first) >= MIN_VALUES
        and not x.requires_grad
        and x.dtype == first.dtype
        and (stages[0].link.flattens or x.dim() == (4 if stages[0].conv else 2))
        and not torch.is_autocast_enabled(x.device.type)
        and all(stage.link.norm is None or stage.link.norm.training for stage in stages)
    )


def _stages(
    model: nn.Module,
    links: tuple[Link, ...],
    spans: Mapping[str, Spans],
    names: list[str],
    how: How,
) -> list["Stage"]:
    """The links, and what trains in each; empty if their spans do not fit a chain."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    stages: list[Stage] = []
    for i, link in enumerate(links):
        tensors = [link.layer.weight, link.layer.bias]
        tensors += [link.norm.weight, link.norm.bias] if link.norm is not None else []
        own = ["" if t is None else name_of.get(id(t), "?") for t in tensors]
        if "?" in own or own[0] not in names:
            return []
        rows, reads = spans[own[0]][:2]
        if any(name and not is_same(spans[name][0], rows) for name in own[1:]):
            return []
        before = stages[-1] if stages else None
        stage = Stage(
            link=link,
            active=rows,
            reads=reads,
            need_out=rows if i == 0 or how.is_truncated else None,
            need_in=reads if i == 1 or how.is_truncated else None,
            is_first=i == 0,
            is_lean=how.is_lean,
            slots=tuple(names.index(n) if n in names else None for n in own),
            conv=_convolution(link.layer)
            if isinstance(link.layer, nn.Conv2d)
            else None,
        )
        if before is not None and not _follows(stage, before):
            return []
        stages.append(stage)
    if len({id(stage.link.layer) for stage in stages}) < len(stages):
        return []
    pays = any(s.active is not None or s.link.norm or s.link.has_pool for s in stages)
    return stages if pays else []


def _follows(stage: "Stage", before: "Stage") -> bool:
    """Whether a stage's trained inputs are the trained outputs of the one before.

    A table written by hand may say otherwise.
    """
    made, read = len(before.link.layer.weight), stage.link.layer.weight.shape[1]
    return is_same(stage.reads, spread(before.active, read // made))


def _convolution(layer: nn.Conv2d) -> Convolution:
    padding = layer.padding
    assert not isinstance(padding, str)
    return Convolution(layer.stride, padding, layer.dilation, False, (0, 0), 1)


@dataclass(frozen=True)
class Stage:
    """A link, and which parts of it train and need gradient.

    ``active`` are its trained outputs, ``reads`` its trained inputs; ``need_out`` and
    ``need_in`` the outputs and inputs that carry gradient at all. ``slots`` says where
    the leaves of weight, bias, norm weight and norm bias stand in the list of leaves.
    """

    link: Link
    active: Span
    reads: Span
    need_out: Span
    need_in: Span
    is_first: bool
    is_lean: bool
    slots: tuple[int | None, ...]
    conv: Convolution | None

    @property
    def weights(self) -> list[Tensor]:
        """What the backward pass reads besides what is saved."""
        norm = self.link.norm
        return [self.link.layer.weight, *([norm.weight] if norm is not None else [])]

    @property
    def active_in_need(self) -> Span:
        """The active outputs among those that carry gradient."""
        return None if self.need_out is self.active else self.active


class Chain(torch.autograd.Function):
    """The whole chain as one operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stages: list[Stage], *leaves: Tensor) -> Tensor:
        """The model's own output; keeps what the backward pass below reads."""
        saved: list[Tensor] = []
        ctx.shapes = []
        for stage in stages:
            ctx.shapes.append(x.shape)
            x = _forward(stage, x, saved)
        weights = [full_value(w) for stage in stages for w in stage.weights]
        ctx.save_for_backward(*saved, *weights)  # torch notices if they change
        ctx.stages, ctx.num_leaves, ctx.num_saved = stages, len(leaves), len(saved)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradients of the leaves."""
        saved = list(ctx.saved_tensors)[: ctx.num_saved]
        grads: list[Tensor | None] = [None] * ctx.num_leaves
        for stage, shape in zip(
            reversed(ctx.stages), reversed(ctx.shapes), strict=True
        ):
            back = _backward_map if stage.conv else _backward_flat
            grad = back(stage, grad, saved, grads, shape)
        return (None, None, *grads)


def _keep(x: Tensor, span: Span) -> Tensor:
    """The channels that the backward pass reads, in memory of their own."""
    if span is None:
        return x
    # A part of a single example is contiguous already, and must be copied as well.
    return take_span(x, 1, span).clone(memory_format=torch.contiguous_format)


def _masks(stage: Stage, *masks: Tensor) -> list[Tensor]:
    return list(map(pack, masks)) if stage.is_lean else list(masks)


def _mask(saved: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    return unpack(saved.pop(), shape)


def _forward(stage: Stage, x: Tensor, saved: list[Tensor]) -> Tensor:
    """One stage; adds what its backward pass reads to ``saved``."""
    weight, bias = (
        full_value(stage.link.layer.weight),
        full_value(stage.link.layer.bias),
    )
    need = stage.need_out
    if stage.link.flattens:
        x = x.flatten(1)
    saved.append(x if stage.is_first else _keep(x, stage.reads))
    if stage.conv is None:
        y = F.linear(x, weight, bias)
    else:
        y = stage.conv.run(x, weight, bias, rounds_as_torch=False)
    if stage.link.norm is not None:
        y = _normalised(stage, y, saved)
    if stage.link.has_pool:
        y, masks = pool(*halves(y), need)
        saved += _masks(stage, *masks)
    elif stage.link.has_relu:
        y.relu_()
        saved += _masks(stage, take_span(y, 1, need) > 0)
    return y


def _backward_flat(
    stage: Stage,
    grad: Tensor,
    saved: list[Tensor],
    grads: list[Tensor | None],
    shape: torch.Size,
) -> Tensor:
    layer = stage.link.layer
    assert isinstance(layer, nn.Linear)
    if stage.link.has_relu:
        grad = grad * _mask(saved, grad.shape)
    read = saved.pop()
    if stage.is_first:
        read = take_span(read, 1, stage.reads)
    active = take_span(grad, 1, stage.active_in_need)
    _put(grads, stage.slots[0], lambda: active.t() @ read)
    _put(grads, stage.slots[1], lambda: active.sum(0))
    if stage.is_first:
        return grad
    weight = take_spans(full_value(layer.weight), (stage.need_out, stage.need_in))
    below = grad @ weight
    return below.view(len(below), -1, *shape[2:]) if stage.link.flattens else below


def _put(grads: list[Tensor | None], slot: int | None, make: Any) -> None:
    if slot is not None:
        grads[slot] = make()


def _normalised(stage: Stage, x: Tensor, saved: list[Tensor]) -> Tensor:
    """Normalise ``x`` by the batch's statistics; in place, unless ``x`` is kept."""
    norm = stage.link.norm
    assert norm is not None
    assert norm.momentum is not None
    count = x.numel() // x.shape[1]
    if count == 1:  # PyTorch's own words
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{x.size()}"
        )
    mean, variance = centre(x, into=x)
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    track(norm.running_mean, norm.running_var, mean, variance, norm.momentum, count)
    deviation = (variance + norm.eps).rsqrt_()
    saved += [_keep(x, stage.need_out), take_span(deviation, 0, stage.need_out)]
    scale = (full_value(norm.weight) * deviation)[:, None, None]
    y = x * scale if stage.need_out is None else x.mul_(scale)
    return y.add_(full_value(norm.bias)[:, None, None])


def _backward_map(
    stage: Stage,
    grad: Tensor,
    saved: list[Tensor],
    grads: list[Tensor | None],
    shape: torch.Size,
) -> Tensor:
    layer, norm, conv = stage.link.layer, stage.link.norm, stage.conv
    assert conv is not None
    if stage.link.has_pool:
        is_alive, is_lower = _mask(saved, grad.shape), _mask(saved, grad.shape)
        count, channels, height, width = grad.shape
        is_right = _mask(saved, (count, channels, 2 * height, width))
        size = conv.size_of_output(shape, layer.weight.shape)
        grad = unpool(grad, (is_right, is_lower, is_alive), size)
    elif stage.link.has_relu:
        grad = grad * _mask(saved, grad.shape)
    if norm is not None:
        deviation, centred = saved.pop(), saved.pop()
        scale = take_span(full_value(norm.weight), 0, stage.need_out)
        norm_back = batch_norm_back_ if stage.is_lean else batch_norm_back
        grad, *found = norm_back(grad, centred, scale, deviation)
        for slot, values in zip(stage.slots[2:], found, strict=True):
            if slot is not None:
                grads[slot] = take_span(values, 0, stage.active_in_need)
    read = saved.pop()
    active = take_span(grad, 1, stage.active_in_need)
    weight = full_value(layer.weight)
    if stage.slots[0] is not None:
        size = (active.shape[1], read.shape[1], *weight.shape[2:])
        grads[stage.slots[0]] = conv.grad_weight(active, read, size, 1)
    _put(grads, stage.slots[1], lambda: active.sum((0, 2, 3)))
    if stage.is_first:
        return grad
    block = take_spans(weight, (stage.need_out, stage.need_in))
    below = torch.Size((shape[0], num_in(stage.need_in, shape[1]), *shape[2:]))
    return conv.grad_input(grad, below, block, 1)


def full_value(weight: Any) -> Any:
    """The full value of a parameter, partial or not, without a gradient."""
    if weight is None:
        return None
    if not isinstance(weight, PartialWeight):
        return weight.detach()
    weight.path = "chain"
    return weight.now()


def native_value(weight: Any) -> Tensor:
    """The same for the compiled code."""
    value: Tensor = full_value(weight)
    if isinstance(weight, PartialWeight):
        weight.path = "native"
    return value
