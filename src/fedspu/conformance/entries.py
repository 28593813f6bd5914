"""Which entries of a model belong to which neurons, worked out the slow way.

It makes a boolean for every entry, from the numbers in the neuron table. It does not
use the index blocks, because they are what is being tested.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspu.neurons.table import Active, Neurons, State


def is_active_along(
    neurons: Neurons, active: Active, tensor: str, dim: int, size: int
) -> NDArray[np.bool_]:
    """For each position along one axis of a tensor, whether its neuron is active."""
    is_active = np.ones(size, dtype=bool)
    for group in neurons.groups:
        chosen = set(active[group.name].tolist())
        frozen = [neuron for neuron in range(group.size) if neuron not in chosen]
        for axis in group.axes:
            if (axis.tensor, axis.dim) != (tensor, dim):
                continue
            for neuron in frozen:
                for copy in range(axis.copies):
                    first = axis.offset + neuron * axis.repeat + copy * axis.stride
                    is_active[first : first + axis.repeat] = False
    return is_active


def is_active(
    neurons: Neurons, active: Active, tensor: str, shape: tuple[int, ...]
) -> Tensor:
    """For each entry of a tensor, whether all the neurons it connects are active."""
    inside = np.ones(shape, dtype=bool)
    for dim, size in enumerate(shape):
        along = is_active_along(neurons, active, tensor, dim, size)
        inside &= along.reshape([size if d == dim else 1 for d in range(len(shape))])
    return torch.from_numpy(inside)


def held_by_slim(neurons: Neurons, active: Active) -> Active:
    """The neurons of a slim model: the active ones, and those it cannot do without."""
    return {
        group.name: active[group.name] if group.slim else torch.arange(group.size)
        for group in neurons.groups
    }


def at_full_size(
    neurons: Neurons, held: Active, slim: State, like: State
) -> tuple[State, dict[str, Tensor]]:
    """A slim model's values at their places in the full one, and which entries it has.

    Entries it does not have are those of ``like``.
    """
    full, exists = {}, {}
    for name, whole in like.items():
        exists[name] = is_active(neurons, held, name, tuple(whole.shape))
        full[name] = whole.clone()
        full[name][exists[name]] = slim[name].reshape(-1)
    return full, exists


# Telling values apart -----------------------------------------------------------------


def as_bytes(values: Tensor) -> bytes:
    """The values of a tensor, one after the other, as they lie in memory."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def differs(a: Tensor, b: Tensor) -> Tensor:
    """For each entry, whether its bits differ: -0.0 is not 0.0, but NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.ones(a.shape, dtype=torch.bool)
    size = a.element_size()
    bytes_a = np.frombuffer(as_bytes(a), np.uint8).reshape(-1, size)
    bytes_b = np.frombuffer(as_bytes(b), np.uint8).reshape(-1, size)
    return torch.from_numpy((bytes_a != bytes_b).any(1)).view(a.shape)


def first_difference(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    where: Mapping[str, Tensor] | None = None,
) -> str | None:
    """The first difference between two states, in words; None if there is none.

    If ``where`` is given, only its tensors are compared, where it is True.
    """
    if where is None and found.keys() != wanted.keys():
        odd = sorted(found.keys() ^ wanted.keys())
        return f"{', '.join(odd)} can be found in only one of the two"
    for name in wanted if where is None else where:
        if found[name].shape != wanted[name].shape:
            return (
                f"{name} has the shape {tuple(found[name].shape)} instead of "
                f"{tuple(wanted[name].shape)}"
            )
        wrong = differs(found[name], wanted[name])
        if where is not None:
            wrong &= where[name]
        if bool(wrong.any()):
            return describe(name, wrong, found[name], wanted[name])
    return None


def describe(name: str, wrong: Tensor, found: Tensor, wanted: Tensor) -> str:
    """The first wrong entry of a tensor: its name, its value and what it should be."""
    entry = wrong.nonzero()[0].tolist()
    place = f"{name}{entry}" if entry else name
    values = found[tuple(entry)].item(), wanted[tuple(entry)].item()
    return (
        f"{place} is {values[0]!r} instead of {values[1]!r} "
        f"({int(wrong.sum())} of {wrong.numel()} entries of {name} differ)"
    )
