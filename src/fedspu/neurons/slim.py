"""A physically smaller copy of a model, for the methods that drop neurons."""

import warnings
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedspu.neurons.blocks import extract
from fedspu.neurons.calls import all_tensors, copy_model, plain_tensors
from fedspu.neurons.layers import Cut, kind_of
from fedspu.neurons.slimming.padding import hold, moved, owners_of, padded, padding_of
from fedspu.neurons.slimming.sizes import resize_lines
from fedspu.neurons.table import Active, Axis, NeuronGroup, Neurons, State


def slim_model(model: nn.Module, neurons: Neurons, active: Active) -> nn.Module:
    """A copy of ``model`` that has only the active neurons.

    Its state is ``extract(state_of(model), neurons.blocks(active))``. A padded group
    is smaller in that state alone: while the copy runs, zeros stand for the neurons
    that are gone (``slimming/padding.py``). A group that cannot be sliced stays whole,
    with a warning; see ``slimmable``.
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
    whole = {g.name: torch.arange(g.size) for g in neurons.groups if g.padded}
    width = {**kept, **whole}  # while it runs
    padding, owners = padding_of(slim), owners_of(slim)
    tensors, named = dict(all_tensors(slim)), neurons.tensors
    if named - tensors.keys():
        tensors |= dict(plain_tensors(slim))
    tensors = {name: tensor for name, tensor in tensors.items() if name in named}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    left, wide = neurons.blocks(kept, shapes), neurons.blocks(width, shapes)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        smaller = _slice(tensor, left[name])
        places = padding.places.pop(name, {})
        if places or any(
            a is not b for a, b in zip(left[name], wide[name], strict=True)
        ):
            places = moved(places, shapes[name], wide[name], left[name])
        if places:
            stored[name] = tensor if smaller is None else smaller
            smaller = _like(tensor, padded(stored[name].detach(), places))
            padding.places[name], padding.owners[name] = places, owners[id(tensor)]
        if smaller is not None:
            hold(slim, owners[id(tensor)], smaller)
    for path, layer in slim.named_modules():
        kind_of(layer).resize(layer, Cut(path, neurons, width))
    for name, tensor in stored.items():
        hold(slim, padding.owners[name], tensor)
    padding.watch(slim, neurons.uncounted)
    for group in neurons.groups:
        for path in group.counts:
            owner, _, key = path.rpartition(".")
            held = vars(slim.get_submodule(owner))
            number = held[key] if type(held[key]) is int else held[key][0]
            number = number * len(kept[group.name]) // group.size
            held[key] = number if type(held[key]) is int else (number,)
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


def _slice(tensor: Tensor, where: tuple[Tensor | None, ...]) -> Tensor | None:
    """The part of a tensor at these positions; None if it stays as it is."""
    smaller = tensor.detach()
    for dim, positions in enumerate(where):
        if positions is not None:
            smaller = smaller.index_select(dim, positions.to(tensor.device))
    return None if smaller.shape == tensor.shape else _like(tensor, smaller)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """Values as a parameter if the tensor is one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values
