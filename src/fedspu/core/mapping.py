"""Derive a model's neuron table from its dependency graph, and prove it.

Torch-Pruning traces which channels of which layers belong together. It takes operations
it does not know for element-wise, silently, so no group is believed: reordering a
group's neurons at random along all its axes must leave the model's output unchanged, in
float64 and with random weights. What fails stays always active, with a warning.
"""

import warnings
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspu.core.layers import NORMS
from fedspu.core.neurons import Axis, Fixed, NeuronGroup, Neurons, named_tensors
from fedspu.core.probe import Probe, all_tensors, call, flat_tensors, undisturbed
from fedspu.core.slim import slim_model
from fedspu.core.tracing import Unit, trace
from fedspu.errors import ModelError

NUM_SWAPS = 12
"""How many pairs of neighbours are tried before a group is called wrong."""

MAX_RUNS = 8
"""A layer cut into more pieces than this has no pattern worth a table."""

OUTPUT = "they reach the model's output"
UNPROVED = "permuting their neurons changes the output"
IRREGULAR = "their neurons follow no regular pattern"
UNGROUPED = "no neurons were found in them"


class NeuronWarning(UserWarning):
    """Some neurons of a model stay always active, or could not be looked at."""


def map_neurons(model: nn.Module, example_input: Any) -> Neurons:
    """The table of a model's neuron groups, each proved by permutation.

    ``example_input`` is a tensor, a tuple of positional or a dict of keyword arguments
    of the model. The model, its mode and every generator are left as they were.
    """
    with undisturbed():
        probe = Probe(model, example_input)
        unreached = probe.unreached()
        groups, fixed = _group(probe, trace(probe))
        groups, unproved = _prove(probe, groups)
        if unreached:  # nobody knows what lies on the branch not taken
            groups = [replace(g, permutable=False, slim=False) for g in groups]
        table = Neurons(
            groups=tuple(groups),
            fixed=(*fixed, *unproved),
            unreached=unreached,
            **_travelling(model),
        )
        table = _prove_slim(probe, _with_ungrouped(table))
    _warn(table)
    return table


def _with_ungrouped(table: Neurons) -> Neurons:
    """List the learnable tensors that nothing else in the table speaks of."""
    spoken_of = {axis.tensor for group in table.groups for axis in group.axes}
    spoken_of.update(name for entry in table.fixed for name in entry.tensors)
    spoken_of.update(table.unreached, table.statistics)
    left = tuple(
        name
        for name, shape in table.shapes.items()
        if name not in spoken_of and prod(shape) > 1
    )
    return (
        replace(table, fixed=(*table.fixed, Fixed(left, UNGROUPED))) if left else table
    )


def _warn(table: Neurons) -> None:
    for entry in table.fixed:
        if entry.reason != OUTPUT:
            warnings.warn(
                f"always active: {', '.join(entry.tensors)} ({entry.reason})",
                NeuronWarning,
                stacklevel=3,
            )
    if table.unreached:
        warnings.warn(
            f"not reached by the example input: {', '.join(table.unreached)}; "
            "these parameters are always active, and no neuron may change its place",
            NeuronWarning,
            stacklevel=3,
        )


# From units to groups -----------------------------------------------------------------


def _group(
    probe: Probe, units: list[tuple[Unit, bool]]
) -> tuple[list[NeuronGroup], list[Fixed]]:
    """Collect units that lie along the same axes into groups, in the model's order."""
    order = {name: i for i, name in enumerate(probe.names.values())}
    shapes = {name: tensor.shape for name, tensor in all_tensors(probe.model)}
    alike: dict[Any, list[Unit]] = defaultdict(list)
    ends: set[str] = set()
    for unit, reaches_output in units:
        if reaches_output:
            ends.update(name for name, _ in unit)
        else:
            signature = tuple(
                sorted(
                    (order[name], dim, len(positions))
                    for (name, dim), positions in unit.items()
                )
            )
            alike[signature].append(unit)

    groups: list[NeuronGroup] = []
    fixed = []
    if ends:
        fixed.append(Fixed(tuple(sorted(ends, key=order.__getitem__)), OUTPUT))
    for signature in sorted(alike):
        axes = sorted(alike[signature][0], key=lambda axis: (order[axis[0]], axis[1]))
        rows = sorted(alike[signature], key=lambda unit: unit[axes[0]])
        runs = _runs(rows, axes)
        fits = [_fit(run, axes, shapes) for run in runs]
        if len(runs) > MAX_RUNS or not all(fits):
            names = tuple(dict.fromkeys(name for name, _ in axes))
            fixed.append(Fixed(names, IRREGULAR))
            continue
        for run, fit in zip(runs, fits, strict=True):
            name = _name(axes[0][0], {group.name for group in groups})
            groups.append(NeuronGroup(name, len(run), tuple(fit)))
    return groups, fixed


def _runs(rows: list[Unit], axes: list[tuple[str, int]]) -> list[list[Unit]]:
    """Cut neighbouring neurons into runs that advance evenly along every axis."""
    runs = [[rows[0]]]
    for before, unit in pairwise(rows):
        steps_evenly = all(
            [b - a for a, b in zip(before[axis], unit[axis], strict=True)]
            == [_repeat(unit[axis])] * len(unit[axis])
            for axis in axes
        )
        if steps_evenly:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def _repeat(positions: list[int]) -> int:
    """Length of the run of neighbouring positions at the beginning."""
    length = 1
    while length < len(positions) and positions[length] == positions[0] + length:
        length += 1
    return length


