"""Train the active part of a model; everything else is held still, and costs less.

Inside ``partial_training`` each parameter with frozen entries is a ``PartialWeight``:
it reads as the full weight everywhere, while the value that trains is a leaf, its
active block. Weighted operations (``kernels.py``) compute the block's gradient alone;
any other operation on the weight computes the full gradient and passes the block's part
on. So frozen entries have no gradient and no optimizer state, whatever the optimizer,
and functional calls, tied weights and layers used twice need nothing of their own.
Small networks that are one chain of layers take a path of their own (``chain.py``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fedspu.core.attention import multi_head
from fedspu.core.blocks import mesh
from fedspu.core.chain import running_chain
from fedspu.core.kernels import (
    Convolution,
    ConvolutionPart,
    EmbeddingPart,
    LinearPart,
    Part,
    fill,
)
from fedspu.core.layout import (
    Arrangement,
    Layout,
    Span,
    Spans,
    arrange,
    num_in,
    positions_of,
    take_span,
    take_spans,
)
from fedspu.core.neurons import Neurons
from fedspu.core.probe import all_tensors
from fedspu.core.types import Active
from fedspu.errors import ModelError

Mode = Literal["exact", "truncated"]


@contextmanager
def partial_training(
    model: nn.Module,
    neurons: Neurons,
    active: Active,
    mode: Mode = "exact",
    layout: Layout = "auto",
) -> Iterator[list[Tensor]]:
    """Yield the trainable tensors of ``model``: the active blocks of its parameters.

    Give them to any optimizer; use ``model`` as ever. On leaving, also by an exception,
    the model has its own parameters back, with the new values in the active blocks and
    every other learnable entry bit for bit as before.

    ``exact`` is the true gradient of the active entries (the paper's Eq. 4).
    ``truncated`` also stops it at frozen neurons: a weighted layer passes gradient only
    from active outputs to active inputs. It is cheaper and an approximation.

    ``layout``: inside the context, active neurons come first wherever the table proves
    that to be a symmetry (``auto``), or all keep their places (``index``): float32 then
    rounds as in the plain model, and dropout draws the same masks.
    """
    if mode not in ("exact", "truncated"):
        raise ModelError(f"mode = {mode!r}: expected exact or truncated")
    if layout not in ("auto", "index"):
        raise ModelError(f"layout = {layout!r}: expected auto or index")
    _check_fits(model, neurons)
    neurons.blocks(active)  # refuses a choice that does not fit the table
    arrangement = arrange(model, neurons, active, layout)
    with _arranged(model, arrangement):
        order = _Order(arrangement)
        trainable, weights = _leaves(model, arrangement.spans, mode, order)
        with (
            running_chain(
                model,
                arrangement.spans,
                trainable,
                mode == "truncated",
                num_hooks=1 if arrangement.orders else 0,
            ),
            _replaced(model, weights),
            order.kept(model, weights),
            _watching_optimizers(weights.values()),
        ):
            yield list(trainable.values())


def _check_fits(model: nn.Module, neurons: Neurons) -> None:
    own = dict(model.named_parameters())
    for name, shape in neurons.shapes.items():
        if name not in neurons.statistics and (
            name not in own or tuple(own[name].shape) != shape
        ):
            found = tuple(own[name].shape) if name in own else "no such tensor"
            raise ModelError(
                f"the neuron table was made for another model: {name} is {shape} in "
                f"the table and {found} in the model; call map_neurons on this one"
            )
    if inside := [name for name, p in own.items() if isinstance(p, PartialWeight)]:
        raise ModelError(
            f"{inside[0]} is in partial training already; leave that context first"
        )


@contextmanager
def _arranged(model: nn.Module, arrangement: Arrangement) -> Iterator[None]:
    arrangement.enter(model)
    try:
        yield
    finally:
        arrangement.leave(model)


def _leaves(
    model: nn.Module, spans: Mapping[str, Spans], mode: Mode, order: "_Order"
) -> tuple[dict[str, Tensor], dict[int, "PartialWeight"]]:
    """What trains by name, and the partial weights by what they stand in for."""
    trainable: dict[str, Tensor] = {}
    weights: dict[int, PartialWeight] = {}
    for name, parameter in model.named_parameters():
        is_whole = all(span is None for span in spans[name])
        if parameter.requires_grad and is_whole:
            trainable[name] = parameter
        elif parameter.requires_grad or (mode == "truncated" and not is_whole):
            weight = PartialWeight.of(parameter, spans[name], mode)
            weight.called, weight.order = name, order
            weights[id(parameter)] = weight
            if parameter.requires_grad:
                trainable[name] = weight.leaf
    return trainable, weights


@contextmanager
def _replaced(
    model: nn.Module, weights: Mapping[int, "PartialWeight"]
) -> Iterator[None]:
    """Partial weights stand in every place of the model that holds their parameter."""
    places = [
        (layer, name, parameter)
        for layer in model.modules()
        for name, parameter in layer._parameters.items()
        if parameter is not None and id(parameter) in weights
    ]
    for layer, name, parameter in places:
        _assign(layer, name, weights[id(parameter)])
    try:
        yield
    finally:
        for weight in weights.values():
            weight.write_back()
        for layer, name, parameter in places:
            _assign(layer, name, parameter)


def _assign(layer: nn.Module, name: str, value: Any) -> None:
    layer._parameters[name] = value
    if isinstance(layer, nn.RNNBase):  # it keeps a list of its weights besides
        layer._flat_weights[layer._flat_weights_names.index(name)] = value


class _Order:
    """Shows the model's own order to whoever looks at it from outside.

    Neurons may be in another order inside a forward pass. A weight that is used outside
    of one (a penalty, a proximal term by name) and every ``state_dict()`` are in the
    model's own order; loading a state is refused.
    """

    def __init__(self, arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        self.depth = 0  # of the forward passes under way

    def seen(self, name: str, value: Tensor) -> Tensor:
        """A weight's value as it is seen from here."""
        return value if self.depth else self.arrangement.own_order(name, value)

    @contextmanager
    def kept(
        self, model: nn.Module, weights: Mapping[int, "PartialWeight"]
    ) -> Iterator[None]:
        """Inside, every layer of the model is watched."""
        names = {id(tensor): name for name, tensor in all_tensors(model)}

        def write_back(*_: Any) -> None:
            for weight in weights.values():
                weight.write_back()

        def show(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for key, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                is_plain = not isinstance(tensor, PartialWeight)  # it shows itself
                if is_plain and prefix + key in state and id(tensor) in names:
                    own = self.arrangement.own_order(
                        names[id(tensor)], state[prefix + key]
                    )
                    state[prefix + key] = own

        hooks = [model.register_load_state_dict_pre_hook(_refuse_to_load)]
        for layer in model.modules():
            hooks.append(layer.register_state_dict_pre_hook(write_back))
            if self.arrangement.orders:
                hooks.append(layer.register_state_dict_post_hook(show))
                hooks.append(layer.register_forward_pre_hook(self.enter))
                hooks.append(layer.register_forward_hook(self.leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def enter(self, *_: Any) -> None:
        """A forward pass begins."""
        self.depth += 1

    def leave(self, *_: Any) -> None:
        """A forward pass ends."""
        self.depth -= 1


def _refuse_to_load(*_: Any) -> NoReturn:
    raise ModelError(
        "a model in partial training cannot load a state; leave the context first"
    )


@contextmanager
def _watching_optimizers(weights: Iterable["PartialWeight"]) -> Iterator[None]:
    """Write leaves back after an optimizer's step; refuse one that would break them."""
    by_leaf = {id(weight.leaf): weight for weight in weights}

    def ours(group: dict[str, Any]) -> list[PartialWeight]:
        return [by_leaf[id(p)] for p in group["params"] if id(p) in by_leaf]

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("fused") and any(
                not w.leaf.is_contiguous() for w in ours(group)
            ):
                raise ModelError(
                    f"{type(optimizer).__name__}(fused=True) would write beside the "
                    "active entries; leave fused out, or use layout='index'"
                )

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for weight in ours(group):
                weight.write_back()

    hooks = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class PartialWeight(Tensor):
    """A parameter of which only one block trains: ``leaf``.

    Reads as the full weight in every operation.
    """

    leaf: Tensor
    full: Tensor
    spans: Spans
    gradient: Mode
    written: int
    called: str
    order: _Order

    @staticmethod
    def of(parameter: nn.Parameter, spans: Spans, mode: Mode) -> "PartialWeight":
        """Stand in for ``parameter``, whose memory it shares."""
        full = parameter.detach()
        weight = full.as_subclass(PartialWeight)
        weight.full, weight.spans, weight.gradient = full, spans, mode
        leaf = take_spans(full, spans).detach()
        weight.leaf = leaf.requires_grad_(parameter.requires_grad)
        weight.written = weight.leaf._version
        return weight

    @property
    def is_view(self) -> bool:
        """Whether the leaf is a part of the full weight's own memory."""
        return not any(isinstance(span, Tensor) for span in self.spans)

    def write_back(self) -> None:
        """Put the leaf's values into the full weight."""
        if self.is_view:
            return
        where = tuple(map(positions_of, self.spans))
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self.full[mesh(self.full, where)] = self.leaf
            self.written = self.leaf._version

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse: a copy would train nothing."""
        raise ModelError(
            "a model in partial training cannot be copied; leave the context first, or "
            "copy its state_dict()"
        )

    def now(self) -> Tensor:
        """The full weight as it is now, without a gradient."""
        if not self.is_view and self.leaf._version != self.written:
            self.write_back()
        return self.full

    def value(self) -> Tensor:
        """The full weight as it is now, sending its block's gradient to the leaf."""
        value: Tensor = _Full.apply(self.leaf, self.now(), self.spans)  # type: ignore[no-untyped-call]  # torch has no hints here
        return self.order.seen(self.called, value)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` on full weights; weighted operations by their own kernels."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PROPERTIES:
                return func(*args, **kwargs)
            if func in _WEIGHTED:
                names, run = _WEIGHTED[func]
                given = dict(zip(names, args, strict=False)) | kwargs
                out = run(func, given)
                if out is not NotImplemented:
                    return out
            return func(*_plain(args), **_plain(kwargs))


_PROPERTIES = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "grad", "is_leaf", "requires_grad")
}


class _Full(torch.autograd.Function):
    """The full weight; its gradient is cut down to the leaf's block."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, full: Tensor, spans: Spans) -> Tensor:
        ctx.spans = spans
        return full.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return take_spans(grad, ctx.spans).contiguous(), None, None


def _plain(value: Any) -> Any:
    """The same nested value with full weights in the place of partial ones."""
    if isinstance(value, PartialWeight):
        return value.value()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_plain(item) for item in value)
    return value


# Weighted operations ------------------------------------------------------------------

Arguments = dict[str, Any]


def _linear(func: Any, given: Arguments) -> Any:
    weight = given["weight"]
    if not isinstance(weight, PartialWeight) or _is_small(weight, given["input"], -1):
        return NotImplemented
    rows, columns = weight.spans
    bias = _Bias(given.get("bias"))
    part = Part(rows, columns, bias.span, columns, rows, _is_truncated(weight))
    x, full, offset = _in_autocast(given["input"], weight.now(), bias.full)
    return LinearPart.apply(x, weight.leaf, bias.leaf, full, offset, part)  # type: ignore[no-untyped-call]  # torch has no hints here


def _convolution(func: Any, given: Arguments) -> Any:
    weight = given["weight"]
    if not isinstance(weight, PartialWeight):
        return NotImplemented
    num_dims = weight.full.dim() - 2
    if _is_small(weight, given["input"], -num_dims - 1):
        return NotImplemented
    groups, is_transposed = given.get("groups", 1), "transpose" in func.__name__
    dilation = _tuple(given.get("dilation", 1), num_dims)
    x, full = given["input"], weight.now()
    padding = given.get("padding", 0)
    if isinstance(padding, str):
        x, padding = _pad(x, padding, full, dilation)
    conv = Convolution(
        stride=_tuple(given.get("stride", 1), num_dims),
        padding=_tuple(padding, num_dims),
        dilation=dilation,
        is_transposed=is_transposed,
        output_padding=_tuple(given.get("output_padding", 0), num_dims),
        groups=groups,
    )
    bias = _Bias(given.get("bias"))
    inputs, outputs = _channels(weight.spans, full.shape, groups, is_transposed)
    if _is_ragged(inputs, outputs, x.shape[-num_dims - 1], full, conv):
        return NotImplemented
    rows, columns = weight.spans[:2]
    part = Part(rows, columns, bias.span, inputs, outputs, _is_truncated(weight))
    is_batched = x.dim() == full.dim()
    x, full, offset = _in_autocast(x if is_batched else x[None], full, bias.full)
    out: Tensor = ConvolutionPart.apply(  # type: ignore[no-untyped-call]  # as above
        x, weight.leaf, bias.leaf, full, offset, part, conv
    )
    return out if is_batched else out[0]


def _embedding(func: Any, given: Arguments) -> Any:
    weight, padding = given["weight"], given.get("padding_idx")
    if given.get("max_norm") is not None or given.get("sparse"):
        return NotImplemented  # it renormalises, or its gradient is not dense
    if not isinstance(weight, PartialWeight) or weight.spans[0] is not None:
        return NotImplemented
    if padding is None:
        padding = -1
    elif padding < 0:
        padding += len(weight.full)
    by_frequency = bool(given.get("scale_grad_by_freq", False))
    return EmbeddingPart.apply(  # type: ignore[no-untyped-call]  # as above
        given["input"],
        weight.leaf,
        weight.now(),
        weight.spans[1],
        padding,
        by_frequency,
    )


def _attention(func: Any, given: Arguments) -> Any:
    """Attention whose projections go through our linear kernel.

    Heads do not mix between the projections, so that cutting at these is all there is
    to the truncated gradient.
    """
    if given.get("static_k") is not None or given.get("static_v") is not None:
        return NotImplemented
    is_batched = given["query"].dim() == 3
    inputs = [given[name] for name in ("query", "key", "value")]
    is_self = inputs[0] is inputs[1] and inputs[1] is inputs[2]
    inputs = [x.transpose(0, 1) if is_batched else x[None] for x in inputs]
    # Dropout's default, like the others, is that of the function stood in for.
    dropout = given["dropout_p"] if given.get("training", True) else 0.0
    out, weights = multi_head(
        _projected(given, inputs, is_self),
        lambda x: _any_linear(x, given["out_proj_weight"], given["out_proj_bias"]),
        given["num_heads"],
        bias_k=_plain(given["bias_k"]),
        bias_v=_plain(given["bias_v"]),
        add_zero_attn=given["add_zero_attn"],
        dropout=dropout,
        key_padding_mask=given.get("key_padding_mask"),
        attn_mask=given.get("attn_mask"),
        need_weights=given.get("need_weights", True),
        average_attn_weights=given.get("average_attn_weights", True),
    )
    if is_batched:
        return out.transpose(0, 1), weights
    return out[0], None if weights is None else weights[0]


def _projected(
    given: Arguments, inputs: list[Tensor], is_self: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    packed, bias = given["in_proj_weight"], given["in_proj_bias"]
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
        biases = [None] * 3 if bias is None else list(_plain(bias).chunk(3))
    elif is_self:
        q, k, v = _any_linear(inputs[0], packed, bias).chunk(3, -1)
        return q, k, v
    else:  # parts of one weight: the full gradient is computed, and cut down
        weights, biases = _plain(packed).chunk(3), [None] * 3
        if bias is not None:
            biases = list(_plain(bias).chunk(3))
        if isinstance(packed, PartialWeight) and _is_truncated(packed):
            inputs = [_cut(x, -1, packed.spans[1]) for x in inputs]
    q, k, v = map(_any_linear, inputs, weights, biases)
    return q, k, v


def _any_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear operation by our kernel where its weight is partial."""
    out = _linear(F.linear, {"input": x, "weight": weight, "bias": bias})
    if out is NotImplemented:
        return F.linear(x, _plain(weight), _plain(bias))
    kernel: Tensor = out
    return kernel


SMALLEST = 2_000_000
"""Multiplications of a forward pass from which on a kernel of ours is quicker."""


def _is_small(weight: PartialWeight, x: Tensor, dim: int) -> bool:
    """Whether a full gradient, cut down, costs less than the overhead of a kernel."""
    if _is_truncated(weight):
        return False  # only the kernels cut
    return x.numel() // x.shape[dim] * weight.full.numel() < SMALLEST


class _Bias:
    """A bias as a kernel wants it: what trains, the full value, and where."""

    def __init__(self, bias: Tensor | None) -> None:
        self.leaf, self.full, self.span = bias, bias, None
        if isinstance(bias, PartialWeight):
            self.leaf, self.full, self.span = bias.leaf, bias.now(), bias.spans[0]
        elif bias is not None:
            self.full = bias.detach()


def _is_truncated(weight: PartialWeight) -> bool:
    return weight.gradient == "truncated"


def _in_autocast(x: Tensor, *weights: Tensor | None) -> tuple[Any, ...]:
    """The same tensors in the precision that autocast asks for, if it is on."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return (x, *weights)
    low = torch.get_autocast_dtype(kind)
    return (x.to(low), *(w if w is None else w.to(low) for w in weights))


def _tuple(value: Any, length: int) -> tuple[int, ...]:
    listed = tuple(value) if isinstance(value, tuple | list) else (value,)
    return listed * length if len(listed) == 1 else listed


def _pad(
    x: Tensor, padding: str, weight: Tensor, dilation: tuple[int, ...]
) -> tuple[Tensor, Any]:
    """Padding given as a word, as numbers; what is odd is added on the right."""
    if padding == "valid":
        return x, 0
    totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if any(total % 2 for total in totals):
        x = F.pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
    return x, [total // 2 for total in totals]


def _channels(
    spans: Spans, shape: torch.Size, groups: int, is_transposed: bool
) -> tuple[Span, Span]:
    """The active input and output channels of a convolution."""
    along, local = spans[:2]
    width, per_group = shape[1], shape[0] // groups
    if groups > 1 and is_transposed and per_group == 1:  # depthwise: in owns out
        return along, _spread(along, width)
    if groups > 1 and not is_transposed and width == 1:
        return _owners(along, per_group), along
    if local is not None and groups > 1:  # one local index stands for every group
        places = positions_of(local)
        assert places is not None
        local = torch.cat([places + group * width for group in range(groups)])
    return (along, local) if is_transposed else (local, along)


def _is_ragged(
    inputs: Span, outputs: Span, width: int, weight: Tensor, conv: Convolution
) -> bool:
    """Whether some input channel of a depthwise layer has a part of its outputs active.

    So it can be where the inputs are the model's own, and each output a neuron.
    """
    if conv.groups == 1 or conv.groups != width or conv.is_transposed:
        return False
    multiple = len(weight) // width
    return num_in(outputs, len(weight)) != multiple * num_in(inputs, width)


def _spread(span: Span, width: int) -> Span:
    if span is None or isinstance(span, int):
        return None if span is None else span * width
    return (span[:, None] * width + torch.arange(width)).flatten()


def _owners(span: Span, width: int) -> Span:
    """The inputs of a depthwise layer whose outputs, ``width`` each, are active."""
    if span is None or isinstance(span, int):
        return None if span is None else span // width
    found: Tensor = torch.unique(span // width)
    return found


class _Cut(torch.autograd.Function):
    """The identity; backward keeps the gradient at some positions of one axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, span: Span) -> Tensor:
        ctx.dim, ctx.span = dim, span
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        part = take_span(grad, ctx.dim, ctx.span)
        return fill(part, ctx.dim, ctx.span, grad.shape), None, None


def _cut(x: Tensor, dim: int, span: Span) -> Tensor:
    if span is None:
        return x
    cut: Tensor = _Cut.apply(x, dim, span)  # type: ignore[no-untyped-call]  # as above
    return cut


_LINEAR = ("input", "weight", "bias")
_CONV = (*_LINEAR, "stride", "padding", "dilation", "groups")
_CONV_TRANSPOSE = (
    *_LINEAR,
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)

_WEIGHTED: dict[Any, tuple[tuple[str, ...], Callable[[Any, Arguments], Any]]] = {
    F.linear: (_LINEAR, _linear),
    F.conv1d: (_CONV, _convolution),
    F.conv2d: (_CONV, _convolution),
    F.conv3d: (_CONV, _convolution),
    F.conv_transpose1d: (_CONV_TRANSPOSE, _convolution),
    F.conv_transpose2d: (_CONV_TRANSPOSE, _convolution),
    F.conv_transpose3d: (_CONV_TRANSPOSE, _convolution),
    F.embedding: (tuple(signature(F.embedding).parameters), _embedding),
    F.multi_head_attention_forward: (
        tuple(signature(F.multi_head_attention_forward).parameters),
        _attention,
    ),
}
"""Weighted operations: their arguments' names, and what runs them here."""
