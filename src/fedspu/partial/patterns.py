"""Gates and RMS norms, found in a forward pass, with one backward pass for each.

Models write these in several operations: ``silu(gate) * up``, and ``weight * (x *
rsqrt(mean(x ** 2) + eps))``. Their forward pass is the model's own. Backward, PyTorch
passes all values through memory for each operation; compiled code does it once.

What a product was made of is read from PyTorch's own graph, which keeps the tensors
themselves. Nothing is replaced if someone looks at a gradient in between.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedspu.compiled.library import find
from fedspu.partial.remake import is_looked_at
from fedspu.partial.spans import Span, take_span
from fedspu.partial.weight import PartialWeight

MIN_VALUES = 1 << 14
"""With fewer values, PyTorch's own operations are as fast."""

_ACTIVATIONS = {
    ("SiluBackward0", None): 0,
    ("GeluBackward0", "none"): 1,
    ("GeluBackward0", "tanh"): 2,
}
"""The activations of gates that have compiled code, and their number there."""


# Gates --------------------------------------------------------------------------------


def with_quick_gate(y: Tensor) -> Tensor:
    """The same values; if they are a gate's, with one backward pass for all of it."""
    if y.numel() < MIN_VALUES or not _fits(y) or is_looked_at(y):
        return y
    try:
        found = _gate(y)
    except RuntimeError:  # a factor was changed in place: PyTorch will say so
        return y
    if found is None or not all(_fits(x) and x.shape == y.shape for x in found[1:]):
        return y
    gate: Tensor = _Gate.apply(*found[1:], y.detach(), found[0])  # type: ignore[no-untyped-call]  # torch has no hints here
    return gate


def _gate(y: Tensor) -> tuple[int, Tensor, Tensor] | None:
    """The number of an activation, its input, and what it was multiplied by."""
    product = y.grad_fn
    if product is None or product.name() != "MulBackward0":
        return None
    factors = _saved(product, "self"), _saved(product, "other")
    for this, other in (factors, factors[::-1]):
        if this is None or other is None or this.grad_fn is None:
            continue
        made_by = this.grad_fn
        kind = (made_by.name(), getattr(made_by, "_saved_approximate", None))
        if kind in _ACTIVATIONS and not is_looked_at(this):
            x = _saved(made_by, "self")
            return None if x is None else (_ACTIVATIONS[kind], x, other)
    return None


class _Gate(torch.autograd.Function):
    """``act(x) * other``, whose value is already known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, value: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(x, other)
        ctx.kind = kind
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, other = ctx.saved_tensors
        given = x, other, grad.contiguous()
        results = torch.empty_like(x), torch.empty_like(x)
        pointers = [tensor.data_ptr() for tensor in (*given, *results)]
        find().library.gate_backward(ctx.kind, x.numel(), *pointers)  # type: ignore[union-attr]
        return *results, None, None


# RMS norms ----------------------------------------------------------------------------


def rms_normed(normed: Tensor, weight: PartialWeight) -> Tensor | None:
    """The output of an RMS norm, from its normed input; None if it is no such norm."""
    if normed.numel() < MIN_VALUES or not weight.how.has_code:
        return None
    full = weight.now()
    is_usual = _fits(normed) and _fits(full)
    if not is_usual or is_looked_at(normed) or full.shape != normed.shape[-1:]:
        return None
    try:
        found = _rms(normed)
    except RuntimeError:  # as above
        return None
    if found is None or not _fits(found[0]) or found[0].shape != normed.shape:
        return None
    y: Tensor = _RmsNorm.apply(  # type: ignore[no-untyped-call]  # as above
        found[0], weight.leaf, full, found[1].detach(), normed.detach(), weight.spans[0]
    )
    return y


def _rms(normed: Tensor) -> tuple[Tensor, Tensor] | None:
    """``x`` and ``rsqrt(mean(x ** 2) + eps)``, if their product is what was given."""
    product = normed.grad_fn
    if product is None or product.name() != "MulBackward0":
        return None
    x, scale = _saved(product, "self"), _saved(product, "other")
    if x is None or scale is None or scale.shape != (*x.shape[:-1], 1):
        return None
    root = scale.grad_fn
    steps = ["RsqrtBackward0", "AddBackward0", "MeanBackward1", "PowBackward0"]
    node: Any = root
    for i, name in enumerate(steps):
        if node is None or node.name() != name:
            return None
        if name == "AddBackward0" and node.next_functions[1][0] is not None:
            return None  # two tensors are added
        if name == "MeanBackward1" and _last_axis(node, x) is None:
            return None
        if i < len(steps) - 1:
            node = node.next_functions[0][0]
    is_square = node._saved_exponent == 2 and _saved(node, "self") is x
    return (x, scale) if is_square and not is_looked_at(scale) else None


def _last_axis(mean: Any, x: Tensor) -> int | None:
    """The axis of a mean, if that is the last one of ``x``; None otherwise."""
    dims = mean._saved_dim
    size = 1 << 64
    is_last = len(dims) == 1 and dims[0] in (-1, x.dim() - 1, size - 1)
    return x.dim() - 1 if is_last else None


class _RmsNorm(torch.autograd.Function):
    """``weight * normed``, of which the normed input is already known."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        leaf: Tensor,
        weight: Tensor,
        scale: Tensor,
        normed: Tensor,
        span: Span,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, scale)
        ctx.span = span
        return weight * normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        given = x, weight, scale.contiguous(), grad.contiguous(), grad_x, grad_weight
        pointers = [tensor.data_ptr() for tensor in given]
        width = x.shape[-1]
        rows = x.numel() // width
        if find().library.rms_backward(rows, width, *pointers):  # type: ignore[union-attr]
            raise MemoryError("not enough memory for a training step")
        return grad_x, take_span(grad_weight, 0, ctx.span).clone(), *[None] * 4


# The graph of a forward pass ----------------------------------------------------------


def _fits(x: Tensor) -> bool:
    """Whether compiled code can read a tensor."""
    return x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()


def _saved(node: Any, name: str) -> Tensor | None:
    """A tensor that an operation keeps for its backward pass; None if it has none.

    Hooks on what is saved (a checkpoint's, say) must not be called now.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    found = getattr(node, f"_saved_{name}", None)
    return found if isinstance(found, Tensor) else None
