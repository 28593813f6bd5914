"""A plan as a file of a run folder, so that its models can be used without its data."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedspu import models
from fedspu.errors import FedSPUError, SettingsError, StorageError
from fedspu.federation.plan import (
    Build,
    Plan,
    Remodelled,
    Sample,
    capacities_of,
)
from fedspu.federation.server import MEAN, SQUARE
from fedspu.federation.storage.saved_index import SETTINGS
from fedspu.federation.storage.saved_run import Checkpoint, SavedRun
from fedspu.files import read_file
from fedspu.methods.method import Method
from fedspu.neurons.slimming.sizes import check_lines, source_of
from fedspu.neurons.table import (
    Along,
    Axis,
    Call,
    Fixed,
    NeuronGroup,
    Neurons,
    State,
)
from fedspu.resolve import validated
from fedspu.settings import SAME_BITS, Settings
from fedspu.settings_text import MOST_BYTES, flatten, one_line, parse_toml
from fedspu.tasks.task import Task


def describe_plan(plan: Plan, sample: Sample) -> str:
    """A plan without w0 and settings, as JSON."""
    found: dict[str, Any] = {
        "num_outputs": sample.num_outputs,
        "example": {
            "shape": list(sample.x.shape),
            "dtype": str(sample.x.dtype).removeprefix("torch."),
        },
        "neurons": _describe_table(plan.neurons),
    }
    if isinstance(plan.build, Remodelled):
        found["own_neurons"] = _describe_table(plan.build.neurons)
    return json.dumps(found)


def check_settings(
    path: Path, saved: Mapping[str, Any], now: Mapping[str, Any], but: str = ""
) -> None:
    """Refuse settings of a run that were edited since it began, ``but`` this one."""
    before, found = _binding(saved), _binding(now)
    for name in sorted((before.keys() | found.keys()) - {but}):
        old, new = before.get(name), found.get(name)
        if old == new:
            continue
        more = f"add --rounds {new}, " if name == "rounds" else ""
        raise StorageError(
            one_line(
                f"{path}/settings.toml says {name} = {new}, but the run began with "
                f"{old}; {more}undo that, or delete the file to go on with what the "
                "run began with"
            )
        )


def read_settings(saved: SavedRun, but: str = "") -> dict[str, Any] | None:
    """What a run's settings.toml says; None if there is none. Refuses edited ones."""
    file = saved.path / SETTINGS
    if not os.path.lexists(file):
        return None
    try:
        found = parse_toml(read_file(file, MOST_BYTES), str(file))
    except (SettingsError, StorageError) as error:
        raise StorageError(
            f"{error}; delete it to go on with what the run began with"
        ) from None
    check_settings(saved.path, saved.index.settings, found, but)
    try:
        validated(dict(flatten(found)))  # those that may differ may be anything
    except SettingsError as error:
        raise StorageError(
            f"{file}: {error}; delete it to go on with what the run began with"
        ) from None
    return found


def _binding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run's results depend on, by dotted name."""
    return {name: v for name, v in flatten(settings) if name not in SAME_BITS}


def restore_plan(
    path: Path,
    text: str,
    settings: Settings,
    method: Method,
    task: Task,
    build: Build | None,
    initial: State,
) -> Plan:
    """The plan of the run in ``path``, from what ``describe_plan`` said of it.

    Without ``build``, the model is found by its name in the settings.
    """
    try:
        found = json.loads(text)
        return _restored(found, settings, method, task, build, initial)
    except FedSPUError:
        raise
    except Exception as error:  # whatever a forged plan leads to
        raise StorageError(f"{path}: its plan is damaged ({error!r})") from None


