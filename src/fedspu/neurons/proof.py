"""Prove a table of neurons on a copy of its model.

If a group's neurons are what the table says, they can change places, along all the
group's axes at once, and the model's output stays the same. A cycle through all of them
and the exchange of two neighbours on it generate every permutation, so these two tests
are enough. One is not: a wrong table may happen to be symmetric under it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedspu.neurons.probe import Probe
from fedspu.neurons.table import Axis, NeuronGroup

NUM_TRIALS = 3
"""Each has new random weights; a neuron can be silent in one, but hardly in all."""

MOST_TRIALS = 12
"""A trial in which most neurons of a group are silent proves little about it: then
there are more, up to this many. A group that is heard less than twice is not proved."""

MAX_RUNS_OF_ONE_GROUP = 300
"""The model is run at most this often for a group; then the group is given up."""

T = TypeVar("T")

Orders = dict[str, np.ndarray]
"""Group name -> a new order of its neurons."""


def prove(
    probe: Probe, groups: list[NeuronGroup], readers: set[tuple[str, int]]
) -> tuple[list[NeuronGroup], list[NeuronGroup]]:
    """The groups that are right, and those that are not.

    A group is also right, but not permutable, if only some of its neurons may change
    places: each with at least one neighbour. ``readers`` are the axes along which
    neurons are read, not made.
    """
    rng = np.random.default_rng(0)
    doubtful: dict[str, NeuronGroup] = {}
    heard = dict.fromkeys((group.name for group in groups), 0)
    for trial in range(MOST_TRIALS):
        left = [group for group in groups if group.name not in doubtful]
        if trial >= NUM_TRIALS:
            left = [group for group in left if heard[group.name] < NUM_TRIALS]
            if not left or not probe.shake(trial):
                break
        elif not probe.shake(trial):
            return [], groups
        for name in _heard(probe, left):
            heard[name] += 1
        cycles = {group.name: _cycle(group.size, rng) for group in left}
        for orders in (cycles, {name: _exchange(c) for name, c in cycles.items()}):
            survive = partial(survives, probe, orders=orders)
            failed = failing(sorted(left, key=pattern_of), survive)
            doubtful |= {group.name: group for group in failed}
            left = [group for group in left if group.name not in doubtful]
        for group in left:
            if group.size == 2 and not _is_read_in_place(probe, group, readers):
                doubtful[group.name] = group
    aligned = _aligned(probe, [g for g in doubtful.values() if g.size > 2])
    doubtful |= {group.name: group for group in groups if heard[group.name] < 2}
    right = [
        replace(g, permutable=False, slim=False) if g.name in doubtful else g
        for g in groups
        if g.name not in doubtful or g.name in aligned
    ]
    return right, [g for g in doubtful.values() if g.name not in aligned]


def failing(
    items: list[T], work: Callable[[list[T]], bool], is_sure: bool = False
) -> list[T]:
    """Those of some items that do not work; halves that do are not cut further.

    ``is_sure`` says that all of them together are known not to work.
    """
    if not items or (not is_sure and work(items)):
        return []
    if len(items) == 1:
        return items
    half = len(items) // 2
    first = failing(items[:half], work)
    return first + failing(items[half:], work, is_sure=not first)


def pattern_of(group: NeuronGroup) -> list[tuple[str, int]]:
    """The group's axes without numbers: alike in all blocks of a model."""
    return sorted({(without_numbers(axis.tensor), axis.dim) for axis in group.axes})


def without_numbers(path: str) -> str:
    """The path of a tensor or layer without the numbers of blocks."""
    return re.sub(r"\d+", "", path)


def _heard(probe: Probe, groups: list[NeuronGroup]) -> set[str]:
    """Names of the groups of which the output depends on at least a quarter now.

    Gradients of the smallest tensors mostly show it, and are quick.
    """
    sizes = {name: p.numel() for name, p in probe.model.named_parameters()}
    small = set()
    for group in groups:
        names = [name for name in group.tensors if name in sizes]
        small.update(sorted(names, key=sizes.__getitem__)[:1])
    heard: set[str] = set()
    silent: list[NeuronGroup] = []
    for is_last in (False, True):
        left = [group for group in groups if group.name not in heard]
        asked = {name for group in left for name in group.tensors} if is_last else small
        influences = probe.influences(asked) if left else {}
        for group in left:
            now = _heard_neurons(probe, group, influences)
            if 4 * int(now.sum()) >= group.size:
                heard.add(group.name)
            elif is_last and not bool(now.any()):
                silent.append(group)
    probe.forget_gradients()
    # Gradients do not tell all: a value may be rounded.
    moving = failing(silent, lambda some: not _move_the_output(probe, some))
    return heard | {group.name for group in moving}


def _heard_neurons(
    probe: Probe, group: NeuronGroup, influences: dict[str, Tensor] | None
) -> Tensor:
    """For each neuron of a group, whether gradients say that the output hears it."""
    if influences is None:
        return torch.ones(group.size, dtype=torch.bool)
    is_heard, least = torch.zeros(group.size, dtype=torch.bool), probe.least()
    for axis in group.axes:
        if axis.tensor in influences:
            others = [d for d in range(influences[axis.tensor].dim()) if d != axis.dim]
            moves = influences[axis.tensor]
            moves = (moves.sum(others) if others else moves).cpu()
            is_heard |= (moves > least)[axis.positions(group.size)].any(1)
    return is_heard


def _move_the_output(probe: Probe, groups: list[NeuronGroup]) -> bool:
    """Whether the output changes if neurons are reordered along all axes but one."""
    moves = [
        (axis, np.roll(np.arange(group.size), 1))
        for group in groups
        for axis in group.axes[:-1]
    ]
    with _reordered(probe, moves):
        return not probe.is_unchanged()


