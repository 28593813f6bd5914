"""Masks kept as one bit for each value."""

import numpy as np
import torch
from torch import Tensor


def pack(mask: Tensor) -> Tensor:
    """The mask as bits; as it is where they cannot be packed."""
    if mask.device.type != "cpu":
        return mask
    return torch.from_numpy(np.packbits(mask.numpy()))


def unpack(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mask of this shape that was packed."""
    if bits.dtype == torch.bool:
        return bits
    count = int(np.prod(shape))
    values = np.unpackbits(bits.numpy(), count=count)
    return torch.from_numpy(values.view(bool)).view(shape)
