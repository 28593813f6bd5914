"""Prove a table of neurons on a copy of its model.

If a group's neurons are what the table says, they can change places, along all the
group's axes at once, and the model's output stays the same. A cycle through all of them
and the exchange of two neighbours on it generate every permutation, so these two tests
are enough. One is not: a wrong table may happen to be symmetric under it.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedspu.neurons.pairs import read_elsewhere
from fedspu.neurons.probe import Probe
from fedspu.neurons.search import alike_groups, all_fail, failing, failing_alike
from fedspu.neurons.table import Axis, NeuronGroup

NUM_TRIALS = 3
"""Each has new random weights; a neuron can be silent in one, but hardly in all."""

MOST_TRIALS = 12
"""A trial in which most neurons of a group are silent proves little about it: then
there are more, up to this many. A group that is heard less than twice is not proved."""

PATIENCE = 6
"""A group that was never heard in so many trials is given up before that."""

MAX_RUNS_OF_ONE_GROUP = 300
"""The model is run at most this often for a group; then the group is given up."""

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
        if trial == NUM_TRIALS and not any(heard.values()):
            probe.is_deaf = True  # the next trials would be like these
            return [], groups
        if trial >= NUM_TRIALS:
            left = [g for g in left if _needs_more(heard[g.name], trial)]
            if not left or not probe.shake(trial):
                break
        elif not probe.shake(trial):
            return [], groups
        now, silent = _heard(probe, left)
        for name in now:
            heard[name] += 1
        # The output does not depend on what is silent: reordering it shows nothing.
        left = [group for group in left if group.name not in silent]
        cycles = {group.name: _cycle(group.size, rng) for group in left}
        for orders in (cycles, {name: _exchange(c) for name, c in cycles.items()}):
            work = partial(survives, probe, orders=orders)
            if work(left):
                continue
            if trial == 0 and probe.calm_down():
                return prove(probe, groups, readers)
            failed = failing_alike(left, work, is_sure=True)
            doubtful |= {group.name: group for group in failed}
            left = [group for group in left if group.name not in doubtful]
        for group in read_elsewhere(probe, [g for g in left if g.size == 2], readers):
            doubtful[group.name] = group
    aligned = _aligned(probe, [g for g in doubtful.values() if g.size > 2])
    doubtful |= {group.name: group for group in groups if heard[group.name] < 2}
    right = [
        replace(g, permutable=False, slim=False) if g.name in doubtful else g
        for g in groups
        if g.name not in doubtful or g.name in aligned
    ]
    return right, [g for g in doubtful.values() if g.name not in aligned]


def _needs_more(heard: int, trial: int) -> bool:
    """Whether a group that was heard so often needs one more trial."""
    return heard < NUM_TRIALS and (heard > 0 or trial < PATIENCE)


def _heard(probe: Probe, groups: list[NeuronGroup]) -> tuple[set[str], set[str]]:
    """Names of the groups of which the output depends on at least a quarter now.

    And of those on which it does not depend at all. Gradients of the smallest tensors
    mostly show it, and are quick.
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
    heard |= {group.name for group in moving}
    return heard, {group.name for group in silent} - heard


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
    sources: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for axis, order in moves:
        along, rows = sources[axis.tensor], axis.rows(len(order))
        if axis.dim not in along:
            along[axis.dim] = np.arange(probe.tensors[axis.tensor].shape[axis.dim])
        along[axis.dim][rows] = rows[order]
    with probe.trying(sources):
        for name, along in sources.items():
            probe.reorder(name, along)
        yield


# Groups of which only some neurons may change places ----------------------------------


def _aligned(probe: Probe, groups: list[NeuronGroup]) -> set[str]:
    """Names of the groups in which each neuron may change places with a neighbour."""
    left, heard = groups, dict.fromkeys((group.name for group in groups), 0)
    for trial in range(MOST_TRIALS):
        open_ = [group for group in left if _needs_more(heard[group.name], trial)]
        if not open_ or not probe.shake(trial):
            break
        audible, _ = _heard(probe, open_)
        open_ = [group for group in open_ if group.name in audible]
        for group in open_:
            heard[group.name] += 1
        for alike in alike_groups(open_):
            if all_fail(alike, lambda group: _Neighbours(probe, group).ok()):
                failed = alike
            else:
                failed = [g for g in alike if not _Neighbours(probe, g).ok()]
            left = [group for group in left if group not in failed]
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