def check_fits(path: Path, plan: Plan, last: Checkpoint) -> None:
    """Refuse a checkpoint that is not one of this plan."""
    federation = last.federation
    forms = {n: (t.shape, t.dtype) for n, t in federation.global_state.items()}
    if forms != {n: (t.shape, t.dtype) for n, t in plan.initial.items()}:
        raise StorageError(f"{path}: the server's model is not one of this run")
    for name, tensor in federation.extra.items():
        for prefix in (MEAN, SQUARE):
            own = plan.initial.get(name.removeprefix(prefix))
            if name.startswith(prefix) and (own is None or own.shape != tensor.shape):
                raise StorageError(f"{path}: the server's {name} is of another model")
    clients = {*federation.last, *federation.stopped, *last.scores.personal}
    clients |= federation.kept.keys()
    if not clients <= set(range(plan.num_clients)):
        raise StorageError(f"{path}: it has more clients than {plan.num_clients}")
    sizes = {group.name: group.size for group in plan.neurons.groups}
    for client, active in federation.kept.items():
        if active.keys() != sizes.keys() or not all(
            _is_choice(indices, sizes[name]) for name, indices in active.items()
        ):
            raise StorageError(f"{path}: client {client} has neurons of another model")


def _is_choice(indices: Tensor, size: int) -> bool:
    """Whether these are neurons of a group, in order, each once."""
    if not len(indices):
        return True
    return bool((indices.diff() > 0).all() and indices[0] >= 0 and indices[-1] < size)


def _restored(
    found: dict[str, Any],
    settings: Settings,
    method: Method,
    task: Task,
    build: Build | None,
    initial: State,
) -> Plan:
    if build is None:
        build = partial(models.build, settings.model, found["num_outputs"])
    capacities = capacities_of(settings)
    if method.remodel is not None:
        # Only the example's shape and type matter, not its values.
        dtype = getattr(torch, found["example"]["dtype"])
        example = torch.zeros(found["example"]["shape"], dtype=dtype)
        own = _restore_table(found["own_neurons"])
        distinct = tuple(sorted(set(capacities)))
        build = Remodelled(build, method.remodel, own, distinct, example)
    neurons = _restore_table(found["neurons"])
    return Plan(settings, method, task, build, neurons, initial, capacities)


def _describe_table(neurons: Neurons) -> dict[str, Any]:
    return {
        "groups": [asdict(group) for group in neurons.groups],
        "shapes": {name: list(shape) for name, shape in neurons.shapes.items()},
        "statistics": sorted(neurons.statistics),
        "norm_tensors": sorted(neurons.norm_tensors),
        "fixed": [asdict(fixed) for fixed in neurons.fixed],
        "unreached": list(neurons.unreached),
        "resized": {line: list(axes) for line, axes in neurons.resized.items()},
        "uncounted": [
            [asdict(call), [[axis, asdict(along)] for axis, along in absences]]
            for call, absences in neurons.uncounted.items()
        ],
        "code": {line: source_of(line) for line in _lines(neurons)},
    }


def _lines(neurons: Neurons) -> list[str]:
    """The lines of the model's code that a table speaks of."""
    return sorted({*neurons.resized, *(call.line for call in neurons.uncounted)})


def _restore_table(found: dict[str, Any]) -> Neurons:
    check_lines(found.get("code", {}))
    return Neurons(
        groups=tuple(map(_restore_group, found["groups"])),
        shapes={name: tuple(shape) for name, shape in found["shapes"].items()},
        statistics=frozenset(found["statistics"]),
        norm_tensors=frozenset(found["norm_tensors"]),
        fixed=tuple(Fixed(tuple(f["tensors"]), f["reason"]) for f in found["fixed"]),
        unreached=tuple(found["unreached"]),
        resized={line: (a, b) for line, (a, b) in found.get("resized", {}).items()},
        uncounted={
            Call(**call): tuple((axis, Along(**along)) for axis, along in absences)
            for call, absences in found.get("uncounted", ())
        },
    )


def _restore_group(found: dict[str, Any]) -> NeuronGroup:
    axes = tuple(map(_restore_axis, found["axes"]))
    return NeuronGroup(
        **{**found, "axes": axes, "counts": tuple(found.get("counts", ()))}
    )


def _restore_axis(found: dict[str, Any]) -> Axis:
    return Axis(**{**found, "index": tuple(found.get("index", ()))})
