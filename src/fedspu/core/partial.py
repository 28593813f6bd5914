"""Train the active part of a model; everything else is held still.

Inside ``partial_training`` each parameter with frozen entries is a ``PartialWeight``:
it reads as the full weight everywhere, while the value that trains is a small leaf, its
active block. An operation on the weight sends gradient to the leaf alone, so frozen
entries have no gradient and no optimizer state, whatever the optimizer.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedspu.core.blocks import Where, put, take
from fedspu.core.neurons import Neurons
from fedspu.core.types import Active
from fedspu.errors import ModelError

Mode = Literal["exact", "truncated"]


@contextmanager
def partial_training(
    model: nn.Module, neurons: Neurons, active: Active, mode: Mode = "exact"
) -> Iterator[list[Tensor]]:
    """Yield the trainable tensors of ``model``: the active blocks of its parameters.

    Give them to any optimizer; use ``model`` as ever. On leaving, also by an exception,
    the model has its own parameters back, with the new values in the active blocks and
    every other learnable entry bit for bit as before.

    ``exact`` is the true gradient of the active entries (the paper's Eq. 4).
    ``truncated`` also stops it at frozen neurons: a weighted layer passes gradient only
    from active outputs to active inputs. It is cheaper and an approximation.
    """
    if mode not in ("exact", "truncated"):
        raise ModelError(f"mode = {mode!r}: expected exact or truncated")
    blocks = neurons.blocks(active)
    own = dict(model.named_parameters())
    _check_fits(own, neurons)
    trainable: list[Tensor] = []
    replaced: dict[int, PartialWeight] = {}
    for name, parameter in own.items():
        if not parameter.requires_grad:
            continue
        if name not in blocks or all(axis is None for axis in blocks[name]):
            trainable.append(parameter)
        else:
            weight = PartialWeight.of(parameter, blocks[name], mode)
            replaced[id(parameter)] = weight
            trainable.append(weight.leaf)
    places = _places(model, replaced)
    for layer, name, parameter in places:
        _assign(layer, name, replaced[id(parameter)])
    try:
        yield trainable
    finally:
        for weight in replaced.values():
            weight.write_back()
        for layer, name, parameter in places:
            _assign(layer, name, parameter)


def _check_fits(own: Mapping[str, Tensor], neurons: Neurons) -> None:
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


def _places(
    model: nn.Module, replaced: Mapping[int, Any]
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Every place in the model that holds one of the parameters; shared ones often."""
    return [
        (layer, name, parameter)
        for layer in model.modules()
        for name, parameter in layer._parameters.items()
        if id(parameter) in replaced and parameter is not None
    ]


def _assign(layer: nn.Module, name: str, value: Any) -> None:
    layer._parameters[name] = value
    if isinstance(layer, nn.RNNBase):  # it keeps a list of its weights besides
        layer._flat_weights[layer._flat_weights_names.index(name)] = value


class PartialWeight(Tensor):
    """A parameter of which only one block trains: ``leaf``.

    Reads as the full weight in every operation.
    """

    leaf: Tensor
    full: Tensor
    block: Where
    gradient: Mode
    written: int

    @staticmethod
    def of(parameter: nn.Parameter, where: Where, mode: Mode) -> "PartialWeight":
        """Stand in for ``parameter``, whose memory it shares."""
        full = parameter.detach()
        weight = full.as_subclass(PartialWeight)
        weight.full, weight.block, weight.gradient = full, where, mode
        weight.leaf = take(full, where).requires_grad_()
        weight.written = weight.leaf._version
        return weight

    def write_back(self) -> None:
        """Put the leaf's values into the full weight."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            put(self.full, self.block, self.leaf)
            self.written = self.leaf._version

    def value(self) -> Tensor:
        """The full weight as it is now, sending its block's gradient to the leaf."""
        if self.leaf._version != self.written:
            self.write_back()
        value: Tensor = _Full.apply(self.leaf, self.full, self.block)  # type: ignore[no-untyped-call]  # torch has no hints here
        return value

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` on full weights; in truncated mode cut a layer's gradient."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PROPERTIES:
                return func(*args, **kwargs)
            if func in _TRUNCATED:
                names, run = _TRUNCATED[func]
                given = dict(zip(names, args, strict=False)) | kwargs
                if any(_is_truncated(value) for value in given.values()):
                    return run(func, given)
            return func(*_plain(args), **_plain(kwargs))


_PROPERTIES = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "grad", "is_leaf", "requires_grad")
}


class _Full(torch.autograd.Function):
    """The full weight; its gradient is cut down to the leaf's block."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, full: Tensor, where: Where) -> Tensor:
        ctx.where = where
        return full.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return take(grad, ctx.where), None, None


def _plain(value: Any) -> Any:
    """The same nested value with full weights in the place of partial ones."""
    if isinstance(value, PartialWeight):
        return value.value()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_plain(item) for item in value)
    return value


# The truncated gradient ---------------------------------------------------------------


def _is_truncated(value: Any) -> bool:
    return isinstance(value, PartialWeight) and value.gradient == "truncated"


def _where(weight: Any) -> Where:
    """The active positions along a weight's axes; a plain tensor is all active."""
    if isinstance(weight, PartialWeight):
        return weight.block
    return (None,) * weight.dim() if isinstance(weight, Tensor) else (None, None)


class _Cut(torch.autograd.Function):
    """The identity; backward keeps the gradient at some positions of one axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, positions: Tensor) -> Tensor:
        ctx.dim, ctx.positions = dim, positions
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        kept = grad.index_select(ctx.dim, ctx.positions)
        cut = torch.zeros_like(grad).index_copy(ctx.dim, ctx.positions, kept)
        return cut, None, None


def _cut(x: Tensor, dim: int, positions: Tensor | None) -> Tensor:
    if positions is None:
        return x
    result: Tensor = _Cut.apply(x, dim, positions.to(x.device))  # type: ignore[no-untyped-call]  # torch has no hints here
    return result


Arguments = dict[str, Any]


def _linear(func: Any, given: Arguments) -> Tensor:
    rows, columns = _where(given["weight"])
    given["input"] = _cut(given["input"], -1, columns)
    return _cut(func(**_plain(given)), -1, rows)


def _convolution(func: Any, given: Arguments) -> Tensor:
    weight, groups = given["weight"], given.get("groups", 1)
    is_transposed = "transpose" in func.__name__
    ins, outs = _channels(_where(weight), weight.shape, groups, is_transposed)
    dim = given["input"].dim() - weight.dim() + 1  # one less if not batched
    given["input"] = _cut(given["input"], dim, ins)
    return _cut(func(**_plain(given)), dim, outs)


def _channels(
    where: Where, shape: torch.Size, groups: int, is_transposed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The active input and output channels of a convolution."""
    along, local = where[:2]
    width, per_group = shape[1], shape[0] // groups
    if groups > 1 and is_transposed and per_group == 1:  # depthwise: in owns out
        return along, _spread(along, width)
    if groups > 1 and not is_transposed and width == 1:
        return None if along is None else torch.unique(along // per_group), along
    if local is not None and groups > 1:  # one local index stands for every group
        local = torch.cat([local + group * width for group in range(groups)])
    return (along, local) if is_transposed else (local, along)


def _spread(positions: Tensor | None, width: int) -> Tensor | None:
    if positions is None:
        return None
    return (positions[:, None] * width + torch.arange(width)).flatten()


def _attention(func: Any, given: Arguments) -> Any:
    """Cut the stream on both sides, and each head where the output layer reads it.

    Heads do not mix before that, so no gradient reaches a frozen one.
    """
    reads = [given.get(f"{name}_proj_weight") for name in "qkv"]
    if given.get("in_proj_weight") is not None:
        reads = [given["in_proj_weight"]] * 3
    cut: dict[tuple[int, int], Tensor] = {}  # equal inputs stay one object
    for name, weight in zip(("query", "key", "value"), reads, strict=True):
        key = (id(given[name]), id(weight))
        if key not in cut:
            cut[key] = _cut(given[name], -1, _where(weight)[1])
        given[name] = cut[key]
    rows, columns = _where(given["out_proj_weight"])
    given = _plain(given)
    with _HeadCut(given["out_proj_weight"], columns):
        out, weights = func(**given)
    return _cut(out, -1, rows), weights


class _HeadCut(TorchFunctionMode):
    """Cuts the input of the linear operation that uses one particular weight."""

    def __init__(self, weight: Tensor, columns: Tensor | None) -> None:
        self.weight, self.columns = weight, columns

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and args[1] is self.weight:
            args = (_cut(args[0], -1, self.columns), *args[1:])
        return func(*args, **(kwargs or {}))


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
_ATTENTION = tuple(signature(F.multi_head_attention_forward).parameters)

_TRUNCATED: dict[Any, tuple[tuple[str, ...], Callable[[Any, Arguments], Any]]] = {
    F.linear: (_LINEAR, _linear),
    F.conv1d: (_CONV, _convolution),
    F.conv2d: (_CONV, _convolution),
    F.conv3d: (_CONV, _convolution),
    F.conv_transpose1d: (_CONV_TRANSPOSE, _convolution),
    F.conv_transpose2d: (_CONV_TRANSPOSE, _convolution),
    F.conv_transpose3d: (_CONV_TRANSPOSE, _convolution),
    F.multi_head_attention_forward: (_ATTENTION, _attention),
}
"""Weighted operations: their arguments' names, and how each is cut."""
