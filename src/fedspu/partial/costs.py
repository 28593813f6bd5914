"""Whether it pays to compute only the active block of a gradient."""

from math import prod

from torch import Tensor

from fedspu.partial.block_gradients import Convolution, in_groups
from fedspu.partial.spans import Span, num_in
from fedspu.partial.weight import How, Piece

MIN_PRODUCTS = 2_000_000
"""From this many multiplications in a forward pass on, our kernels are faster."""


def is_small(weight: Piece, x: Tensor, dim: int) -> bool:
    """Whether a full gradient, cut down, costs less than the overhead of a kernel."""
    if weight.how.is_truncated:
        return False  # only the kernels truncate
    assert weight.full is not None
    return x.numel() // x.shape[dim] * weight.full.numel() < MIN_PRODUCTS


def pays(
    inputs: Span, outputs: Span, full: Tensor, conv: Convolution, how: How
) -> bool:
    """Whether a convolution's gradient is faster to compute for the block alone.

    PyTorch computes channels in groups, so nothing is saved by leaving out a few; but
    taking the others out of the maps costs time. The block needs less memory anyway:
    ``lean`` gives that up only where channels are picked one by one, and most are kept.
    """
    if how.is_truncated or not conv.is_simple:
        return True
    after, before = full.shape[:2]
    is_picked = isinstance(inputs, Tensor) or isinstance(outputs, Tensor)
    keeps_less = num_in(inputs, before) <= MOST_OF_ALL_KEPT * before
    if how.is_lean and (keeps_less or not is_picked):
        return True

    def cost(*numbers: int) -> int:
        return prod(map(in_groups, numbers))

    block = cost(num_in(inputs, before), num_in(outputs, after))
    return block <= MOST_OF_ALL * cost(before, after)


MOST_OF_ALL = 0.8
"""The share of a convolution's products from which on it is computed in full."""

MOST_OF_ALL_KEPT = 0.7
"""The share of the inputs from which on to pick them saves too little memory."""
