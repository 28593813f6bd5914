"""A method on trial: on which model and data, and the runs that laws look at.

Runs are played when a law asks for them, once.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedspu.conformance.nets import Arrays, holding_still
from fedspu.conformance.witness import Trial, play_trial
from fedspu.engines.workers import can_fork
from fedspu.federation.client import Memory
from fedspu.federation.plan import Build, Plan, divide
from fedspu.federation.rounds import Accuracies, Engine, RoundReport, play
from fedspu.federation.server import Federation
from fedspu.methods import METHODS, READINGS
from fedspu.methods.fedavg import fedavg
from fedspu.methods.method import Method
from fedspu.runs import Run, lay_out, one_thread, resume, simulate
from fedspu.settings import flatten, make_settings

MakeEngine = Callable[[Plan], Engine]

ENGINES: tuple[MakeEngine, ...] = ()
"""Engines that must not differ from the one that ``simulate`` plays on."""

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
    "judge.clients": 1,
}
"""Five clients, three a round. In the first two rounds only the weaker three take part,
so that there are entries that nobody trains."""

STOPPING: dict[str, Any] = {
    "early_stopping.on": True,
    "early_stopping.blend": 0.01,
    "train.lr": 0.3,
    "rounds": 3,
}
"""Nearly all that counts is the validation loss, which rises: clients do stop."""

IDLE: dict[str, Any] = {"train.lr": 0.0}
"""Nobody learns."""

FULL: dict[str, Any] = {"clients.capacities": [1.0], "data.partition": "iid"}
"""Everyone trains everything, on examples of each class."""


class Interruption(Exception):  # noqa: N818  # no error: the plan
    """What ends a run that is to be resumed."""


@dataclass(repr=False)
class Ground:
    """The model and the data that methods are tried on; FedAvg as their measure."""

    name: str
    build: Build
    data: Arrays | tuple[Any, Any]
    engines: tuple[MakeEngine, ...] = ENGINES
    settings: Mapping[str, Any] = field(default_factory=dict)
    _measures: dict[tuple[bool, ...], "Subject"] = field(default_factory=dict)

    def fedavg_like(self, method: Method) -> "Subject":
        """FedAvg, with weights and statistics as the method has them.

        Where norms stay with the clients, these keep models.
        """
        stay = dict(flatten(self.settings)).get("norm.policy") == "local"
        key = method.weighs_examples, method.sends_statistics, stay
        if key not in self._measures:
            measure = fedavg
            if key != (fedavg.weighs_examples, fedavg.sends_statistics, False):
                measure = replace(
                    fedavg,
                    weighs_examples=method.weighs_examples,
                    sends_statistics=method.sends_statistics,
                    keeps_own=stay,
                )
            self._measures[key] = Subject(measure, self)
        return self._measures[key]


@dataclass(repr=False)
class Subject:
    """One method on one ground."""

    method: Method
    ground: Ground

    def __str__(self) -> str:
        """Method and model; with the method's reading, if it is not the usual one."""
        usual = METHODS.get(self.method.name, self.method).reading
        reading = "" if self.method.reading == usual else f" ({self.method.reading})"
        return f"{self.method.name}{reading} on {self.ground.name}"

    def plan(self, build: Build | None = None, **given: Any) -> Plan:
        """The plan of a run; some settings changed, by dotted name."""
        settings = {**self._settings(), **given}
        return lay_out(settings, build or self.ground.build, self.ground.data)

    def _settings(self) -> dict[str, Any]:
        given = {
            name: value
            for name, value in flatten(self.ground.settings)
            if not name.startswith("method.")
            or name.removeprefix("method.") in self.method.options  # not FedAvg's
        }
        return {**SETTINGS, **given, **_named(self.method)}

    def like_usual(self, **given: Any) -> Plan:
        """The usual plan, changed in what decides neither model nor data."""
        plan = self.usual.plan
        settings = {**dict(flatten(plan.settings.model_dump())), **given}
        return replace(plan, settings=make_settings(settings))

    def play(self, plan: Plan, rounds: int | None = None) -> Trial:
        """Play a plan before a witness; to its end, or so many rounds."""
        with one_thread():
            return play_trial(plan, rounds)

    def play_on(self, make: MakeEngine, plan: Plan) -> list[RoundReport]:
        """Play a plan on some engine."""
        engine = make(plan)
        try:
            with one_thread():
                start = Federation(0, plan.initial)
                return list(play(plan, engine, start, Accuracies()))
        finally:
            getattr(engine, "close", lambda: None)()

    # The runs ------------------------------------------------------------------------

    @cached_property
    def usual(self) -> Trial:
        """A run as it comes, without early stopping."""
        return self.play(self.plan())

    @cached_property
    def stopping(self) -> Trial:
        """A run with early stopping, in which some do stop."""
        return self.play(self.like_usual(**STOPPING))

    @cached_property
    def full(self) -> Trial:
        """A run in which every client has capacity for everything."""
        if self.method.remodel is not None:
            return self.play(self.plan(**FULL))
        plan = self.like_usual(**FULL)
        return self.play(replace(plan, splits=divide(plan.settings, plan.data)))

    @cached_property
    def idle(self) -> Trial:
        """A round in which nobody learns: the learning rate is 0."""
        return self.play(self.like_usual(**IDLE), rounds=1)

    @cached_property
    def still(self) -> Trial:
        """The same with norms whose statistics stay as they are."""
        if not self.usual.plan.neurons.statistics:
            return self.idle
        build = holding_still(self.ground.build)
        return self.play(self.plan(build, **IDLE), rounds=1)

    def without(self, part: str, like: Trial, rounds: int) -> Trial:
        """Rounds like another run's, with no sense in the examples of one part."""
        plan = like.plan
        x = plan.data.x.clone()
        for split in plan.splits:
            positions = torch.from_numpy(getattr(split, part))
            x[positions] = _nonsense(x[positions])
        return self.play(replace(plan, data=replace(plan.data, x=x)), rounds)

    @cached_property
    def elsewhere(self) -> dict[str, list[RoundReport]]:
        """The run with early stopping again: resumed, and on every other engine."""
        plan = self.like_usual(**STOPPING)
        others = {
            _engine(make): self.play_on(make, plan) for make in self.ground.engines
        }
        return {RESUMED: self.resumed.reports, **others}

    @cached_property
    def resumed(self) -> "Resumed":
        """The same run by ``simulate``, interrupted after two rounds, and resumed."""
        reports: list[RoundReport] = []

        def interrupt(plan: Plan, report: RoundReport) -> None:
            reports.append(report)
            if report.federation.round == 2:
                raise Interruption

        def watch(plan: Plan, report: RoundReport) -> None:
            reports.append(report)

        model, data = self.ground.build, self.ground.data
        settings = {**self._settings(), **STOPPING}
        with TemporaryDirectory() as folder:
            path = f"{folder}/run"
            try:
                given = {**settings, "out": path, "workers": 2 if can_fork() else 1}
                simulate(given, model=model, data=data, watch=interrupt)
            except Interruption:
                run = resume(path, model=model, data=data, watch=watch, workers=1)
                return Resumed(run, reports, dict(run.last.memories))
        raise RuntimeError("the run ended before it could be interrupted")


@dataclass(frozen=True)
class Resumed:
    """A run on two workers, interrupted, and resumed on one."""

    run: Run
    reports: list[RoundReport]  # of the rounds before and after
    memories: dict[int, Memory]


RESUMED = "after a resume"


def _engine(make: MakeEngine) -> str:
    return f"on {getattr(make, '__name__', make)}"


def _nonsense(x: Tensor) -> Tensor:
    """NaN; in whole numbers, which have none, other examples' values."""
    if x.is_floating_point():
        return torch.full_like(x, torch.nan)
    return x.flip(0)


# Settings name a method; one that has no name is given one ----------------------------


class _Stand(ModuleType):
    """A module of this process alone, whose names are the methods on trial."""


STAND = f"{__package__}.stand"
_stand = sys.modules.setdefault(STAND, _Stand(STAND))


def _named(method: Method) -> dict[str, Any]:
    """The settings that name a method."""
    if any(method is known for known in READINGS):
        return {"method.name": method.name, "method.reading": method.reading}
    for name, known in vars(_stand).items():
        if known is method:
            return {"method.name": f"{STAND}:{name}"}
    name = f"method_{len(vars(_stand))}"
    setattr(_stand, name, method)
    return {"method.name": f"{STAND}:{name}"}
