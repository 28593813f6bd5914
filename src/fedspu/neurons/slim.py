"""A physically smaller copy of a model, for the methods that drop neurons."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedspu.neurons.blocks import extract
from fedspu.neurons.calls import copy_model
from fedspu.neurons.layers import Cut, kind_of
from fedspu.neurons.sizes import resize_lines
from fedspu.neurons.table import Active, Axis, NeuronGroup, Neurons, State


def slim_model(model: nn.Module, neurons: Neurons, active: Active) -> nn.Module:
    """A copy of ``model`` that has only the active neurons.

    Its state is ``extract(state_of(model), neurons.blocks(active))``. A group that
    cannot be sliced stays whole, with a warning; see ``slimmable``.
    """
    kept = slimmable(neurons, active)
    if whole := [name for name in kept if len(kept[name]) != len(active[name])]:
        warnings.warn(
            f"groups kept whole in the slim model, because they cannot be sliced: "
            f"{', '.join(whole)}",
            stacklevel=2,
        )
    slim = cut_model(copy_model(model), neurons, kept)
    resize_lines(slim, neurons.resized)
    return slim


def cut_model(slim: nn.Module, neurons: Neurons, kept: Active) -> nn.Module:
    """The same model with only the kept neurons; its own tensors are not changed."""
    owners = _owners(slim)
    for name, tensor in [*slim.named_parameters(), *slim.named_buffers()]:
        smaller = _slice(name, tensor, neurons, kept)
        if smaller is not None:
            for table, key in owners[id(tensor)]:
                table[key] = smaller
    for path, layer in slim.named_modules():
        kind_of(layer).resize(layer, Cut(path, neurons, kept))
    for group in neurons.groups:
        for path in group.counts:
            owner, _, key = path.rpartition(".")
            stored = vars(slim.get_submodule(owner))
            number = stored[key] if type(stored[key]) is int else stored[key][0]
            number = number * len(kept[group.name]) // group.size
            stored[key] = number if type(stored[key]) is int else (number,)
    return slim


def slimmable(neurons: Neurons, active: Active) -> Active:
    """``active``, plus all neurons of the groups that cannot be sliced."""
    return {
        group.name: active[group.name] if group.slim else torch.arange(group.size)
        for group in neurons.groups
    }


def slim_state(state: State, neurons: Neurons, active: Active) -> State:
    """The complete state of the slim model: ``state``, cut to the active neurons."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return extract(state, neurons.blocks(active, shapes))


def slim_neurons(neurons: Neurons, active: Active) -> Neurons:
    """The neuron table of the slim model that has only the active neurons."""
    blocks = neurons.blocks(active)
    shapes = {
        name: tuple(
            size if where is None else len(where)
            for size, where in zip(neurons.shapes[name], blocks[name], strict=True)
        )
        for name in neurons.shapes
    }
    groups = tuple(
        replace(
            group,
            size=len(active[group.name]),
            axes=tuple(_moved(axis, group, neurons, active) for axis in group.axes),
        )
        for group in neurons.groups
    )
    return replace(neurons, groups=groups, shapes=shapes)


def _moved(axis: Axis, group: NeuronGroup, neurons: Neurons, active: Active) -> Axis:
    """Where a group's neurons lie along one axis once the others are gone."""
    rows = axis.positions(group.size)[active[group.name]]
    dropped = [
        positions[_without(other.size, active[other.name])].flatten()
        for other, positions in neurons.positions(axis.tensor, axis.dim)
    ]
    gone = torch.cat(dropped).sort().values
    rows = rows - torch.searchsorted(gone, rows)
    if axis.index:
        return Axis.through(axis.tensor, axis.dim, rows)
    copies = [] if axis.copies == 1 else rows[0].view(axis.copies, -1)[:, 0].tolist()
    stride = copies[1] - copies[0] if copies else 0
    moved = replace(axis, offset=int(rows[0, 0]), stride=stride)
    if torch.equal(moved.positions(len(rows)), rows):
        return moved
    return Axis.through(axis.tensor, axis.dim, rows)


def _without(size: int, kept: Tensor) -> Tensor:
    is_left = torch.ones(size, dtype=torch.bool)
    is_left[kept] = False
    return is_left


def _owners(model: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """For each tensor, every dict that holds it: several dicts hold a shared one."""
    owners: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for layer in model.modules():
        for table in (layer._parameters, layer._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    owners.setdefault(id(tensor), []).append((table, key))
    return owners


def _slice(name: str, tensor: Tensor, neurons: Neurons, kept: Active) -> Tensor | None:
    """The kept part of one tensor; None if it stays as it is."""
    smaller = tensor.detach()
    for dim, size in enumerate(tensor.shape):
        positions = neurons.active_along(kept, name, dim, size)
        if positions is not None:
            smaller = smaller.index_select(dim, positions.to(tensor.device))
    if smaller.shape == tensor.shape:
        return None
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(smaller, requires_grad=tensor.requires_grad)
    return smaller
