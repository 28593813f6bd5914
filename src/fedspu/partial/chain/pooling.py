"""A 2x2 max-pool of a ReLU by comparing halves of a map.

PyTorch's own takes ten times as long in the usual memory layout.
"""

import torch
from torch import Tensor

from fedspu.partial.spans import Span, take_span

Masks = tuple[Tensor, Tensor, Tensor]
"""Whether the right of two neighbours wins, the lower of two, and any one at all."""


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The left and right of each two columns; an odd last row or column is left out."""
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    return x[:, :, :height, 0:width:2], x[:, :, :height, 1:width:2]


def pool(left: Tensor, right: Tensor, need: Span) -> tuple[Tensor, Masks]:
    """The largest of each four, at least 0; and which of them it is, where needed.

    As ``max_pool2d(relu(x), 2)``: the first of equals wins, and none if all are <= 0.
    """
    is_right = take_span(right, 1, need) > take_span(left, 1, need)
    best = torch.maximum(left, right)
    top, bottom = best[:, :, 0::2], best[:, :, 1::2]
    is_lower = take_span(bottom, 1, need) > take_span(top, 1, need)
    best = torch.maximum(top, bottom)
    return best.relu_(), (is_right, is_lower, take_span(best, 1, need) > 0)


def unpool(grad: Tensor, masks: Masks, size: tuple[int, ...]) -> Tensor:
    """Maps of this size with each gradient at its winner's place; zero elsewhere."""
    is_right, is_lower, is_alive = masks
    grad = grad * is_alive
    rows = grad.new_empty(is_right.shape)
    lower = torch.mul(grad, is_lower, out=rows[:, :, 1::2])
    torch.sub(grad, lower, out=rows[:, :, 0::2])
    is_even = all(side % 2 == 0 for side in size)
    whole = (grad.new_empty if is_even else grad.new_zeros)((*grad.shape[:2], *size))
    left, right = halves(whole)
    torch.mul(rows, is_right, out=right)
    torch.sub(rows, right, out=left)
    return whole
