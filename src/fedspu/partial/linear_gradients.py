"""``F.linear`` whose backward pass computes only the active block.

See ``block_gradients.py``, which has the same for convolutions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedspu.partial.block_gradients import Part, fill, read_by_part
from fedspu.partial.spans import take_span, take_spans

_MANY = 64
"""A gradient of fewer rows is not searched for zeros."""


class LinearPart(torch.autograd.Function):
    """``F.linear`` with the gradient of a part of its weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        leaf: Tensor,
        bias_leaf: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        part: Part,
    ) -> Tensor:
        """The plain operation; keeps what the active part's gradient reads."""
        out = _linear(x, weight, bias, part.rounds_as_torch)
        # Only now: after the product, the input is in the cache.
        kept, ctx.read = read_by_part(x, -1, part.inputs)
        ctx.save_for_backward(weight, *kept)
        ctx.part, ctx.shape = part, x.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of the leaves."""
        weight, *kept = ctx.saved_tensors
        part: Part = ctx.part
        whole = grad.reshape(-1, grad.shape[-1])
        rows = rows_that_matter(whole)
        if rows is not None:
            whole = whole.index_select(0, rows)
        active = take_span(whole, 1, part.outputs)
        grad_x = grad_leaf = grad_bias = None
        if ctx.needs_input_grad[0]:
            if part.is_truncated:
                block = take_spans(weight, (part.rows, part.columns))
                shape = torch.Size((len(whole), ctx.shape[-1]))
                grad_x = fill(active @ block, 1, part.inputs, shape)
            else:
                grad_x = whole @ weight
            if rows is not None:
                zeros = grad_x.new_zeros(grad.numel() // grad.shape[-1], ctx.shape[-1])
                grad_x = zeros.index_copy_(0, rows, grad_x)
            grad_x = grad_x.view(ctx.shape)
        if ctx.needs_input_grad[1]:
            read = ctx.read(*kept)
            read = read.reshape(-1, read.shape[-1])
            if rows is not None:
                read = read.index_select(0, rows)
            grad_leaf = active.t() @ read
        if ctx.needs_input_grad[2]:
            grad_bias = take_span(whole, 1, part.bias).sum(0)
        return grad_x, grad_leaf, grad_bias, None, None, None


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rounds_as_torch: bool
) -> Tensor:
    """``F.linear``, which writes a bias to all of its output before the product.

    To add it afterwards, while the output is in the cache, takes less time.
    """
    is_usual = x.dtype in (torch.float32, torch.float64) and x.is_cpu
    if bias is None or rounds_as_torch or not is_usual:
        return F.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], len(weight))
    flat = out.view(-1, len(weight))
    torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out=flat)
    flat.add_(bias)
    return out


def rows_that_matter(grad: Tensor) -> Tensor | None:
    """The rows of a gradient that are not zero; None if that may be most of them.

    Where the loss reads one token of a sequence, or padding is left out of it, most
    rows are zero: they add nothing to any product.
    """
    if len(grad) < _MANY or not grad.is_cpu:
        return None
    sample = grad[::8, 0]
    if 2 * int(sample.count_nonzero()) > len(sample):
        return None
    rows = grad.abs().amax(1).nonzero().flatten()  # NaN is not zero
    return rows if 2 * len(rows) <= len(grad) else None
