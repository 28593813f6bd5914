"""Norms that compute gradients only for active weights and needed channels.

PyTorch's own batch norm computes a map's statistics value by value; two passes of
vectorised sums give the same numbers in a fraction of the time.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedspu.partial.block_gradients import fill
from fedspu.partial.memory_format import is_last
from fedspu.partial.remake import Remake
from fedspu.partial.spans import Span, take_span
from fedspu.partial.weight import Arguments, Piece


def centre(x: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """Write ``x`` minus each channel's mean to ``into``; return mean and variance."""
    count = x.numel() // x.shape[1]
    mean = x.flatten(2).sum((0, 2)) / count
    torch.sub(x, along_channels(mean, x), out=into)
    lengths = torch.linalg.vector_norm(into.flatten(2), dim=-1)
    return mean, lengths.square_().sum(0) / count


def track(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    count: int,
) -> None:
    """Move the running statistics towards a batch of ``count`` values per channel."""
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * (count / (count - 1)), momentum)


def batch_norm_back(
    grad: Tensor, centred: Tensor, weight: Tensor, deviation: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a batch norm's input, weight and bias."""
    nowhere = torch.zeros_like(deviation)  # the mean is already subtracted
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
        grad,
        centred,
        weight,
        None,
        None,
        nowhere,
        deviation,
        True,
        0.0,
        [True, True, True],
    )
    return found


def batch_norm_back_(
    grad: Tensor, centred: Tensor, weight: Tensor, deviation: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, in place in ``grad``, with one more tensor of its size in memory."""
    count = grad.numel() // grad.shape[1]
    grad_bias = grad.flatten(2).sum((0, 2))
    product = grad * centred
    grad_weight = product.flatten(2).sum((0, 2)) * deviation
    scale = weight * deviation
    slope = along_channels(grad_weight * deviation * scale / count, grad)
    torch.mul(centred, slope, out=product)
    product.add_(along_channels(grad_bias * scale / count, grad))
    return grad.mul_(along_channels(scale, grad)).sub_(product), grad_weight, grad_bias


def along_channels(values: Tensor, like: Tensor) -> Tensor:
    """One value per channel, in the shape that broadcasts over maps."""
    return values.view(-1, *[1] * (like.dim() - 2))


@dataclass(frozen=True)
class NormPart:
    """Which parts of a norm's weight and bias train, and what gradient is read."""

    weight: Span
    bias: Span
    need: Span = None
    rounds_as_torch: bool = False


class BatchNormPart(torch.autograd.Function):
    """``F.batch_norm`` in training; gives its output, mean and inverse deviation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_leaf: Tensor,
        bias_leaf: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
        kept: Tensor,
        part: NormPart,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The plain operation; ``kept`` are the channels whose gradient is read."""
        if part.rounds_as_torch or is_last(x):  # PyTorch is fast if channels are last
            y, mean, deviation = torch.ops.aten.native_batch_norm(
                x, weight, bias, *running, True, momentum, eps
            )
        else:
            y = torch.empty_like(x)
            mean, variance = centre(x, into=y)
            track(*running, mean, variance, momentum, x.numel() // x.shape[1])
            deviation = (variance + eps).rsqrt_()
            y.mul_(along_channels(weight * deviation, x))
            y.add_(along_channels(bias, x))
        ctx.save_for_backward(kept, weight, mean, deviation)
        ctx.eps, ctx.part, ctx.shape = eps, part, x.shape
        ctx.mark_non_differentiable(mean, deviation)
        ctx.set_materialize_grads(False)
        return y, mean, deviation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of the leaves."""
        kept, weight, mean, deviation = ctx.saved_tensors
        part: NormPart = ctx.part
        need = part.need
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            take_span(grad, 1, need),
            kept,
            take_span(weight, 0, need),
            None,
            None,
            take_span(mean, 0, need),
            take_span(deviation, 0, need),
            True,
            ctx.eps,
            [True, True, True],
        )
        if need is None:  # else only the active channels are left
            grad_weight = take_span(grad_weight, 0, part.weight)
            grad_bias = take_span(grad_bias, 0, part.bias)
        grad_x = fill(grad_x, 1, need, ctx.shape)
        return grad_x, grad_weight, grad_bias, *[None] * 7


def make_batch_normed(
    span: Span,
    dim: int,
    x: Tensor,
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """Make some channels of a batch norm's output again."""
    scale = take_span(weight * deviation, 0, span)
    shift = take_span(bias, 0, span) - take_span(mean, 0, span) * scale
    x = take_span(x, 1, span)
    return (x * along_channels(scale, x)).add_(along_channels(shift, x))


class LayerNormPart(torch.autograd.Function):
    """``F.layer_norm`` over the last axis; gives its output, mean and deviation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_leaf: Tensor,
        bias_leaf: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        part: NormPart,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The plain operation."""
        y, mean, deviation = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, deviation)
        ctx.part = part
        ctx.mark_non_differentiable(mean, deviation)
        ctx.set_materialize_grads(False)
        return y, mean, deviation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of the leaves."""
        x, weight, bias, mean, deviation = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, mean, deviation, weight, bias, wanted
        )
        if wanted[1]:
            grad_weight = take_span(grad_weight, 0, ctx.part.weight)
        if wanted[2]:
            grad_bias = take_span(grad_bias, 0, ctx.part.bias)
        return grad_x, grad_weight, grad_bias, *[None] * 4


def layer_normed(given: Arguments) -> tuple[Tensor, Remake] | None:
    """The output of a layer norm over the last axis, and how to make it again.

    None if the norm is left to PyTorch: over more axes, or in another precision.
    """
    x = given["input"]
    weight, bias = Piece(given.get("weight")), Piece(given.get("bias"))
    if weight.full is None or bias.full is None or weight.full.dim() != 1:
        return None
    if not x.dtype == weight.full.dtype == bias.full.dtype:
        return None
    part, eps = NormPart(weight.span, bias.span), given.get("eps", 1e-5)
    y, mean, deviation = LayerNormPart.apply(  # type: ignore[no-untyped-call]  # torch has no hints here
        x, weight.leaf, bias.leaf, weight.full, bias.full, eps, part
    )
    kept = (x.detach(), mean, deviation, weight.full, bias.full)
    return y, Remake(kept, make_layer_normed, dim=x.dim() - 1)


def make_layer_normed(
    span: Span,
    dim: int,
    x: Tensor,
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """Make some channels of a layer norm's output again."""
    scaled = take_span(x, dim, span).sub(mean).mul_(deviation)
    return scaled.mul_(take_span(weight, 0, span)).add_(take_span(bias, 0, span))
