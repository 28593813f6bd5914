"""A plan as a file of a run folder, so that its models can be used without its data."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedspu import models
from fedspu.errors import StorageError
from fedspu.federation.plan import (
    Build,
    Plan,
    Remodelled,
    Sample,
    capacities_of,
)
from fedspu.methods.method import Method
from fedspu.neurons.table import Axis, Fixed, NeuronGroup, Neurons, State
from fedspu.settings import Settings
from fedspu.tasks.task import Task


def describe_plan(plan: Plan, sample: Sample) -> str:
    """What settings and w0 do not say about a plan, as JSON."""
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path}: its plan is damaged ({error!r})") from None


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
    }


def _restore_table(found: dict[str, Any]) -> Neurons:
    return Neurons(
        groups=tuple(
            NeuronGroup(
                **{**group, "axes": tuple(Axis(**axis) for axis in group["axes"])}
            )
            for group in found["groups"]
        ),
        shapes={name: tuple(shape) for name, shape in found["shapes"].items()},
        statistics=frozenset(found["statistics"]),
        norm_tensors=frozenset(found["norm_tensors"]),
        fixed=tuple(Fixed(tuple(f["tensors"]), f["reason"]) for f in found["fixed"]),
        unreached=tuple(found["unreached"]),
    )
