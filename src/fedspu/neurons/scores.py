"""Score neurons by their incoming weights, for the methods that keep the best ones."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedspu.neurons.layers import kind_of
from fedspu.neurons.table import Axis, NeuronGroup, Neurons


def score_neurons(
    model: nn.Module, neurons: Neurons, values: Mapping[str, Tensor], order: int
) -> dict[str, Tensor]:
    """The l1 or l2 norm (``order``) of ``values`` over each neuron's incoming weights.

    ``values`` are the weights themselves, or their gradients, by parameter name. A
    layer's weights and bias count together; the layers of a group are summed. A group
    that no layer makes (bare parameters) is scored over all tensors it lies along.
    """
    made = {
        (f"{path}.{name}".lstrip("."), dim): path
        for path, layer in model.named_modules()
        for name, dim in kind_of(layer).incoming(layer)
    }
    return {
        group.name: _score(
            group, made, {n: v.double() for n, v in values.items()}, order
        )
        for group in neurons.groups
    }


def _score(
    group: NeuronGroup,
    made: Mapping[tuple[str, int], str],
    values: Mapping[str, Tensor],
    order: int,
) -> Tensor:
    axes = [axis for axis in group.axes if axis.tensor in values]
    makers = [axis for axis in axes if (axis.tensor, axis.dim) in made] or axes
    by_layer: dict[str, Tensor] = {}
    for axis in makers:
        layer = made.get((axis.tensor, axis.dim), axis.tensor)
        powers = _by_neuron(group, axis, values[axis.tensor].abs() ** order)
        by_layer[layer] = by_layer.get(layer, 0) + powers
    total = torch.zeros(group.size, dtype=torch.float64)
    for powers in by_layer.values():
        total += powers.cpu() ** (1 / order)
    return total


def _by_neuron(group: NeuronGroup, axis: Axis, powers: Tensor) -> Tensor:
    """The sum of all entries of each neuron along an axis."""
    others = [dim for dim in range(powers.dim()) if dim != axis.dim]
    along = powers.sum(others) if others else powers
    return along[axis.positions(group.size).to(along.device)].sum(1)
