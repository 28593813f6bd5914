"""Everything that a run needs before its first round: data, clients, model, plan."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

from torch import nn

from fedspu import models
from fedspu.data import FROM_MEMORY, load
from fedspu.data.dataset import Dataset, with_targets
from fedspu.data.examples import DividedData, divide
from fedspu.data.own.arrays import from_arrays
from fedspu.data.own.pairs import Data, as_arrays
from fedspu.engines.choose import check_engine
from fedspu.engines.machine import find_device
from fedspu.errors import DataError, SettingsError
from fedspu.federation.plan import Build, Plan, Sample, check_choices, make_plan
from fedspu.methods import make_method
from fedspu.methods.method import Method
from fedspu.neurons.calls import undisturbed
from fedspu.partial.clamped_norms import why_not_compiled
from fedspu.resolve import resolve
from fedspu.settings import Settings
from fedspu.settings_text import flatten
from fedspu.tasks import find_task
from fedspu.tasks.task import Task


@dataclass(frozen=True)
class Prepared:
    """A run, ready to be played: the plan, all clients' examples, and a sample."""

    plan: Plan
    examples: DividedData
    sample: Sample


def prepare(
    settings: Settings | Mapping[str, Any],
    *,
    model: Build | None = None,
    data: Data | None = None,
    method: Method | None = None,
    task: Task | None = None,
) -> Prepared:
    """Check the settings, load and divide the data, build and map the model."""
    given = settings if isinstance(settings, Mapping) else settings.model_dump()
    chosen, method, task = choose(given, model, data, method, task)
    find_device(chosen.device)
    check_engine(chosen)
    dataset = dataset_for(chosen, data, task)
    examples = divide(chosen, dataset, task)
    if task.has_classes and len(dataset.y.unique()) == 1:
        warnings.warn(
            "all examples have the same class: there is nothing to learn; look at y",
            stacklevel=3,
        )
    sample = Sample(dataset.name, *dataset.take(slice(2)), dataset.num_outputs)
    if model is None:
        models.check_padding(chosen.model, dataset.padding, dataset.name)
    build = model or partial(models.build, chosen.model, dataset.num_outputs)
    plan = make_plan(chosen, method, task, build, sample)
    plan = replace(plan, settings=with_kernels(plan, sample))
    _check_enough_examples(plan, examples)
    return Prepared(plan, examples, sample)


def with_kernels(plan: Plan, sample: Sample) -> Settings:
    """The settings with the kernels that all clients will use."""
    asked = plan.settings.train.kernels
    if asked == "torch":
        return plan.settings
    device = find_device(plan.settings.device)
    if device.type == "cpu":
        with undisturbed():
            reason = why_not_compiled(plan.build().train(), tuple(sample.x.shape[1:]))
    else:
        reason = f"they do not run on {device.type}"
    if reason and asked == "native":
        raise SettingsError(
            f"train.kernels = 'native': they cannot run {plan.settings.model} here: "
            f"{reason}; a run that began with them needs them to the end, a new one "
            "may use auto or torch"
        )
    kernels = {"kernels": "torch" if reason else "native"}
    train = plan.settings.train.model_copy(update=kernels)
    return plan.settings.model_copy(update={"train": train})


def choose(
    given: Mapping[str, Any],
    model: Build | None,
    data: Data | None,
    method: Method | None,
    task: Task | None,
) -> tuple[Settings, Method, Task]:
    """Complete settings, and the method and task they name; opens no file."""
    flat = dict(flatten(given))
    for name, value in {"model": model, "method.name": method, "task": task}.items():
        if isinstance(value, str):
            raise SettingsError(
                f"{name.partition('.')[0]} = {value!r}: a name goes into the settings, "
                f"as in simulate({{{name!r}: {value!r}}})"
            )
    if data is not None:
        flat["data.name"] = FROM_MEMORY
    in_python = set()
    if model is not None:
        flat["model"] = f"{model.__module__}:{getattr(model, '__qualname__', model)}"
        in_python.add("model")
    if method is not None:
        flat["method.name"] = method.name
        in_python.add("method")
    if task is not None:
        flat["task"] = task.name
        in_python.add("task")
    settings = resolve(flat, in_python, task)
    if model is None:
        models.find(settings.model)
    method = method or make_method(settings.method)
    task = task or find_task(settings.task)
    check_choices(settings, method, task)
    return settings, method, task


def dataset_for(settings: Settings, data: Data | None, task: Task) -> Dataset:
    """The data that was given in Python, or that the settings name."""
    if data is not None:
        return with_targets(from_arrays(*as_arrays(data)), task)
    if settings.data.name == FROM_MEMORY:
        raise SettingsError(
            f"data.name = {FROM_MEMORY!r}: expected arrays:FILE.npz; a run that was "
            "given arrays in Python needs them again, as data=(x, y)"
        )
    return load(settings.data.name, settings.data.dir, task)


def _check_enough_examples(plan: Plan, examples: DividedData) -> None:
    """Refuse a client with a single training example, where one is not enough."""
    client = examples.splits.too_few_to_train()
    if client is None:
        return
    why = ""
    if plan.method.is_choice:
        why = f"clients of {plan.method.name} train for an epoch to score their neurons"
    norms = nn.modules.batchnorm._BatchNorm
    if any(isinstance(layer, norms) for layer in plan.build().modules()):
        why = "the model has batch norms, which cannot train on one"
    if why:
        raise DataError(
            f"client {client} has a single training example, and {why}; raise "
            "data.min_examples or lower clients.number"
        )


def fingerprint(data: Dataset) -> str:
    """A short text that tells data sets apart, by their targets and shape."""
    targets = sha256(data.y.numpy().tobytes()).hexdigest()[:16]
    return f"{tuple(data.x.shape)} {data.x.dtype} {targets}"
