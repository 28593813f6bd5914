"""A physically smaller copy of a model, for the methods that drop neurons."""

import copy
import warnings
from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn

from fedspu.errors import ModelError
from fedspu.neurons.attention import SlimAttention
from fedspu.neurons.blocks import extract
from fedspu.neurons.layers import DEPTHWISE, is_depthwise
from fedspu.neurons.table import Active, Axis, NeuronGroup, Neurons, State


def slim_model(model: nn.Module, neurons: Neurons, active: Active) -> nn.Module:
    """A copy of ``model`` that has only the active neurons; the rest does not exist.

    Its state is ``extract(state_of(model), neurons.blocks(active))``. A group that
    cannot be sliced stays whole, with a warning; see ``slimmable``.
    """
    kept = slimmable(neurons, active)
    if whole := [name for name in kept if len(kept[name]) != len(active[name])]:
        warnings.warn(
            f"kept whole in the slim model, because they cannot be sliced: "
            f"{', '.join(whole)}",
            stacklevel=2,
        )
    slim = copy.deepcopy(model)
    for layer in slim.modules():
        if isinstance(layer, nn.modules.conv._ConvNd):
            vars(layer)[DEPTHWISE] = is_depthwise(layer)
    owners = _owners(slim)
    heads = {
        layer: _kept_heads(layer, path, neurons, kept)
        for path, layer in slim.named_modules()
        if isinstance(layer, nn.MultiheadAttention)
    }
    sizes = {layer: [tensor.shape for tensor in layer.parameters()] for layer in heads}
    names = [*slim.named_parameters(), *slim.named_buffers()]
    for name, tensor in names:
        smaller = _slice(name, tensor, neurons, kept)
        if smaller is not None:
            for table, key in owners[id(tensor)]:
                table[key] = smaller
    for layer in slim.modules():
        resize(layer)
    for layer, kept_heads in heads.items():
        if sizes[layer] != [tensor.shape for tensor in layer.parameters()]:
            SlimAttention.shrink(layer, kept_heads)
    for layer in slim.modules():
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # its kernels would look past the class
    return slim


def slimmable(neurons: Neurons, active: Active) -> Active:
    """``active``, plus all neurons of the groups that no slim model can do without."""
    return {
        group.name: active[group.name] if group.slim else torch.arange(group.size)
        for group in neurons.groups
    }


def slim_state(state: State, neurons: Neurons, active: Active) -> State:
    """A state cut to the active neurons: that of the slim model, whole."""
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
    copies = [] if axis.copies == 1 else rows[0].view(axis.copies, -1)[:, 0].tolist()
    stride = copies[1] - copies[0] if copies else 0
    moved = replace(axis, offset=int(rows[0, 0]), stride=stride)
    if not torch.equal(moved.positions(len(rows)), rows):
        raise ModelError(
            f"{group.name}: its neurons lie unevenly along axis {axis.dim} of "
            f"{axis.tensor} in the slim model"
        )
    return moved


def _without(size: int, kept: Tensor) -> Tensor:
    is_left = torch.ones(size, dtype=torch.bool)
    is_left[kept] = False
    return is_left


def _owners(model: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """For each tensor every table it is kept in: shared ones are kept in several."""
    owners: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for layer in model.modules():
        for table in (layer._parameters, layer._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    owners.setdefault(id(tensor), []).append((table, key))
    return owners


def _slice(name: str, tensor: Tensor, neurons: Neurons, kept: Active) -> Tensor | None:
    """The kept part of one tensor; None where it stays as it is."""
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


def _kept_heads(
    layer: nn.MultiheadAttention, path: str, neurons: Neurons, kept: Active
) -> Tensor:
    """The heads of an attention layer that are left."""
    name = f"{path}.out_proj.weight".lstrip(".")
    for group, _ in neurons.positions(name, 1):
        if len(kept[group.name]) < group.size:
            if group.size != layer.num_heads:
                raise ModelError(f"{group.name}: its neurons are not whole heads")
            return kept[group.name]
    return torch.arange(layer.num_heads)


# Sizes that layers keep beside their tensors ------------------------------------------


@singledispatch
def resize(layer: Any) -> None:
    """Make the sizes that a sliced layer keeps agree with its tensors.

    One function for each kind of layer that keeps any.
    """


@resize.register
def _(layer: nn.Linear) -> None:
    layer.out_features, layer.in_features = layer.weight.shape


@resize.register
def _(layer: nn.Embedding) -> None:
    layer.num_embeddings, layer.embedding_dim = layer.weight.shape


@resize.register(nn.modules.conv._ConvNd)
def _(layer: nn.modules.conv._ConvNd) -> None:
    rows, per_group = layer.weight.shape[:2]
    if is_depthwise(layer):
        multiple = layer.out_channels // layer.in_channels
        layer.groups = rows if layer.transposed else rows // multiple
        layer.in_channels = layer.groups
        layer.out_channels = layer.groups * multiple
    elif layer.transposed:
        layer.in_channels, layer.out_channels = rows, per_group * layer.groups
    else:
        layer.in_channels, layer.out_channels = per_group * layer.groups, rows


@resize.register(nn.modules.batchnorm._NormBase)
def _(layer: nn.modules.batchnorm._NormBase) -> None:
    tensor = layer.weight if layer.weight is not None else layer.running_mean
    if tensor is not None:
        layer.num_features = len(tensor)
    else:  # nothing in it knows its width, but it would warn of another one
        layer.register_forward_pre_hook(_follow_width)


def _follow_width(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
    dims = {"1d": 1, "2d": 2, "3d": 3}[type(layer).__name__[-2:]]
    vars(layer)["num_features"] = args[0].shape[-dims - 1]


@resize.register
def _(layer: nn.GroupNorm) -> None:
    if layer.weight is not None:
        layer.num_channels = len(layer.weight)


@resize.register(nn.LayerNorm)
@resize.register(nn.RMSNorm)
def _(layer: Any) -> None:
    if layer.weight is not None:
        layer.normalized_shape = tuple(layer.weight.shape)


@resize.register
def _(layer: nn.PReLU) -> None:
    layer.num_parameters = len(layer.weight)


@resize.register
def _(layer: nn.RNNBase) -> None:
    if layer.proj_size:
        return
    first, hidden = layer.all_weights[0][:2]
    layer.input_size, layer.hidden_size = first.shape[1], hidden.shape[1]
    layer._init_flat_weights()
