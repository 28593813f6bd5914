"""The rules of guards as one would write them down: loops over entries, no tensors.

A client's step is a mapping from entries (tensor name, position) to how far it moved
them. Also random rounds of clients with random blocks.
"""

from collections.abc import Sequence
from itertools import product
from math import ceil, inf, sqrt
from statistics import mean, median

import numpy as np
import torch
from hypothesis import strategies as st

from fedspu import State
from fedspu.neurons.average import Update

Entry = tuple[str, tuple[int, ...]]
Step = dict[Entry, float]

STATISTICS = frozenset({"norm.running_mean", "norm.running_var"})


def first_state() -> State:
    """A small state in float64; the second tensor has no neurons to choose from."""
    rng = np.random.default_rng(3)
    shapes = {"w": (4, 3), "b": (2,), "norm.running_mean": (4,)}
    state = {name: torch.from_numpy(rng.normal(size=s)) for name, s in shapes.items()}
    return {**state, "norm.running_var": torch.full((4,), 9.0, dtype=torch.float64)}


@st.composite
def rounds_of_updates(draw: st.DrawFn, max_clients: int = 7) -> list[Update]:
    """Clients with random rows and columns of ``w``; some share none of them.

    Only some train ``b``, so two clients may have no entry in common.
    """
    state = first_state()
    updates = []
    for _ in range(draw(st.integers(1, max_clients))):
        rng = np.random.default_rng(draw(st.integers(0, 10**6)))
        rows, columns = (
            torch.tensor(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1))))
            for size in (4, 3)
        )
        where: dict[str, tuple[torch.Tensor | None, ...]] = {"w": (rows, columns)}
        where |= dict.fromkeys(sorted(STATISTICS), (rows,))
        if draw(st.booleans()):
            where["b"] = (None,)
        scale = draw(st.sampled_from([0.0, 0.1, 1.0, 100.0]))
        payload = {}
        for name, axes in where.items():
            lengths = zip(state[name].shape, axes, strict=True)
            size = [n if axis is None else len(axis) for n, axis in lengths]
            picked = state[name]
            for dim, axis in enumerate(axes):
                picked = picked if axis is None else picked.index_select(dim, axis)
            moved = picked + scale * torch.from_numpy(rng.normal(size=size))
            payload[name] = moved.clamp(min=0) if "var" in name else moved
        updates.append(Update(where, payload, draw(st.integers(1, 2**32 - 1))))
    return updates


def step_of(state: State, update: Update) -> Step:
    """Entry by entry, how far a client moved what it trained."""
    step: Step = {}
    for name, axes in update.where.items():
        lists = [
            list(range(n)) if axis is None else axis.tolist()
            for n, axis in zip(state[name].shape, axes, strict=True)
        ]
        for inside in product(*(range(len(listed)) for listed in lists)):
            place = tuple(listed[i] for listed, i in zip(lists, inside, strict=True))
            value = float(update.payload[name][inside])
            step[name, place] = value - float(state[name][place])
    return step


def slow_clip(steps: Sequence[Step]) -> list[Step]:
    """No step longer than the lower median; statistics are measured apart."""
    clipped: list[Step] = [{} for _ in steps]
    for is_statistic in (False, True):
        parts = [
            {e: v for e, v in step.items() if (e[0] in STATISTICS) == is_statistic}
            for step in steps
        ]
        lengths = [sqrt(sum(v * v for v in part.values())) for part in parts]
        limit = sorted(lengths)[(len(lengths) - 1) // 2]
        for own, part, length in zip(clipped, parts, lengths, strict=True):
            factor = 1.0 if length <= limit else limit / length
            own.update({e: v * factor for e, v in part.items()})
    return clipped


def slow_mean(steps: Sequence[Step]) -> Step:
    """The plain mean of each entry over those who trained it."""
    return {entry: mean(values) for entry, values in by_entry(steps).items()}


def slow_median(steps: Sequence[Step]) -> Step:
    """The median of each entry over those who trained it."""
    return {entry: median(values) for entry, values in by_entry(steps).items()}


def slow_trimmed_mean(steps: Sequence[Step], tenths: int) -> Step:
    """The mean of each entry without its outermost tenths on either side."""
    found = {}
    for entry, values in by_entry(steps).items():
        left = sorted(values)
        for _ in range(-(-tenths * len(values) // 10)):
            if len(left) > 2:
                left = left[1:-1]
        found[entry] = mean(left)
    return found


def by_entry(steps: Sequence[Step]) -> dict[Entry, list[float]]:
    """All steps of each entry."""
    found: dict[Entry, list[float]] = {}
    for step in steps:
        for entry, value in step.items():
            found.setdefault(entry, []).append(value)
    return found


def slow_distance(a: Step, b: Step) -> float:
    """How unlike two steps are, on the entries both have; a part for each kind."""
    total = 0.0
    for is_statistic in (False, True):
        shared = [e for e in a if e in b and (e[0] in STATISTICS) == is_statistic]
        both = sum(a[e] ** 2 + b[e] ** 2 for e in shared)
        apart = sum((a[e] - b[e]) ** 2 for e in shared)
        total += apart / both if both > 0 else 1.0
    return total


def slow_krum(steps: Sequence[Step], share: float) -> list[tuple[int, float]]:
    """Every client with its mean distance to its nearest others, nearest first."""
    number = len(steps)
    near = max(1, number - ceil(share * number) - 2)
    scores = []
    for i, own in enumerate(steps):
        apart = [slow_distance(own, s) if j != i else inf for j, s in enumerate(steps)]
        scores.append((mean(sorted(apart)[:near]), i))
    return [(i, score) for score, i in sorted(scores)]


def moved(state: State, step: Step) -> State:
    """The state after a step."""
    after = {name: tensor.clone() for name, tensor in state.items()}
    for (name, place), value in step.items():
        after[name][place] += value
    return after