def _cycle(size: int, rng: np.random.Generator) -> np.ndarray:
    """A random permutation that moves all neurons in one cycle."""
    turn = rng.permutation(size)
    order = np.empty_like(turn)
    order[turn] = np.roll(turn, 1)
    return order


def _exchange(cycle: np.ndarray) -> np.ndarray:
    """The order in which two neighbours on the cycle have changed places."""
    return _swapped(len(cycle), [(0, int(cycle[0]))])


def _swapped(size: int, pairs: list[tuple[int, int]]) -> np.ndarray:
    """The order in which these pairs have changed places."""
    order = np.arange(size)
    for a, b in pairs:
        order[[a, b]] = order[[b, a]]
    return order


def survives(probe: Probe, groups: list[NeuronGroup], orders: Orders) -> bool:
    """Whether the output stays the same with the groups' neurons in another order."""
    moves = [(axis, orders[group.name]) for group in groups for axis in group.axes]
    with _reordered(probe, moves):
        return probe.is_unchanged()


@contextmanager
def _reordered(probe: Probe, moves: list[tuple[Axis, np.ndarray]]) -> Iterator[None]:
    """Inside, neurons are in another order along these axes."""
    sources: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for axis, order in moves:
        along, rows = sources[axis.tensor], axis.positions(len(order))
        if axis.dim not in along:
            along[axis.dim] = torch.arange(probe.tensors[axis.tensor].shape[axis.dim])
        along[axis.dim][rows.flatten()] = rows[torch.from_numpy(order)].flatten()
    with probe.trying(sources):
        for name, along in sources.items():
            probe.reorder(name, along)
        yield


def _is_read_in_place(
    probe: Probe, group: NeuronGroup, readers: set[tuple[str, int]]
) -> bool:
    """Whether a neuron has no influence once its readers are cut off.

    Needed for groups of two: exchanging both neurons cannot show that a table has them
    the wrong way round where they are read.
    """
    output = probe.output
    with probe.trying(group.tensors):
        for is_reader in (True, False):  # cut off the first neuron, then disturb it
            for axis in group.axes:
                if ((axis.tensor, axis.dim) in readers) == is_reader:
                    tensor = probe.tensors[axis.tensor]
                    rows = axis.positions(group.size)[0].to(tensor.device)
                    part = tensor.data.index_select(axis.dim, rows)
                    part = (
                        torch.zeros_like(part) if is_reader else torch.rand_like(part)
                    )
                    tensor.data = tensor.data.index_copy(axis.dim, rows, part)
            if is_reader:
                probe.output = probe.run()
        is_silent = probe.is_unchanged()
    probe.output = output
    return is_silent


# Groups of which only some neurons may change places ----------------------------------


def _aligned(probe: Probe, groups: list[NeuronGroup]) -> set[str]:
    """Names of the groups in which each neuron may change places with a neighbour."""
    left, heard = groups, dict.fromkeys((group.name for group in groups), 0)
    for trial in range(MOST_TRIALS):
        open_ = [group for group in left if heard[group.name] < NUM_TRIALS]
        if not open_ or not probe.shake(trial):
            break
        audible = _heard(probe, open_)
        for group in open_:
            if group.name in audible:
                heard[group.name] += 1
                if not _Neighbours(probe, group).ok():
                    left = [other for other in left if other is not group]
    return {group.name for group in left if heard[group.name] == NUM_TRIALS}


class _Neighbours:
    """Looks for a neighbour of each neuron with which it may change places."""

    def __init__(self, probe: Probe, group: NeuronGroup) -> None:
        self.probe, self.group = probe, group
        self.runs_left = MAX_RUNS_OF_ONE_GROUP
        self.rng = np.random.default_rng(0)

    def ok(self) -> bool:
        """Whether every neuron has such a neighbour."""
        size = self.group.size
        pairs = [(j, j + 1) for j in range(0, size - 1, 2)]
        if self._may_swap(pairs):
            return size % 2 == 0 or self._one(size - 1)
        # Mostly it is the same with all neurons, so one of them is asked first.
        if not self._one(int(self.rng.integers(size))):
            return False
        return self._halves(pairs) and (size % 2 == 0 or self._one(size - 1))

    def _all(self, pairs: list[tuple[int, int]]) -> bool:
        """Whether each pair may change places, or both of it with other neighbours."""
        return self._may_swap(pairs) or self._halves(pairs)

    def _halves(self, pairs: list[tuple[int, int]]) -> bool:
        if len(pairs) == 1:
            return self._one(pairs[0][0]) and self._one(pairs[0][1])
        half = len(pairs) // 2
        return self._all(pairs[:half]) and self._all(pairs[half:])

    def _one(self, j: int) -> bool:
        return any(
            self._may_swap([(a, a + 1)])
            for a in (j - 1, j)
            if 0 <= a < self.group.size - 1
        )

    def _may_swap(self, pairs: list[tuple[int, int]]) -> bool:
        """Whether these pairs may change places: a random half of them, and then all.

        All at once is not enough: a wrong table, such as one with a flip, may happen
        to be symmetric under it.
        """
        if len(pairs) > 1:
            half = self.rng.choice(len(pairs), len(pairs) // 2, replace=False)
            if not self._survives([pairs[i] for i in half]):
                return False
        return self._survives(pairs)

    def _survives(self, pairs: list[tuple[int, int]]) -> bool:
        self.runs_left -= 1
        order = _swapped(self.group.size, pairs)
        return self.runs_left > 0 and survives(
            self.probe, [self.group], {self.group.name: order}
        )
