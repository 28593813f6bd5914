"""A method on some model and data, and the runs that laws look at.

A run is played when a law first asks for it, and only once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fedspu.conformance.nets import Arrays, holding_still
from fedspu.conformance.recorded_turns import as_received
from fedspu.conformance.recording import Recording, record
from fedspu.data.examples import DividedData, divide
from fedspu.engines.machine import one_thread
from fedspu.engines.workers import can_fork
from fedspu.federation.engine import Engine
from fedspu.federation.plan import Build, Plan, capacities_of
from fedspu.federation.rounds import Round, Scores, play
from fedspu.federation.server import Federation
from fedspu.methods import METHODS, find_entry, make_method
from fedspu.methods.method import Memory, Method
from fedspu.prepare import Prepared, prepare
from fedspu.runs import Run, resume, simulate
from fedspu.settings import MethodSettings, Settings
from fedspu.settings_text import flatten, nest

MakeEngine = Callable[[Plan, DividedData], Engine]

ENGINES: tuple[MakeEngine, ...] = ()
"""Further engines, whose runs must equal those of ``simulate``."""

SETTINGS: dict[str, Any] = {
    "seed": 3,
    "workers": 1,
    "rounds": 2,
    "clients.number": 5,
    "clients.per_round": 3,
    "clients.capacities": [1.0, 0.5, 0.75, 1.0, 0.5],
    "train.epochs": 1,
    "train.batch_size": 8,
    "train.lr": 0.1,
    "train.momentum": 0.5,
    "train.weight_decay": 0.01,
    "data.alpha": 1.0,
    "data.min_examples": 8,
    "judge.clients": 3,
}
"""Five clients, three per round. In the first two rounds only the three weaker clients
take part, so there are entries that no client trains."""

STOPPING: dict[str, Any] = {
    "early_stopping.on": True,
    "early_stopping.blend": 0.01,
    "train.lr": 0.3,
    "rounds": 3,
}
"""Stopping depends almost only on the validation loss, which rises: clients do stop."""

IDLE: dict[str, Any] = {"train.lr": 0.0}
"""No client learns anything."""

FULL: dict[str, Any] = {
    "clients.capacities": [1.0],
    "data.partition": "iid",
    "train.kernels": "torch",
}
"""Every client trains the whole model, on examples of every class.

By PyTorch: compiled epochs round differently than a method's own loop does."""


class Interruption(Exception):  # noqa: N818  # not an error: it is intended
    """Raised to interrupt a run that is then resumed."""


@dataclass(repr=False)
class Setup:
    """The model and data that methods are tried on, and FedAvg to compare them with."""

    name: str
    build: Build
    data: Arrays | tuple[Any, Any]
    engines: tuple[MakeEngine, ...] = ENGINES
    settings: Mapping[str, Any] = field(default_factory=dict)
    _measures: dict[Any, "Case"] = field(default_factory=dict)

    def fedavg_like(self, method: Method) -> "Case":
        """FedAvg with the method's own ``stays`` and ``combine``.

        If tensors other than norm statistics stay with the clients, each client keeps
        its own model.
        """
        stay = dict(flatten(self.settings)).get("norm.policy") == "local"
        keeps_own = stay or bool(method.stays(self.neurons) - self.neurons.statistics)
        key = method.combine, method.stays, keeps_own
        if key not in self._measures:
            fedavg = make_method(MethodSettings(name="fedavg"))
            measure = replace(
                fedavg,
                combine=method.combine,
                stays=method.stays,
                judged_by="own" if keeps_own else fedavg.judged_by,
            )
            self._measures[key] = Case(measure, self)
        return self._measures[key]

    @cached_property
    def neurons(self) -> Any:
        """The neuron table of the model, as FedAvg uses it."""
        fedavg = make_method(MethodSettings(name="fedavg"))
        return Case(fedavg, self).prepare().plan.neurons


