"""Prove a table of neurons on a copy of its model.

If a group's neurons are what the table says, they can change places, along all the
group's axes at once, and the model's output stays the same. A cycle through all of them
and the exchange of two neighbours on it generate every permutation, so these two tests
are enough. One is not: a wrong table may happen to be symmetric under it.
"""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedspu.errors import ModelError
from fedspu.neurons.calls import copy_model
from fedspu.neurons.probe import Probe
from fedspu.neurons.slim import cut_model, slimmable
from fedspu.neurons.table import Active, Axis, NeuronGroup, Neurons

NUM_TRIALS = 3
"""Each has new random weights; a neuron can be silent in one, but hardly in all."""

MOST_TRIALS = 12
"""A trial in which most neurons of a group are silent proves little about it: then
there are more, up to this many. A group that is heard less than twice is not proved."""

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
        if trial >= NUM_TRIALS:
            left = [group for group in left if heard[group.name] < NUM_TRIALS]
            if not left or not probe.shake(trial):
                break
        elif not probe.shake(trial):
            return [], groups
        gradients = probe.gradients()
        for group in left:
            heard[group.name] += _is_heard(probe, group, gradients)
        cycles = {group.name: _cycle(group.size, rng) for group in left}
        for orders in (cycles, {name: _exchange(c) for name, c in cycles.items()}):
            if not survives(probe, left, orders):
                doubtful |= {
                    g.name: g for g in left if not survives(probe, [g], orders)
                }
        for group in left:
            if group.size == 2 and not _is_read_in_place(probe, group, readers):
                doubtful[group.name] = group
    doubtful |= {group.name: group for group in groups if heard[group.name] < 2}
    aligned = _aligned(probe, [g for g in doubtful.values() if g.size > 2])
    right = [
        replace(g, permutable=False, slim=False) if g.name in doubtful else g
        for g in groups
        if g.name not in doubtful or g.name in aligned
    ]
    return right, [g for g in doubtful.values() if g.name not in aligned]


def _is_heard(
    probe: Probe, group: NeuronGroup, gradients: dict[str, Tensor] | None
) -> bool:
    """Whether the output depends on at least a quarter of a group's neurons now."""
    if gradients is None:
        return True
    is_heard = torch.zeros(group.size, dtype=torch.bool)
    for axis in group.axes:
        if axis.tensor in gradients:
            moved = (gradients[axis.tensor] != 0).movedim(axis.dim, 0)
            moved = moved.reshape(len(moved), -1).any(1)
            is_heard |= moved.cpu()[axis.positions(group.size)].any(1)
    if not bool(is_heard.any()):  # gradients do not tell all: a value may be rounded
        return _moves_the_output(probe, group)
    return 4 * int(is_heard.sum()) >= group.size


