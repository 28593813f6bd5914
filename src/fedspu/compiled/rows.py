"""Work on many rows in one call, bit for bit as PyTorch does it in several.

Each function does nothing if the compiled code is not there, or cannot do it.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedspu.compiled.library import loaded

Where = tuple[Tensor | None, ...]


def scaled_rows(
    x: Tensor, rows: Tensor, mean: Sequence[float], deviation: Sequence[float]
) -> Tensor | None:
    """Some rows of bytes as floats: (byte / 255 - mean) / deviation, by channel."""
    library = loaded()
    if library is None or x.dim() < 2 or not len(rows):
        return None
    if not (_is_plain(x, torch.uint8) and _is_plain(rows, torch.int64)):
        return None
    if int(rows.min()) < 0 or int(rows.max()) >= len(x):
        return None
    channels = x.shape[1]
    numbers = np.empty((2, channels), np.float32)
    numbers[0], numbers[1] = mean, deviation
    found = torch.empty((len(rows), *x.shape[1:]))
    library.scale_rows(
        x.data_ptr(),
        rows.data_ptr(),
        len(rows),
        channels,
        prod(x.shape[2:]),
        numbers[0].ctypes.data,
        numbers[1].ctypes.data,
        found.data_ptr(),
    )
    return found


def add_blocks(
    blocks: Sequence[tuple[Sequence[int], Tensor, Where, int]],
    weight: float,
    before: Tensor,
    moved: Tensor,
    weights: Tensor,
) -> bool:
    """Add weighted differences to ``moved``, and weights to ``weights``, in place.

    ``before`` is a row of tensors; a block has the shape of a tensor, new values of
    some of its entries, where these are, and where the tensor begins in the row.
    Returns whether it was done.
    """
    library = loaded()
    if library is None or not before.is_cpu:
        return False
    described = []
    for shape, values, where, start in blocks:
        found = _block(shape, values, where)
        if found is None:
            return False
        described.append((values.data_ptr(), start, *found))
    listed = np.array(described, np.int64)
    wrong: int = library.add_blocks(
        listed.ctypes.data,
        len(listed),
        weight,
        before.data_ptr(),
        moved.data_ptr(),
        weights.data_ptr(),
    )
    return not wrong


def _block(
    shape: Sequence[int], values: Tensor, where: Where
) -> tuple[int, ...] | None:
    """A block as two axes and a width; None if it is no such block.

    An axis is a list of positions, how many these are of how many, and how far apart
    positions lie. Whole axes that follow one another are one.
    """
    if not _is_plain(values, torch.float32) or not values.numel():
        return None
    axes: list[tuple[int, int, int, int]] = []
    stride, whole = prod(shape), 1
    for size, axis in zip(shape, where, strict=True):
        stride //= size
        if axis is None:
            whole *= size
            continue
        if not _is_plain(axis, torch.int64):
            return None
        if whole > 1:
            axes.append((0, whole, whole, stride * size))
        axes.append((axis.data_ptr(), len(axis), size, stride))
        whole = 1
    counts = [count for _, count, _, _ in axes]
    if len(axes) > 2 or prod(counts) * whole != values.numel():
        return None
    first, second = [*axes, *[(0, 1, 1, 0)] * (2 - len(axes))]
    return *first, *second, whole


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether compiled code can read a tensor's values, one after the other."""
    return tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous()
