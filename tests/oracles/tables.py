"""Random neuron tables and states that fit them, for hypothesis."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from fedspu import Active, Axis, NeuronGroup, Neurons, State

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A table, a state it fits, and some active neurons."""

    neurons: Neurons
    state: State
    active: Active


@st.composite
def tables(draw: st.DrawFn) -> Neurons:
    """Groups along the axes of some tensors, side by side, repeated, with gaps."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    axes: list[list[Axis]] = [[] for _ in sizes]
    shapes = {}
    for number in range(draw(st.integers(1, 3))):
        name, shape = f"t{number}", []
        for dim in range(draw(st.integers(0, 4))):
            length = draw(st.integers(0, 2))  # positions that belong to no neuron
            for which in draw(st.lists(st.integers(0, len(sizes) - 1), max_size=2)):
                repeat, copies = draw(st.integers(1, 2)), draw(st.integers(1, 2))
                width = repeat * sizes[which]
                stride = width + draw(st.integers(0, 1)) if copies > 1 else 0
                axes[which].append(Axis(name, dim, repeat, length, copies, stride))
                length += width + (copies - 1) * stride + draw(st.integers(0, 1))
            shape.append(max(1, length))
        shapes[name] = tuple(shape)
    groups = (
        NeuronGroup(f"g{i}", size, tuple(along))
        for i, (size, along) in enumerate(zip(sizes, axes, strict=True))
    )
    return Neurons(tuple(groups), shapes)


def states(neurons: Neurons, dtype: torch.dtype, seed: int) -> State:
    """Random values, among them both zeros."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in neurons.shapes.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        values[torch.rand(shape, generator=generator) < 0.2] = -0.0
        values[torch.rand(shape, generator=generator) < 0.2] = 0.0
        state[name] = values.to(dtype)
    return state


@st.composite
def actives(draw: st.DrawFn, neurons: Neurons) -> Active:
    """At least one neuron of each group."""
    active = {}
    for group in neurons.groups:
        indices = st.sets(st.integers(0, group.size - 1), min_size=1)
        active[group.name] = torch.tensor(sorted(draw(indices)))
    return active


@st.composite
def cases(draw: st.DrawFn) -> Case:
    neurons = draw(tables())
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999))
    return Case(neurons, states(neurons, dtype, seed), draw(actives(neurons)))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit: -0.0 is not 0.0, nan is itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(
        a.detach().contiguous().view(as_integers),
        b.detach().contiguous().view(as_integers),
    )


def same_state(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)
