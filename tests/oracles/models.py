"""What several tests of the core share: models in float64, and plain definitions.

Nothing here calls the code it is there to check, except ``mapped``.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import Active, Blocks, NeuronGroup, Neurons, map_neurons
from fedspu.neurons.mapping import NeuronWarning
from tests.oracles.zoo import ZOO_BY_NAME, Entry

Model = TypeVar("Model", bound=nn.Module)


@cache
def mapped(name: str) -> Neurons:
    """The neuron table of a zoo model, made once."""
    entry = ZOO_BY_NAME[name]
    with seeded(0):
        return quietly_mapped(entry.build(), entry.example())


def quietly_mapped(model: nn.Module, example: Any) -> Neurons:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeuronWarning)
        return map_neurons(model, example)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch draws from this seed inside, and goes on as before afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def random_model(entry: Entry, seed: int = 0) -> nn.Module:
    """A zoo model in float64, none of its weights and statistics zero or one."""
    with seeded(seed):
        return shaken(entry.build())


def shaken(model: Model) -> Model:
    """The model in float64 with noise on all it has: nothing hides behind a zero."""
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for buffer in model.buffers():
            if buffer.is_floating_point():  # a variance stays positive
                buffer.add_(torch.rand_like(buffer))
    return model


def random_input(entry: Entry, seed: int = 0) -> Any:
    """An input like the entry's example, its floating-point values drawn anew."""

    def draw(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.randn_like(value.double()) if _is_float(value) else value
        if isinstance(value, dict):
            return {key: draw(item) for key, item in value.items()}
        return tuple(draw(item) for item in value)

    with seeded(seed):
        return draw(entry.example())


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point()


def run(model: nn.Module, example: Any) -> Tensor:
    """The model's output on a tensor, a tuple or a dict of arguments."""
    if isinstance(example, dict):
        output = model(**example)
    else:
        output = model(*example) if isinstance(example, tuple) else model(example)
    assert isinstance(output, Tensor)
    return output


def random_labels(output: Tensor, seed: int = 0) -> Tensor:
    """A class for each example of a batch, and for each pixel if there are any."""
    generator = torch.Generator().manual_seed(seed)
    shape = (output.shape[0], *output.shape[2:])
    return torch.randint(output.shape[1], shape, generator=generator)


def loss_of(model: nn.Module, example: Any, seed: int = 0) -> Tensor:
    """Cross-entropy with random labels; dropout draws from the seed."""
    with seeded(seed):
        output = run(model, example)
    return F.cross_entropy(output, random_labels(output, seed))


def random_active(neurons: Neurons, p: float, seed: int = 0) -> Active:
    """At least one neuron of each group, about a fraction p of them."""
    rng = np.random.default_rng(seed)
    active = {}
    for group in neurons.groups:
        count = max(1, int(p * group.size + 1e-9))
        chosen = rng.choice(group.size, count, replace=False)
        active[group.name] = torch.from_numpy(np.sort(chosen))
    return active


# Plain definitions --------------------------------------------------------------------


def positions_of(axis: Any, j: int, size: int) -> list[int]:
    """The positions of neuron j of ``size``, as Axis's docstring says."""
    if axis.index:
        each = len(axis.index) // size
        return list(axis.index[j * each : (j + 1) * each])
    return [
        axis.offset + j * axis.repeat + r + c * axis.stride
        for c in range(axis.copies)
        for r in range(axis.repeat)
    ]


def is_in_blocks(neurons: Neurons, active: Active, name: str) -> Tensor:
    """For each entry of a tensor, whether all the neurons it connects are active."""
    inside = torch.ones(neurons.shapes[name], dtype=torch.bool)
    for group in neurons.groups:
        chosen = set(active[group.name].tolist())
        for axis in group.axes:
            if axis.tensor != name:
                continue
            for j in range(group.size):
                if j not in chosen:
                    for position in positions_of(axis, j, group.size):
                        inside.select(axis.dim, position).fill_(False)
    return inside


def mask_of(shape: tuple[int, ...], where: tuple[Tensor | None, ...]) -> Tensor:
    """For each entry of a tensor of this shape, whether it lies in one block."""
    mask = np.zeros(shape, dtype=bool)
    along = [
        range(n) if positions is None else positions.tolist()
        for n, positions in zip(shape, where, strict=True)
    ]
    mask[np.ix_(*along)] = True
    return torch.from_numpy(mask)


def with_zeros_outside(
    state: Mapping[str, Tensor], blocks: Blocks
) -> dict[str, Tensor]:
    """A state with zero wherever a travelling tensor is outside the blocks."""
    return {
        name: tensor * mask_of(tuple(tensor.shape), blocks[name])
        if name in blocks
        else tensor.clone()
        for name, tensor in state.items()
    }


def reordered(model: nn.Module, group: NeuronGroup, order: list[int]) -> nn.Module:
    """A copy of a model with neuron order[j] of a group in the place of neuron j."""
    model = copy.deepcopy(model)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for axis in group.axes:
            tensor = tensors[axis.tensor]
            index = list(range(tensor.shape[axis.dim]))
            for j, source in enumerate(order):
                pairs = zip(
                    positions_of(axis, j, group.size),
                    positions_of(axis, source, group.size),
                    strict=True,
                )
                for here, there in pairs:
                    index[here] = there
            tensor.copy_(tensor.index_select(axis.dim, torch.tensor(index)))
    return model


class Fn(nn.Module):
    """A model from some layers and a function of itself and its input."""

    def __init__(self, function: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)