def _moves_the_output(probe: Probe, group: NeuronGroup) -> bool:
    """Whether the output changes if neurons are reordered along all axes but one."""
    before, order = _values(probe, [group]), np.roll(np.arange(group.size), 1)
    for axis in group.axes[:-1]:
        _reorder(probe, axis, order)
    moves = not probe.is_unchanged()
    _restore(probe, before)
    return moves


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
    """Whether a neuron has no influence once its readers are cut off.

    Needed for groups of two: exchanging both neurons cannot show that a table has them
    the wrong way round where they are read.
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
    """Names of the groups in which each neuron may change places with a neighbour."""
    left, heard = groups, dict.fromkeys((group.name for group in groups), 0)
    for trial in range(MOST_TRIALS):
        open_ = [group for group in left if heard[group.name] < NUM_TRIALS]
        if not open_ or not probe.shake(trial):
            break
        gradients = probe.gradients()
        for group in open_:
            if _is_heard(probe, group, gradients):
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
        return self._all(pairs) and (size % 2 == 0 or self._one(size - 1))

    def _all(self, pairs: list[tuple[int, int]]) -> bool:
        """Whether each pair may change places, or both of it with other neighbours."""
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


def prove_slim(probe: Probe, table: Neurons) -> Neurons:
    """The same table, with ``slim`` False for the groups that cannot be sliced."""
    candidates = [group for group in table.groups if group.slim and group.size > 1]
    if not probe.shake(1):
        stuck = {group.name for group in candidates}
    elif _slims(probe, table, candidates):
        return table
    else:
        # What has its number written down somewhere is mostly whole heads and the like.
        simple = [
            g for g in candidates if all(a.repeat == a.copies == 1 for a in g.axes)
        ]
        doubtful = [g for g in candidates if g not in simple]
        if not _slims(probe, table, simple):
            doubtful = candidates
        stuck = {g.name for g in doubtful if not _slims(probe, table, [g])}
        rest = [group for group in candidates if group.name not in stuck]
        if not _slims(probe, table, rest):  # each can be sliced, but not all at once
            stuck |= {group.name for group in rest}
    groups = tuple(
        replace(group, slim=group.slim and group.name not in stuck)
        for group in table.groups
    )
    return replace(table, groups=groups)


def _slims(probe: Probe, table: Neurons, groups: list[NeuronGroup]) -> bool:
    """Whether a slim copy without a random half of these neurons is right.

    A half may happen to keep shuffled channels in step, so these need more draws.
    """
    is_shuffled = any(axis.index for group in groups for axis in group.axes)
    return all(
        _is_slim_right(probe, table, _drawn(table, groups, is_half=draw == 0))
        for draw in range(5 if is_shuffled else 1)
    )


def _drawn(table: Neurons, groups: list[NeuronGroup], is_half: bool) -> Active:
    """A random half of the neurons of these groups, or another random part."""
    active = table.everything()
    for group in groups:
        number = group.size // 2 if is_half else int(torch.randint(group.size, ()))
        part = torch.randperm(group.size)[: max(1, number)]
        active[group.name] = part.sort().values
    return active


def _is_slim_right(probe: Probe, table: Neurons, active: Active) -> bool:
    """Whether a slim copy with these neurons agrees with the full model."""
    output = probe.output
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            slim = copy_model(probe.model, shares_tensors=True)
            slim = cut_model(slim, table, slimmable(table, active))
            slim_output = probe.call(slim, probe.example)
        probe.output = slim_output
        return [out.shape for out in slim_output] == [o.shape for o in output] and (
            _zeroed_agrees(probe, table, active)
        )
    except ModelError:
        return False
    finally:
        probe.output = output


def _zeroed_agrees(probe: Probe, table: Neurons, active: Active) -> bool:
    """Whether the full model, with frozen entries at zero, gives the probe's output."""
    before = {name: tensor.detach().clone() for name, tensor in probe.tensors.items()}
    channels: dict[int, Tensor] = {}
    with torch.no_grad():
        for name, tensor in probe.tensors.items():
            for dim in range(tensor.dim()):
                kept = table.active_along(active, name, dim, tensor.shape[dim])
                if kept is not None:
                    is_dropped = torch.ones(tensor.shape[dim], dtype=torch.bool)
                    is_dropped[kept] = False
                    where = is_dropped.nonzero().flatten().to(tensor.device)
                    tensor.index_fill_(dim, where, 0)
                    channels[id(tensor)] = kept.to(tensor.device)
    with _NormsOver(channels):
        agrees = probe.is_unchanged()
    with torch.no_grad():
        for name, values in before.items():
            probe.tensors[name].copy_(values)
    return agrees


class _NormsOver(TorchFunctionMode):
    """Inside, norms that mix channels take their statistics over only some of them.

    ``channels`` has the channels that count, by the id of the norm's weight.
    """

    def __init__(self, channels: dict[int, Tensor]) -> None:
        self.channels = channels

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        names = _NORMS.get(func)
        given = dict(zip(names, args, strict=False)) | kwargs if names else {}
        channels = self.channels.get(id(given.get("weight")))
        if channels is None:
            return func(*args, **kwargs)
        if func is F.group_norm:
            return _group_norm(given, channels)
        seen = given["input"].index_select(-1, channels)
        part = {
            "normalized_shape": seen.shape[-1:],
            "weight": given["weight"].index_select(0, channels),
        }
        if given.get("bias") is not None:
            part["bias"] = given["bias"].index_select(0, channels)
        normed = func(**{**given, "input": seen, **part})
        return torch.zeros_like(given["input"]).index_copy(-1, channels, normed)


_NORMS: dict[Any, tuple[str, ...]] = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
}


def _group_norm(given: dict[str, Any], channels: Tensor) -> Tensor:
    """A group norm in which each group uses only its channels that count."""
    x, groups = given["input"], given["num_groups"]
    width = x.shape[1] // groups
    out = torch.zeros_like(x)
    for group in range(groups):
        seen = channels[channels // width == group]
        if len(seen):
            part = {k: given[k].index_select(0, seen) for k in ("weight", "bias")}
            normed = F.group_norm(x.index_select(1, seen), 1, **part, eps=given["eps"])
            out = out.index_copy(1, seen, normed)
    return out
