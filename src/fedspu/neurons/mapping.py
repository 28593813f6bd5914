"""Derive a model's neuron table from its dependency graph, and prove it.

Torch-Pruning traces which channels of which layers belong together. It silently treats
operations it does not know as element-wise, so every group is tested: reordering a
group's neurons at random along all its axes must leave the model's output unchanged, in
float64 and with random weights. Groups that fail are always active, with a warning.
"""

import warnings
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn

from fedspu.neurons.blocks import named_tensors
from fedspu.neurons.calls import undisturbed
from fedspu.neurons.layers import kind_of
from fedspu.neurons.probe import Probe
from fedspu.neurons.proof import prove, prove_slim
from fedspu.neurons.table import Axis, Fixed, NeuronGroup, Neurons
from fedspu.neurons.tracing import OUTPUT, Places, Traced, trace

MAX_RUNS = 8
"""A layer whose neurons form more runs than this counts as irregular."""

UNPROVED = "permuting their neurons changes the output"
IRREGULAR = "their neurons follow no regular pattern"
UNGROUPED = "no neurons were found in them"


class NeuronWarning(UserWarning):
    """Some neurons of a model are always active, or could not be examined."""


def map_neurons(model: nn.Module, example_input: Any) -> Neurons:
    """The table of a model's neuron groups, each proved by permutation.

    ``example_input`` is a tensor, a tuple of positional arguments or a dict of keyword
    arguments. The model, its mode and every generator are left as they were.
    """
    with undisturbed():
        probe = Probe(model, example_input)
        unreached = probe.unreached()
        traced = trace(probe)
        groups, fixed = _group(probe, traced)
        groups, wrong = prove(probe, groups, traced.readers)
        if unreached:  # what lies on a branch not taken is unknown
            groups = [replace(g, permutable=False, slim=False) for g in groups]
        table = Neurons(
            groups=tuple(groups),
            fixed=(*fixed, *(Fixed(g.tensors, UNPROVED) for g in wrong)),
            unreached=unreached,
            **_travelling(model),
        )
        table = prove_slim(probe, _with_ungrouped(table))
    _warn(table)
    return table


def _with_ungrouped(table: Neurons) -> Neurons:
    """Add learnable tensors that the table does not mention yet, as always active."""
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
            "these parameters are always active, and all neurons keep their places",
            NeuronWarning,
            stacklevel=3,
        )


# From units to groups -----------------------------------------------------------------


def _group(probe: Probe, traced: Traced) -> tuple[list[NeuronGroup], list[Fixed]]:
    """Collect units that lie along the same axes into groups, in the model's order."""
    order = {name: i for i, name in enumerate(probe.tensors)}
    shapes = {name: tensor.shape for name, tensor in probe.tensors.items()}
    alike: dict[Any, list[Places]] = defaultdict(list)
    set_apart: dict[str, set[str]] = defaultdict(set)
    for unit in traced.units:
        if unit.reason:
            set_apart[unit.reason].update(name for name, _ in unit.places)
        else:
            signature = tuple(
                sorted(
                    (order[name], dim, len(positions))
                    for (name, dim), positions in unit.places.items()
                )
            )
            alike[signature].append(unit.places)

    groups: list[NeuronGroup] = []
    fixed = [
        Fixed(tuple(sorted(names, key=order.__getitem__)), reason)
        for reason, names in set_apart.items()
    ]
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
            groups.append(NeuronGroup(name, len(run), tuple(fit), permutable=True))
    return groups, fixed


def _runs(rows: list[Places], axes: list[tuple[str, int]]) -> list[list[Places]]:
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
    run: list[Places], axes: list[tuple[str, int]], shapes: dict[str, torch.Size]
) -> list[Axis]:
    """The axes of a run of neurons, in the order given; empty if it has no pattern."""
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
    """A free name: the first tensor's layer, else the tensor, else with a number."""
    layer = tensor.rpartition(".")[0] or tensor
    candidates = [layer, tensor, *(f"{tensor}#{k}" for k in range(2, MAX_RUNS + 2))]
    return next(name for name in candidates if name not in taken)


# What travels -------------------------------------------------------------------------


def _travelling(model: nn.Module) -> dict[str, Any]:
    """Which of a model's tensors travel, and which of those belong to norms."""
    norms = {
        id(tensor)
        for layer in model.modules()
        if kind_of(layer).is_norm
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
