"""The values of a model by name, and their active blocks.

The active entries of a tensor are the product of one index vector per axis, so a block
is a small dense tensor, never a boolean per entry.
"""

from collections.abc import Iterable, Mapping
from math import isfinite

import torch
from torch import Tensor, nn

from fedspu.errors import ModelError
from fedspu.neurons.table import Blocks, Payload, State

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
    # A slice between index vectors would move axes, so axes between are listed too.
    first, last = listed[0], listed[-1]
    index: list[Tensor | slice] = [slice(None)] * first
    for dim in range(first, last + 1):
        positions = where[dim]
        if positions is None:
            positions = torch.arange(tensor.shape[dim])
        index.append(positions.to(tensor.device).view((-1,) + (1,) * (last - dim)))
    return tuple(index)


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite numbers."""
    if not values.is_floating_point():
        return True
    # A sum is finite only if all its terms are, and is quick; it may also overflow.
    return isfinite(values.sum().item()) or bool(values.isfinite().all())


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


def state_of(model: nn.Module) -> State:
    """A copy of all of a model's parameters and saved buffers; tied tensors once."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model)}


def named_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """A model's own parameters and saved buffers, each once, under its first name."""
    first = {name for name, _ in model.named_parameters()}
    first.update(name for name, _ in model.named_buffers())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in first:
            yield name, tensor


CHANGED = (
    "; expected the model that the state is of: if its code has changed since a run, "
    "use the code of that time, or play the run again"
)


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into the model's own tensors; others stay as they are."""
    if not all(isinstance(p, nn.Parameter) for p in model.parameters()):
        raise ModelError(
            "a model in partial training cannot load a state; leave the context first"
        )
    own = dict(named_tensors(model))
    with torch.no_grad():
        for name, values in sorted(state.items()):  # a file has them in any order
            if name not in own:
                raise ModelError(f"the model has no tensor named {name}{CHANGED}")
            if own[name].shape != values.shape:
                raise ModelError(
                    f"{name} has shape {tuple(own[name].shape)} in the model and "
                    f"{tuple(values.shape)} in the state{CHANGED}"
                )
            own[name].copy_(values)