@dataclass(repr=False)
class Case:
    """One method in one setup."""

    method: Method
    setup: Setup

    def __str__(self) -> str:
        """The method and the model, and the reading if it is not the usual one."""
        name, reading = self.method.name, self.method.reading
        usual = find_entry(name).reading if name in METHODS else reading
        told = "" if reading == usual else f" ({reading})"
        return f"{name}{told} on {self.setup.name}"

    def prepare(self, build: Build | None = None, **given: Any) -> Prepared:
        """A run ready to be played; ``given`` changes settings, by dotted name."""
        return prepare(
            {**self._settings(), **given},
            model=build or self.setup.build,
            data=self.setup.data,
            method=self.method,
        )

    def _settings(self) -> dict[str, Any]:
        given = {
            name: value
            for name, value in flatten(self.setup.settings)
            if not name.startswith("method.")
        }
        return {**SETTINGS, **given}

    def _stopping(self) -> dict[str, Any]:
        """The settings that make clients stop, except those that the setup gives."""
        given = dict(flatten(self.setup.settings))
        return {name: v for name, v in STOPPING.items() if name not in given}

    def like_usual(self, **given: Any) -> Prepared:
        """The usual run, with changed settings that affect neither model nor data."""
        usual = self.prepared
        settings = self.prepared.plan.settings
        changed = {**dict(flatten(settings.model_dump())), **given}
        plan = replace(usual.plan, settings=Settings.model_validate(nest(changed)))
        return replace(usual, plan=plan)

    def play(self, ready: Prepared, rounds: int | None = None) -> Recording:
        """Record a run to its end, or for this many rounds."""
        with one_thread():
            return record(ready.plan, ready.examples, rounds)

    def play_on(self, make: MakeEngine, ready: Prepared) -> list[Round]:
        """Play a run on another engine."""
        engine = make(ready.plan, ready.examples)
        try:
            with one_thread():
                start = Federation(0, ready.plan.initial)
                return list(play(ready.plan, engine, start, Scores()))
        finally:
            engine.close()

    # The runs ------------------------------------------------------------------------

    @cached_property
    def prepared(self) -> Prepared:
        """The usual run, ready to be played."""
        return self.prepare()

    @cached_property
    def usual(self) -> Recording:
        """A run with the usual settings, without early stopping."""
        return self.play(self.prepared)

    @cached_property
    def stopping(self) -> Recording:
        """A run with early stopping, in which some clients do stop."""
        return self.play(self.like_usual(**self._stopping()))

    @cached_property
    def full(self) -> Recording:
        """A run in which every client has capacity for the whole model."""
        if self.method.remodel is not None:
            return self.play(self.prepare(**FULL))
        ready = self.like_usual(**FULL)
        settings = ready.plan.settings
        plan = replace(ready.plan, capacities=capacities_of(settings))
        examples = divide(settings, ready.examples.data, plan.task)
        return self.play(replace(ready, plan=plan, examples=examples))

    @cached_property
    def idle(self) -> Recording:
        """One round in which no client learns: the learning rate is 0."""
        return self.play(_from_what_travels(self.like_usual(**IDLE)), rounds=1)

    @cached_property
    def still(self) -> Recording:
        """The same round as ``idle``, with norms whose statistics do not change."""
        if not self.prepared.plan.neurons.statistics:
            return self.idle
        build = holding_still(self.setup.build)
        return self.play(_from_what_travels(self.prepare(build, **IDLE)), rounds=1)

    def without(self, part: str, like: Recording, rounds: int) -> Recording:
        """A run's first rounds again, with nonsense as the examples of one part."""
        data, splits = like.examples.data, like.examples.splits
        x = data.x.clone()
        for split in splits:
            positions = torch.from_numpy(getattr(split, part))
            x[positions] = _nonsense(x[positions])
        examples = replace(like.examples, data=replace(data, x=x))
        ready = replace(self.prepared, plan=like.plan, examples=examples)
        return self.play(ready, rounds)

    @cached_property
    def elsewhere(self) -> dict[str, list[Round]]:
        """The run with early stopping again: resumed, and on every other engine."""
        ready = self.like_usual(**self._stopping())
        others = {
            _engine(make): self.play_on(make, ready) for make in self.setup.engines
        }
        return {RESUMED: self.resumed.rounds, **others}

    @cached_property
    def resumed(self) -> "Resumed":
        """The run with early stopping, by ``simulate``; interrupted, then resumed."""
        rounds: list[Round] = []

        def interrupt(plan: Plan, played: Round) -> None:
            rounds.append(played)
            if played.federation.round == 2:
                raise Interruption

        def watch(plan: Plan, played: Round) -> None:
            rounds.append(played)

        given: dict[str, Any] = {
            "model": self.setup.build,
            "data": self.setup.data,
            "method": self.method,
        }
        settings = {
            **self._settings(),
            **self._stopping(),
            "workers": 2 if can_fork() else 1,
        }
        with TemporaryDirectory() as folder:
            path = f"{folder}/run"
            try:
                simulate({**settings, "out": path}, watch=interrupt, **given)
            except Interruption:
                run = resume(path, watch=watch, workers=1, **given)
                clients = run.last.federation.last
                return Resumed(run, rounds, {k: run.memory(k) for k in clients})
        raise RuntimeError(
            "the run ended before round 2, after which it is interrupted and resumed; "
            "give it more rounds"
        )


@dataclass(frozen=True)
class Resumed:
    """A run on two workers, interrupted, and resumed on one."""

    run: Run
    rounds: list[Round]  # before and after the interruption
    memories: dict[int, Memory]


RESUMED = "after a resume"


def _engine(make: MakeEngine) -> str:
    return f"on {getattr(make, '__name__', make)}"


def _from_what_travels(ready: Prepared) -> Prepared:
    """The same run from a w0 of values that are not rounded on their way."""
    plan = ready.plan
    w0 = {
        name: as_received(plan, name, as_received(plan, name, v, "down"), "up")
        for name, v in plan.initial.items()
    }
    return replace(ready, plan=replace(plan, initial=w0))


def _nonsense(x: Tensor) -> Tensor:
    """Values far from all real ones; for whole numbers, another example's values."""
    return 31 * x.flip(0) + 7 if x.is_floating_point() else x.flip(0)
