"""Keep as little as possible for the backward pass.

Inside a forward pass of a lean model every operation is intercepted. ReLUs and dropout
keep one bit per value, max-pools one byte. The outputs of norms and smooth activations
carry a note of how to make them again, so the layer that reads them keeps nothing. All
other operations run as usual.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fedspu.compiled.clamps import clamped, clamped_back, format_of
from fedspu.partial.block_gradients import fill
from fedspu.partial.interception import replaced_forward
from fedspu.partial.norms import layer_normed
from fedspu.partial.operations import batch_normed
from fedspu.partial.remake import (
    Remake,
    is_in_checkpoint,
    need_of,
    note,
    pack,
    remake_of,
    transposed,
    unpack,
)
from fedspu.partial.spans import Span, is_same, take_span
from fedspu.partial.weight import OPERATIONS, Arguments, How


@contextmanager
def lean_forward(model: nn.Module, how: How) -> Iterator[None]:
    """Inside, forward passes of the model keep as little as possible."""
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        with _Lean(how):
            return own(*args, **kwargs)

    with replaced_forward(model, forward):
        yield


class _Lean(TorchFunctionMode):
    """Sees every operation, and runs some of them in its own way."""

    def __init__(self, how: How) -> None:
        super().__init__()
        self.how = how

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if is_in_checkpoint():
            return func(*args, **kwargs)
        names, run = _LEAN.get(func, ((), None))
        given = dict(zip(names, args, strict=False)) | kwargs
        if run is not None and len(args) <= len(names) and names[0] in given:
            if func in OPERATIONS:
                given["how"] = self.how
            out = run(func, given)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)


# ReLU, and what is like it ------------------------------------------------------------


def _relu(func: Any, given: Arguments) -> Any:
    is_in_place = given.get("inplace", False) or func.__name__ == "relu_"
    return _clamped(given["input"], 0.0, float("inf"), is_in_place)


def _hardtanh(func: Any, given: Arguments) -> Any:
    low, high = given.get("min_val", -1.0), given.get("max_val", 1.0)
    return _clamped(given["input"], low, high, given.get("inplace", False))


def _relu6(func: Any, given: Arguments) -> Any:
    return _clamped(given["input"], 0.0, 6.0, given.get("inplace", False))


def _clamped(x: Tensor, low: float, high: float, is_in_place: bool) -> Any:
    if not x.requires_grad or (is_in_place and x.is_leaf):
        return NotImplemented
    need, remake = need_of(x), remake_of(x)
    y: Tensor = _Clamp.apply(x, low, high, need, is_in_place)  # type: ignore[no-untyped-call]  # torch has no hints here
    if remake is not None:
        make = partial(_make_clamped, remake.make, low, high)
        remake = Remake(remake.tensors, make, remake.dim, remake.has)
    return note(y, remake, need)


def _make_clamped(
    make: Callable[..., Tensor],
    low: float,
    high: float,
    span: Span,
    dim: int,
    *kept: Tensor,
) -> Tensor:
    return make(span, dim, *kept).clamp_(low, high)


class _Clamp(torch.autograd.Function):
    """A clamp that keeps one bit per value: whether it is strictly inside."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, low: float, high: float, need: Span, is_in_place: bool
    ) -> Tensor:
        if is_in_place:
            ctx.mark_dirty(x)
        ctx.need, ctx.shape, ctx.order = need, x.shape, None
        if need is None and (done := clamped(x, low, high, is_in_place)) is not None:
            y, bits = done
            ctx.save_for_backward(bits)
            ctx.order = format_of(x)
            return y
        y = x.clamp_(low, high) if is_in_place else x.clamp(low, high)
        seen = take_span(y, 1, need)
        mask = seen > low
        if high != float("inf"):
            mask &= seen < high
        ctx.save_for_backward(pack(mask))
        ctx.kept_shape = mask.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        if ctx.order is not None:
            return clamped_back(bits, grad, ctx.order), None, None, None, None
        mask = unpack(bits, ctx.kept_shape)
        grad = take_span(grad, 1, ctx.need) * mask
        return fill(grad, 1, ctx.need, ctx.shape), None, None, None, None


# Dropout ------------------------------------------------------------------------------


def _dropout(func: Any, given: Arguments) -> Any:
    x, p = given["input"], given.get("p", 0.5)
    is_usual = given.get("training", True) and not given.get("inplace", False)
    if not is_usual or not x.requires_grad or not 0 < p < 1:
        return NotImplemented
    return _Dropout.apply(x, p)  # type: ignore[no-untyped-call]  # as above