def _fit(
    run: list[Unit], axes: list[tuple[str, int]], shapes: dict[str, torch.Size]
) -> list[Axis]:
    """The axes of a run of neurons, in the order given; none if it has no pattern."""
    fitted = []
    for name, dim in axes:
        first = run[0][name, dim]
        repeat = _repeat(first)
        copies = len(first) // repeat
        stride = first[repeat] - first[0] if copies > 1 else 0
        axis = Axis(name, dim, repeat, first[0], copies, stride)
        positions = axis.positions(len(run))
        wanted = [unit[name, dim] for unit in run]
        if positions.tolist() != wanted or int(positions.max()) >= shapes[name][dim]:
            return []
        fitted.append(axis)
    return fitted


def _name(tensor: str, taken: set[str]) -> str:
    """A group's name: its first tensor's layer, else the tensor, else a number."""
    layer = tensor.rpartition(".")[0] or tensor
    candidates = [layer, tensor, *(f"{tensor}#{k}" for k in range(2, MAX_RUNS + 2))]
    return next(name for name in candidates if name not in taken)


# The proof ----------------------------------------------------------------------------


def _prove(
    probe: Probe, groups: list[NeuronGroup]
) -> tuple[list[NeuronGroup], list[Fixed]]:
    """Keep the groups whose neurons may change places; the others are always active."""
    rng = np.random.default_rng(0)
    proved, failed = [], []
    tensors = dict(all_tensors(probe.model))
    for group in groups:
        turn = rng.permutation(group.size)
        cycle = np.empty_like(turn)
        cycle[turn] = np.roll(turn, 1)  # one cycle: every neuron moves
        if _survives(probe, tensors, group, cycle):
            proved.append(group)
        elif any(
            _survives(probe, tensors, group, _swap(group.size, j))
            for j in rng.permutation(group.size - 1)[:NUM_SWAPS]
        ):
            proved.append(replace(group, permutable=False, slim=False))
        else:
            failed.append(Fixed(group.tensors, UNPROVED))
    return proved, failed


def _swap(size: int, j: int) -> np.ndarray:
    order = np.arange(size)
    order[[j, j + 1]] = order[[j + 1, j]]
    return order


def _survives(
    probe: Probe, tensors: dict[str, Tensor], group: NeuronGroup, order: np.ndarray
) -> bool:
    """Whether the output stays the same with a group's neurons in another order."""
    before = {name: tensors[name].detach().clone() for name in group.tensors}
    with torch.no_grad():
        for axis in group.axes:
            tensor, rows = tensors[axis.tensor], axis.positions(group.size)
            index = torch.arange(tensor.shape[axis.dim])
            index[rows.flatten()] = rows[torch.from_numpy(order)].flatten()
            tensor.copy_(tensor.index_select(axis.dim, index.to(tensor.device)))
        survives = probe.is_unchanged()
        for name, values in before.items():
            tensors[name].copy_(values)
    return survives


def _prove_slim(probe: Probe, table: Neurons) -> Neurons:
    """Find the groups that a smaller copy of the model can do without."""
    candidates = [group for group in table.groups if group.slim and group.size > 1]
    if _slims(probe, table, candidates):
        return table
    stuck = {g.name for g in candidates if not _slims(probe, table, [g])}
    groups = tuple(
        replace(group, slim=group.slim and group.name not in stuck)
        for group in table.groups
    )
    return replace(table, groups=groups)


def _slims(probe: Probe, table: Neurons, groups: list[NeuronGroup]) -> bool:
    active = table.everything()
    for group in groups:
        active[group.name] = torch.arange(max(1, group.size // 2))
    try:
        with torch.no_grad():
            slim = slim_model(probe.model, table, active)
            outputs = flat_tensors(call(slim, probe.example))
    except (RuntimeError, ModelError):
        return False
    return [out.shape for out in outputs] == probe.shapes


def _travelling(model: nn.Module) -> dict[str, Any]:
    """Which of a model's tensors travel, and which of those belong to norms."""
    norms = {
        id(tensor)
        for layer in model.modules()
        if isinstance(layer, NORMS)
        for tensor in (*layer.parameters(False), *layer.buffers(False))
    }
    learnable, statistics, of_norms = {}, {}, set()
    parameters = {id(parameter) for parameter in model.parameters()}
    for name, tensor in named_tensors(model):
        if not tensor.is_floating_point():
            continue  # num_batches_tracked and the like stay with the client
        if id(tensor) in parameters and tensor.requires_grad:
            learnable[name] = tuple(tensor.shape)
        elif id(tensor) in norms and id(tensor) not in parameters:
            statistics[name] = tuple(tensor.shape)
        else:
            continue
        if id(tensor) in norms:
            of_norms.add(name)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in named_tensors(model)
        if name in learnable or name in statistics
    }
    return {
        "shapes": shapes,
        "statistics": frozenset(statistics),
        "norm_tensors": frozenset(of_norms),
    }
