"""Derive a model's neuron table from a forward pass, and prove it.

``tracing/`` follows every neuron through the model's operations. What it finds is only
believed once it is tested: reordering a group's neurons at random along all its axes
must leave the model's output unchanged, in float64 and with random weights. Groups that
fail are always active, with a warning.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, count, pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedspu.errors import ModelError
from fedspu.neurons.blocks import named_tensors
from fedspu.neurons.calls import uncompiled, undisturbed
from fedspu.neurons.choose import choose_ordered
from fedspu.neurons.layers import kind_of
from fedspu.neurons.probe import Probe
from fedspu.neurons.proof import prove
from fedspu.neurons.slimming.proof import prove_slim
from fedspu.neurons.table import Axis, Fixed, NeuronGroup, Neurons
from fedspu.neurons.tracing import OUTPUT, SILENT, Traced, Units, trace

MAX_RUNS = 8
"""Neurons that form more runs than this make one group, with their places listed."""

UNPROVED = "permuting their neurons changes the output"
ALONE = "there is only one such neuron"
PINNED = "they lie along places of the input or the output"
UNGROUPED = "no neurons were found in them"
UNHEARD = "the output does not depend on them"

ORDINARY = (*SILENT, PINNED)
"""Reasons that every model has: they need no warning."""


MUCH_ACTIVE = 0.6
"""If more than this share of a model is active at p = .5, little can be frozen."""


class NeuronWarning(UserWarning):
    """Some neurons of a model are always active, or could not be examined."""


def refuse_lazy(model: nn.Module, shape: tuple[int, ...] | None = None) -> None:
    """Refuse a model with layers whose sizes are not known yet; a batch has ``shape``.

    Each new model would have to be run once before its state can be loaded.
    """
    lazy = [
        f"{path} ({type(layer).__name__})"
        for path, layer in model.named_modules()
        if any(map(is_lazy, layer.parameters(recurse=False)))
    ]
    if lazy:
        like = "x[:2]" if shape is None else f"torch.zeros{shape}"
        raise ModelError(
            f"layers of the model do not know their sizes yet: {', '.join(lazy[:3])}; "
            "name the sizes, or run one batch through the model before it is returned: "
            f"model({like})"
        )


def map_neurons(model: nn.Module, example_input: Any) -> Neurons:
    """The table of a model's neuron groups, each proved by permutation.

    ``example_input`` is a tensor, a tuple of positional arguments or a dict of keyword
    arguments. The model, its mode and every generator are left as they were.
    """
    refuse_lazy(model)
    with undisturbed(), uncompiled(model):
        probe = Probe(model, example_input)
        traced = trace(probe)
        probe.know(traced.tables)
        unreached = _unreached(probe, traced)
        groups, fixed = _group(probe, traced.units, set())
        groups, wrong = prove(probe, groups, traced.readers)
        finer = _finer(probe, traced, groups)
        fixed += [Fixed(g.tensors, UNPROVED) for g in wrong]
        pinned = tuple(name for name in traced.pinned if name not in probe.plain)
        fixed += [Fixed(pinned, PINNED)] if pinned else []
        groups = [_stays(probe, group) for group in [*groups, *finer]]
        groups = _in_order(probe, groups)
        may_slim = not unreached or not probe.reaches(unreached)
        if unreached:  # what lies on a branch not taken is unknown
            groups = [
                replace(g, permutable=False, slim=g.slim and may_slim) for g in groups
            ]
        table = Neurons(
            groups=tuple(groups),
            fixed=tuple(fixed),
            unreached=unreached,
            **_travelling(model),
        )
        table = _with_ungrouped(table, UNHEARD, traced.unheard)
        table = _with_ungrouped(table, UNGROUPED, table.shapes)
        table = prove_slim(probe, table, may_pad=may_slim)
    _warn(table)
    return table


def _finer(
    probe: Probe, traced: Traced, groups: list[NeuronGroup]
) -> list[NeuronGroup]:
    """Proved groups inside whole units that turned out to be no neurons."""
    if probe.is_deaf:
        return []
    taken = {(axis.tensor, axis.dim) for group in groups for axis in group.axes}
    units = [
        unit for unit in traced.finer if not unit.reason and taken.isdisjoint(unit.axes)
    ]
    candidates, _ = _group(probe, units, {group.name for group in groups})
    right, _ = prove(probe, candidates, traced.readers) if candidates else ([], [])
    return right


def _stays(probe: Probe, group: NeuronGroup) -> NeuronGroup:
    """The group without tables that the model computes: nobody else can slice these.

    Nor can anybody move them, or those that it keeps as plain attributes.
    """
    axes = tuple(axis for axis in group.axes if axis.tensor not in probe.computed)
    if all(axis.tensor not in probe.plain for axis in group.axes):
        return group
    is_whole = axes == group.axes
    return replace(group, axes=axes, permutable=False, slim=group.slim and is_whole)


def _in_order(probe: Probe, groups: list[NeuronGroup]) -> list[NeuronGroup]:
    """Groups in the order of the tensors that they lie along."""
    order = {name: i for i, name in enumerate(probe.tensors)}
    return sorted(groups, key=lambda g: [(order[a.tensor], a.dim) for a in g.axes[:1]])


def _unreached(probe: Probe, traced: Traced) -> tuple[str, ...]:
    """The parameters that the example does not reach.

    Without a gradient, a parameter may still be used: where the model switches
    gradients off, or throws away what it computes. Neurons are followed there, too.
    """
    unused = probe.unreached()
    if unused is None:
        return tuple(
            name for name, _ in probe.model.named_parameters() if name in traced.unused
        )
    return tuple(n for n in unused if n in traced.unused or not traced.units)


def _with_ungrouped(table: Neurons, reason: str, names: Iterable[str]) -> Neurons:
    """Add those learnable tensors that the table does not mention as always active."""
    spoken_of = {axis.tensor for group in table.groups for axis in group.axes}
    spoken_of.update(name for entry in table.fixed for name in entry.tensors)
    spoken_of.update(table.unreached, table.statistics)
    left = tuple(
        name
        for name in names
        if name not in spoken_of and prod(table.shapes.get(name, ())) > 1
    )
    return replace(table, fixed=(*table.fixed, Fixed(left, reason))) if left else table


def _warn(table: Neurons) -> None:
    for entry in table.fixed:
        if entry.reason not in ORDINARY:
            warnings.warn(
                f"always active: {', '.join(entry.tensors)} ({entry.reason})",
                NeuronWarning,
                stacklevel=3,
            )
    if not table.groups and sum(len(shape) > 1 for shape in table.shapes.values()) > 1:
        warnings.warn(
            "nothing can be frozen: no neurons were found that could be proved, so the "
            "whole model is always active; `fedspu neurons` says what could be done",
            NeuronWarning,
            stacklevel=3,
        )
    elif little := _why_little(table):
        warnings.warn(little, NeuronWarning, stacklevel=3)
    if table.unreached:
        warnings.warn(
            f"not reached by the example input: {', '.join(table.unreached)}; "
            "these parameters are always active, and all neurons keep their places",
            NeuronWarning,
            stacklevel=3,
        )


def _why_little(table: Neurons) -> str:
    """Why little can be frozen, if it is because most of a model makes its output.

    So it is with a model without a head: its features are the output.
    """
    names = [
        n for entry in table.fixed if entry.reason == OUTPUT for n in entry.tensors
    ]
    total = table.num_entries()
    held = sum(prod(table.shapes.get(name, (0,))) for name in names)
    active = table.num_entries(choose_ordered(table, 0.5))
    if not table.groups or active <= MUCH_ACTIVE * total or held <= total / 2:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"little can be frozen: at p = 0.5, {100 * active / total:.0f} % of all "
        "entries are active, mostly because of neurons of "
        f"{', '.join(names[:3])}{more} ({OUTPUT}); if the model returns "
        "features for a head outside of it, map both as one model"
    )


# From units to groups -----------------------------------------------------------------


def _group(
    probe: Probe, units: list[Units], taken: set[str]
) -> tuple[list[NeuronGroup], list[Fixed]]:
    """Make groups of neurons that lie along the same axes, in the model's order.

    ``taken`` are names that no group may have.
    """
    order = {name: i for i, name in enumerate(probe.tensors)}
    set_apart: dict[str, set[str]] = defaultdict(set)
    for some in units:
        if some.reason:
            set_apart[some.reason].update(name for name, _ in some.axes)
    groups: list[NeuronGroup] = []
    fixed = [
        Fixed(tuple(sorted(names, key=order.__getitem__)), reason)
        for reason, names in set_apart.items()
    ]

    def place(some: Units) -> list[tuple[int, int, int]]:
        along = zip(some.axes, some.rows, strict=True)
        return [(order[name], dim, at.shape[1]) for (name, dim), at in along]

    for some in sorted((some for some in units if not some.reason), key=place):
        number = len(some.rows[0])
        if number == 1:
            fixed.append(Fixed(tuple(dict.fromkeys(n for n, _ in some.axes)), ALONE))
            continue
        runs = _runs(some.rows)
        if len(runs) > MAX_RUNS or min(b - a for a, b in runs) == 1:
            runs = [(0, number)]
        for first, end in runs:
            name = _name(some.axes[0][0], taken | {group.name for group in groups})
            fitted = tuple(
                Axis.through(*axis, torch.from_numpy(at[first:end]))
                for axis, at in zip(some.axes, some.rows, strict=True)
            )
            groups.append(NeuronGroup(name, end - first, fitted, permutable=True))
    return groups, fixed


def _runs(places: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Cut neighbouring neurons into runs that advance evenly along every axis.

    ``places`` has for each axis the positions of each neuron, one neuron in each row.
    """
    steps_evenly = np.ones(len(places[0]) - 1, dtype=bool)
    for at in places:
        step = at[1:] - at[:-1]
        steps_evenly &= (step == _repeats(at[1:])[:, None]).all(1)
    cuts = (np.flatnonzero(~steps_evenly) + 1).tolist()
    return list(pairwise([0, *cuts, len(places[0])]))


def _repeats(at: np.ndarray) -> np.ndarray:
    """Length of the run of neighbouring positions at the beginning of each row."""
    is_next = at == at[:, :1] + np.arange(at.shape[1])
    lengths: np.ndarray = np.cumprod(is_next, axis=1).sum(1)
    return lengths


def _name(tensor: str, taken: set[str]) -> str:
    """A free name: the first tensor's layer, else the tensor, else with a number."""
    layer = tensor.rpartition(".")[0] or tensor
    numbered = (f"{tensor}#{k}" for k in count(2))
    return next(n for n in chain((layer, tensor), numbered) if n not in taken)


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
