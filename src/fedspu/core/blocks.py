"""Read and write the active blocks of a state.

The active entries of a tensor are the product of one index vector per axis, so a block
is a small dense tensor, never a boolean per entry.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedspu.core.types import Blocks, Payload, State
from fedspu.errors import ModelError

Where = tuple[Tensor | None, ...]


def take(tensor: Tensor, where: Where) -> Tensor:
    """A dense copy of one block."""
    for dim, positions in enumerate(where):
        if positions is not None:
            tensor = tensor.index_select(dim, positions.to(tensor.device))
    return tensor.clone() if all(axis is None for axis in where) else tensor


def put(tensor: Tensor, where: Where, block: Tensor) -> None:
    """Write one block into ``tensor``, in place."""
    tensor[mesh(tensor, where)] = block.to(tensor)


def mesh(tensor: Tensor, where: Where) -> tuple[Tensor | slice, ...]:
    """An index of ``tensor`` that selects the product of the positions of each axis."""
    listed = [dim for dim, positions in enumerate(where) if positions is not None]
    if not listed:
        return (...,)  # type: ignore[return-value]  # a whole tensor, even a scalar
    # A slice between index vectors would move axes, so those between are listed too.
    first, last = listed[0], listed[-1]
    index: list[Tensor | slice] = [slice(None)] * first
    for dim in range(first, last + 1):
        positions = where[dim]
        if positions is None:
            positions = torch.arange(tensor.shape[dim])
        index.append(positions.to(tensor.device).view((-1,) + (1,) * (last - dim)))
    return tuple(index)


def extract(state: Mapping[str, Tensor], blocks: Blocks) -> Payload:
    """The values in the blocks: what is sent, A_k(w) in the paper."""
    return {name: take(_named(state, name), where) for name, where in blocks.items()}


def merge(state: Mapping[str, Tensor], blocks: Blocks, payload: Payload) -> State:
    """A new state with ``payload`` in the blocks, all else bit for bit as before.

    Shares no memory with ``state`` or ``payload`` (Algorithm 1, line 9).
    """
    merged = {name: tensor.clone() for name, tensor in state.items()}
    for name, where in blocks.items():
        put(_named(merged, name), where, _named(payload, name))
    return merged


def _named(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ModelError(f"no tensor named {name}; there are {', '.join(tensors)}")
    return tensors[name]
