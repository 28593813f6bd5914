"""Prove a table of neurons on a copy of its model.

If a group's neurons are what the table says, they can change places, along all the
group's axes at once, and the model's output stays the same. A cycle through all of them
and the exchange of two neighbours on it generate every permutation, so that these two
suffice. Nothing less does: one permutation can be a symmetry of the very mistake.
"""

from dataclasses import replace

import numpy as np
import torch

from fedspu.core.neurons import Axis, NeuronGroup
from fedspu.core.probe import Probe

NUM_TRIALS = 3
"""With new random weights each; a neuron can be silent in one, hardly in all."""

MAX_RUNS_OF_ONE_GROUP = 300
"""How often the model is run for a group before its neurons are given up."""

Orders = dict[str, np.ndarray]
"""Group name -> a new order of its neurons."""


def prove(
    probe: Probe, groups: list[NeuronGroup], readers: set[tuple[str, int]]
) -> tuple[list[NeuronGroup], list[NeuronGroup]]:
    """The groups that are right, and those that are not.

    Where not all neurons of a right group may change places, but each may with some
    neighbour, it is not permutable. ``readers`` are the axes along which neurons are
    read, not made.
    """
    rng = np.random.default_rng(0)
    doubtful: dict[str, NeuronGroup] = {}
    for trial in range(NUM_TRIALS):
        if not probe.shake(trial):
            return [], groups
        left = [group for group in groups if group.name not in doubtful]
        cycles = {group.name: _cycle(group.size, rng) for group in left}
        for orders in (cycles, {name: _exchange(c) for name, c in cycles.items()}):
            if not survives(probe, left, orders):
                doubtful |= {
                    g.name: g for g in left if not survives(probe, [g], orders)
                }
        for group in left:
            if group.size == 2 and not _is_read_in_place(probe, group, readers):
                doubtful[group.name] = group
    aligned = _aligned(probe, [g for g in doubtful.values() if g.size > 2])
    right = [
        replace(g, permutable=False, slim=False) if g.name in doubtful else g
        for g in groups
        if g.name not in doubtful or g.name in aligned
    ]
    return right, [g for g in doubtful.values() if g.name not in aligned]


def _cycle(size: int, rng: np.random.Generator) -> np.ndarray:
    """A random order in which every neuron follows another, all in one cycle."""
    turn = rng.permutation(size)
    order = np.empty_like(turn)
    order[turn] = np.roll(turn, 1)
    return order


def _exchange(cycle: np.ndarray) -> np.ndarray:
    """Two neighbours on the cycle change places."""
    return _swapped(len(cycle), [(0, int(cycle[0]))])


def _swapped(size: int, pairs: list[tuple[int, int]]) -> np.ndarray:
    """The order in which these pairs have changed places."""
    order = np.arange(size)
    for a, b in pairs:
        order[[a, b]] = order[[b, a]]
    return order


def survives(probe: Probe, groups: list[NeuronGroup], orders: Orders) -> bool:
    """Whether the output stays the same with the groups' neurons in another order."""
    before = _values(probe, groups)
    for group in groups:
        for axis in group.axes:
            _reorder(probe, axis, orders[group.name])
    is_unchanged = probe.is_unchanged()
    _restore(probe, before)
    return is_unchanged


def _reorder(probe: Probe, axis: Axis, order: np.ndarray) -> None:
    """Put neurons into another order along one axis, in place."""
    tensor, rows = probe.tensors[axis.tensor], axis.positions(len(order))
    index = torch.arange(tensor.shape[axis.dim])
    index[rows.flatten()] = rows[torch.from_numpy(order)].flatten()
    with torch.no_grad():
        tensor.copy_(tensor.index_select(axis.dim, index.to(tensor.device)))


def _values(probe: Probe, groups: list[NeuronGroup]) -> dict[str, torch.Tensor]:
    names = {axis.tensor for group in groups for axis in group.axes}
    return {name: probe.tensors[name].detach().clone() for name in names}


def _restore(probe: Probe, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            probe.tensors[name].copy_(value)


def _is_read_in_place(
    probe: Probe, group: NeuronGroup, readers: set[tuple[str, int]]
) -> bool:
    """Whether a neuron that nobody reads has no influence.

    For groups of two: their only exchange is also a symmetry of reading them crosswise.
    """
    before, output = _values(probe, [group]), probe.output
    for is_reader in (True, False):  # cut off the first neuron, then disturb it
        for axis in group.axes:
            if ((axis.tensor, axis.dim) in readers) == is_reader:
                tensor = probe.tensors[axis.tensor]
                rows = axis.positions(group.size)[0].to(tensor.device)
                part = tensor.detach().index_select(axis.dim, rows)
                part = torch.zeros_like(part) if is_reader else torch.rand_like(part)
                with torch.no_grad():
                    tensor.index_copy_(axis.dim, rows, part)
        if is_reader:
            probe.output = probe.run()
    is_silent = probe.is_unchanged()
    probe.output = output
    _restore(probe, before)
    return is_silent


# Groups of which only some neurons may change places ----------------------------------


def _aligned(probe: Probe, groups: list[NeuronGroup]) -> set[str]:
    """Names of the groups each of whose neurons may change places with a neighbour."""
    left = groups
    for trial in range(NUM_TRIALS):
        if left and not probe.shake(trial):
            return set()
        left = [group for group in left if _Neighbours(probe, group).ok()]
    return {group.name for group in left}


class _Neighbours:
    """Looks for a neighbour that each neuron may change places with."""

    def __init__(self, probe: Probe, group: NeuronGroup) -> None:
        self.probe, self.group = probe, group
        self.runs_left = MAX_RUNS_OF_ONE_GROUP
        self.rng = np.random.default_rng(0)

    def ok(self) -> bool:
        """Whether there is one for every neuron."""
        size = self.group.size
        pairs = [(j, j + 1) for j in range(0, size - 1, 2)]
        return self._all(pairs) and (size % 2 == 0 or self._one(size - 1))

    def _all(self, pairs: list[tuple[int, int]]) -> bool:
        """Whether these pairs may change places, or each of the two with another."""
        if self._may_swap(pairs):
            return True
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
        """Whether these pairs may change places, all and a random half of them.

        All of them at once can be a symmetry of the mistake: of a flip, for one.
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
