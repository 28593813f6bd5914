"""Clamps that keep one bit per value, in one pass each; the numbers are PyTorch's."""

import torch
from torch import Tensor

from fedspu.compiled.library import loaded


def clamped(
    x: Tensor, low: float, high: float, is_in_place: bool
) -> tuple[Tensor, Tensor] | None:
    """A tensor clamped, and bits: which values are strictly inside of the limits.

    None if the compiled code is not there, or cannot read the tensor.
    """
    library = loaded()
    if library is None or x.dtype != torch.float32 or not x.is_cpu:
        return None
    if not x.is_contiguous(memory_format=format_of(x)):
        return None
    y = x if is_in_place else torch.empty_like(x)
    bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8)
    pointers = y.data_ptr(), bits.data_ptr()
    library.clamp_forward(x.numel(), x.data_ptr(), low, high, *pointers)
    return y, bits


def format_of(x: Tensor) -> torch.memory_format:
    """The order of a tensor's values in memory."""
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def clamped_back(bits: Tensor, grad: Tensor, order: torch.memory_format) -> Tensor:
    """The gradient of the clamp's input, from the bits that ``clamped`` returned.

    ``order``: the one of the input's values in memory.
    """
    library = loaded()
    assert library is not None
    grad = grad.contiguous(memory_format=order)
    grad_x = torch.empty_like(grad)
    pointers = bits.data_ptr(), grad.data_ptr(), grad_x.data_ptr()
    library.clamp_backward(grad.numel(), *pointers)
    return grad_x
