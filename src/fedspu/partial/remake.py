"""What an activation remembers of how it was made, while a part of a model trains.

A note on a tensor is only an optimisation: an operation that does not know about notes
drops them, and so does whatever changes the tensor in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedspu.partial.spans import Span, is_same


@dataclass(frozen=True)
class Remake:
    """How to make an activation again from tensors that are kept anyway.

    ``make(span, dim, *tensors)`` returns its channels in a span along ``dim``. The
    tensors hold only its channels ``has``. Channels can be made along the axis ``dim``,
    or along any axis if that is None.
    """

    tensors: tuple[Tensor, ...]
    make: Callable[..., Tensor]
    dim: int | None
    has: Span = None

    def gives(self, span: Span, dim: int) -> bool:
        """Whether it can make these channels."""
        is_along = self.dim is None or self.dim == dim
        return is_along and (self.has is None or is_same(self.has, span))


@dataclass(frozen=True)
class _Note:
    version: int
    remake: Remake | None
    need: Span


def note(x: Tensor, remake: Remake | None = None, need: Span = None) -> Tensor:
    """Remember how ``x`` was made, and which channels of its gradient are read."""
    if (remake is not None or need is not None) and not x.is_inference():
        x._fedspu_note = _Note(x._version, remake, need)  # type: ignore[attr-defined]
    return x


def remake_of(x: Tensor) -> Remake | None:
    """How to make ``x`` again, if that is known."""
    noted = _note_of(x)
    return noted.remake if noted else None


def is_in_checkpoint() -> bool:
    """Whether a checkpoint saves nothing now, and runs the operations again later.

    By then nobody watches them, so they must run as usual now, too.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def need_of(x: Tensor) -> Span:
    """The channels of the gradient of ``x`` that are read: all, or these."""
    noted = _note_of(x)
    return noted.need if noted and not is_looked_at(x) else None


def _note_of(x: Tensor) -> _Note | None:
    noted: _Note | None = getattr(x, "_fedspu_note", None)
    return noted if noted and noted.version == x._version else None


def is_looked_at(x: Tensor) -> bool:
    """Whether someone wants to see the gradient of ``x``."""
    return x.retains_grad or bool(x._backward_hooks)


def transposed(x: Tensor, first: int, second: int) -> Tensor:
    """``x.transpose``, which can be made again if ``x`` can."""
    y, remake = x.transpose(first, second), remake_of(x)
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    if remake is None or remake.dim is None:
        return y
    make = partial(_make_transposed, remake.make, order)
    dim = order.index(remake.dim)
    return note(y, Remake(remake.tensors, make, dim, remake.has))


def _make_transposed(
    make: Callable[..., Tensor],
    order: list[int],
    span: Span,
    dim: int,
    *kept: Tensor,
) -> Tensor:
    return make(span, order[dim], *kept).permute(order)


def pack(mask: Tensor) -> Tensor:
    """The mask as bits; unchanged on devices where it cannot be packed."""
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