class _Dropout(torch.autograd.Function):
    """Dropout that keeps one bit per value, and draws the same masks as PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        noise = torch.empty_like(x).bernoulli_(1 - p)
        ctx.save_for_backward(pack(noise.contiguous() > 0))
        ctx.p, ctx.shape = p, x.shape
        return x * noise.div_(1 - p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask = unpack(ctx.saved_tensors[0], ctx.shape)
        return grad * mask / (1 - ctx.p), None


# Max-pool -----------------------------------------------------------------------------


def _max_pool(func: Any, given: Arguments) -> Any:
    x, size = given["input"], _pair(given["kernel_size"])
    stride = _pair(given.get("stride") or size)
    padding, dilation = _pair(given.get("padding", 0)), _pair(given.get("dilation", 1))
    is_usual = not given.get("return_indices", False) and size[0] * size[1] < 256
    if not is_usual or not x.requires_grad or x.dim() != 4:
        return NotImplemented
    numbers = (size, stride, padding, dilation, given.get("ceil_mode", False))
    return _MaxPool.apply(x, numbers)  # type: ignore[no-untyped-call]  # as above


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second


class _MaxPool(torch.autograd.Function):
    """A max-pool that keeps a byte for each winner: its place in the window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: tuple[Any, ...]) -> Tensor:
        y: Tensor
        y, winners = torch.ops.aten.max_pool2d_with_indices(x, *numbers)
        rows, columns = _first_of_window(winners, numbers)
        (_, width), _, _, gaps, _ = numbers
        row = (winners // x.shape[3] - rows) // gaps[0]
        column = (winners % x.shape[3] - columns) // gaps[1]
        ctx.save_for_backward((row * width + column).to(torch.uint8))
        ctx.numbers, ctx.shape = numbers, x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        place = ctx.saved_tensors[0].long()
        (_, width), _, _, gaps, _ = ctx.numbers
        rows, columns = _first_of_window(place, ctx.numbers)
        row, column = rows + place // width * gaps[0], columns + place % width * gaps[1]
        like = grad.new_empty(1).expand(ctx.shape)
        found: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            grad, like, *ctx.numbers, row * ctx.shape[3] + column
        )
        return found, None


def _first_of_window(out: Tensor, numbers: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The row, and the column, of the input at which each window begins."""
    _, stride, padding, _, _ = numbers
    rows = torch.arange(out.shape[2], device=out.device) * stride[0] - padding[0]
    columns = torch.arange(out.shape[3], device=out.device) * stride[1] - padding[1]
    return rows[:, None], columns


# Norms, and activations that keep their input -----------------------------------------


def _batch_norm(func: Any, given: Arguments) -> Any:
    done = batch_normed(given)
    if done is None:
        return NotImplemented
    y, remake = done
    return note(y, remake, need_of(y))


def _layer_norm(func: Any, given: Arguments) -> Any:
    done = layer_normed(given)
    if done is None:
        return NotImplemented
    y, remake = done
    return note(y, remake)


def _smooth(func: Any, given: Arguments) -> Any:
    """An activation whose own backward pass keeps its input."""
    if given.get("inplace", False):
        return NotImplemented
    y: Tensor = func(**given)
    rest = {key: value for key, value in given.items() if key != "input"}
    make = partial(_make_smooth, func, rest)
    return note(y, Remake((given["input"].detach(),), make, dim=None))


def _make_smooth(func: Any, rest: Arguments, span: Span, dim: int, x: Tensor) -> Tensor:
    made: Tensor = func(take_span(x, dim, span), **rest)
    return made


# Sums, and weighted layers ------------------------------------------------------------


def _add(func: Any, given: Arguments) -> Any:
    """A sum; it needs only some channels of its gradient if both terms need these."""
    terms = given["input"], given["other"]
    if not all(isinstance(term, Tensor) for term in terms):
        return NotImplemented
    if terms[0].shape != terms[1].shape:
        return NotImplemented
    first, second = map(need_of, terms)
    rest = {k: v for k, v in given.items() if k not in ("input", "other")}
    out = func(*terms, **rest)
    return note(out, need=first) if is_same(first, second) else out


def _transpose(func: Any, given: Arguments) -> Any:
    dims: Any = given.get("dim0"), given.get("dim1")
    if not all(isinstance(dim, int) for dim in dims):
        return NotImplemented
    return transposed(given["input"], *dims)


def _weighted(func: Any, given: Arguments) -> Any:
    """A weighted layer, partial or whole, whose input can be made again."""
    if remake_of(given["input"]) is None:
        return NotImplemented
    return OPERATIONS[func][1](func, given)


_ONE = ("input", "inplace")
_SUM = ("input", "other")
_DIMS = ("input", "dim0", "dim1")
_WEIGHTED = (F.linear, F.conv1d, F.conv2d, F.conv3d)
_SMOOTH = (F.gelu, F.silu, F.elu, F.leaky_relu, F.mish, F.softplus, F.hardswish)

_LEAN: dict[Any, tuple[tuple[str, ...], Callable[[Any, Arguments], Any]]] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_), (_ONE, _relu)),
    **dict.fromkeys((Tensor.relu, Tensor.relu_), (_ONE, _relu)),
    F.relu6: (_ONE, _relu6),
    F.hardtanh: (tuple(signature(F.hardtanh).parameters), _hardtanh),
    F.dropout: (tuple(signature(F.dropout).parameters), _dropout),
    F.max_pool2d: (
        ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"),
        _max_pool,
    ),
    F.batch_norm: (tuple(signature(F.batch_norm).parameters), _batch_norm),
    F.layer_norm: (tuple(signature(F.layer_norm).parameters), _layer_norm),
    **dict.fromkeys(_SMOOTH, (("input",), _smooth)),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_), (_SUM, _add)),
    **dict.fromkeys((torch.transpose, Tensor.transpose), (_DIMS, _transpose)),
    **{f: (OPERATIONS[f][0], _weighted) for f in _WEIGHTED},
}
