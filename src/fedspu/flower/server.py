"""The server of a run on devices: our own loop over rounds, saved after each."""

import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from typing import Any

from flwr.serverapp import Grid

from fedspu import models
from fedspu.engines.flower.engine import FlowerEngine
from fedspu.engines.flower.fleet import Fleet
from fedspu.engines.flower.log import log
from fedspu.engines.flower.wire import Hello, Like, Seat, fedspu_version
from fedspu.engines.machine import forget_peak, peak_rss_bytes
from fedspu.errors import FedSPUError, SettingsError, StorageError
from fedspu.federation.engine import Facts
from fedspu.federation.messages import VERSION
from fedspu.federation.plan import Build, Plan, Sample, make_plan
from fedspu.federation.plan_file import check_fits, check_settings, describe_plan
from fedspu.federation.record import Clock, record_round, summarise
from fedspu.federation.rounds import Round, Scores, is_over, play
from fedspu.federation.server import Federation
from fedspu.federation.storage.own_files import is_free
from fedspu.federation.storage.run_folder import RunFolder
from fedspu.federation.storage.saved_run import Checkpoint
from fedspu.files import write_whole
from fedspu.flower.config import FOLLOWS, DeploySettings, for_any_number
from fedspu.flower.device import digest, frozen_digest
from fedspu.flower.roster import (
    examples_like,
    format_devices,
    parse_devices,
    without,
)
from fedspu.methods.method import Method
from fedspu.neurons.choose import as_fraction
from fedspu.prepare import choose
from fedspu.tasks.task import Task

LONGEST = 3600.0
"""Seconds that a device may take for one message, if no setting says otherwise."""

Watch = Callable[[Plan, Round], None]
"""Called after every round, once it is saved."""


class Server:
    """Plays a run on the devices that a grid reaches.

    ``given`` are the run's settings by dotted name; how many clients there are and how
    strong each is follow from the devices.
    """

    def __init__(
        self,
        grid: Grid,
        given: Mapping[str, Any],
        deploy: DeploySettings,
        *,
        model: Build | None = None,
        method: Method | None = None,
        task: Task | None = None,
        poll: float = 0.5,
        watch: Watch | None = None,
    ) -> None:
        self.deploy, self.watch, self._model = deploy, watch, model
        own = for_any_number(given)
        self.settings, self.method, self.task = choose(own, model, None, method, task)
        self.names: list[str] = []  # of devices; a client's number is its place here
        self.run_key = secrets.token_hex(8)
        self.fleet = Fleet(grid, self._why_not, poll)
        self.folder: RunFolder | None = None
        self._away: frozenset[int] = frozenset()
        self._anew: set[int] = set()  # clients that have lost what they kept
        self._is_left_alone = False
        self._sample: Sample
        self._base: Plan | None = None
        self._usual: Like | None = None  # what all devices must be like
        self._saved_outputs = 0  # of the model of a run that goes on
        self._capacities: dict[str, float] = {}

    # From beginning to end ------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Play the run, or the rest of it; its summary."""
        try:
            self.begin()
            while not self.is_over:
                here = self.present()
                if self._is_left_alone:
                    break
                self.record(next(play(self.plan, self.engine, here, self.last.scores)))
            return self.finish()
        finally:
            self.close()

    def begin(self) -> None:
        """Wait for devices; begin a run, or take up the one in the folder."""
        forget_peak()
        self._check_out()
        start = self._open()
        self.fleet.wait_for(self.deploy.devices, self.deploy.wait)
        self._sample = self._make_sample()  # refuses devices whose data is another
        self.fleet.wait_for(self.deploy.devices, self.deploy.wait)
        has_new = self._seat_new()
        self.plan = self._plan()
        self.engine = self._engine(self.plan)
        if start is None:
            start = Checkpoint(Federation(0, self.plan.initial), Scores())
            self._create()
        elif self.folder is not None:
            saved = self.folder.saved.index
            self.folder.check_same(self.plan.initial, saved.data)
            check_fits(self.folder.path, self.plan, start)
            if has_new or saved.settings["rounds"] != self.settings.rounds:
                self._extend()
        self.last = start
        self._rounds, self._times = self._records()
        self._clock = Clock(len(self.names))

    @property
    def is_over(self) -> bool:
        """Whether all rounds are played, or every device has stopped.

        Devices that were waited for in vain are not counted.
        """
        return self._is_left_alone or is_over(self.last.federation, self.plan)

    def present(self) -> Federation:
        """The federation as it is for the devices that are connected now.

        Whoever is not is not chosen, as if it had stopped. Devices that are new get a
        number first.
        """
        self.fleet.look()
        if self._seat_new():
            self.plan = self._plan()
            self.engine = self._engine(self.plan)
            self._extend()
        federation = self.last.federation
        self._away = self._absent(federation)
        if self.settings.guard.noise:  # epsilon counts on cohorts drawn from everybody
            self._away = frozenset()
        return replace(federation, stopped=federation.stopped | self._away)

    def record(self, played: Round) -> None:
        """Save a round that was played from what ``present`` gave."""
        stopped = played.federation.stopped - self._away
        federation = without(played.federation, self._anew)
        self._anew.clear()
        federation = replace(federation, stopped=stopped)
        played = replace(played, federation=federation)
        lines = record_round(self.plan, played, self._clock.round(played))
        self._rounds += lines["rounds.jsonl"]
        self._times += lines["times.jsonl"]
        if self.folder is not None:
            self.folder.save(played, lines)
        self.last = Checkpoint(federation, played.scores)
        log.info("%s", self._said(played, lines["rounds.jsonl"][0]))
        if self.watch:
            self.watch(self.plan, played)

    def finish(self) -> dict[str, Any]:
        """The summary of the run, which has ended."""
        summary = summarise(
            self.plan,
            "the devices' own data",
            self.last.federation,
            self.last.scores,
            self._rounds,
            self._times,
            Facts(len(self.names), peak_rss_bytes()),
        )
        if self.folder is not None:
            self.folder.finish(summary)
        played, asked = summary["rounds_played"], self.plan.settings.rounds
        why = "every device has stopped" if played < asked else "as many as asked for"
        log.info("the run is finished after round %s: %s", played, why)
        return summary

    def close(self) -> None:
        """Unlock the run folder."""
        if self.folder is not None:
            self.folder.close()

    def _engine(self, plan: Plan) -> FlowerEngine:
        asked = plan.settings.clients.deadline
        return FlowerEngine(
            plan,
            self.fleet.grid,
            lambda client: self.fleet.nodes.get(self.names[client]),
            seats=partial(self._seat, plan),
            facts=Facts(len(self.names)),
            poll=self.fleet.poll,
            deadline=(asked or math.inf) if asked is not None else LONGEST,
            refused=lambda client, why: self.fleet.refuse(self.names[client], why),
            late=lambda client: self.fleet.is_late(self.names[client]),
            anew=self._anew.add,
        )

    def _absent(self, federation: Federation) -> frozenset[int]:
        """The clients that are not connected; waits if nobody who is left is."""
        until = monotonic() + self.deploy.wait
        while True:
            absent = {
                k for k, name in enumerate(self.names) if name not in self.fleet.nodes
            }
            if set(range(len(self.names))) - absent - federation.stopped:
                return frozenset(absent - federation.stopped)
            if monotonic() > until and self.fleet.nodes:
                away = ", ".join(self.names[k] for k in sorted(absent))
                log.warning(
                    "the run ends: all devices that are connected have stopped, and "
                    "%s did not come back within %g s",
                    *(away, self.deploy.wait),
                )
                self._is_left_alone = True
                return frozenset(absent - federation.stopped)
            if monotonic() > until:
                raise FedSPUError(
                    f"no device that still trains is connected for {self.deploy.wait:g}"
                    f" s; rounds up to {federation.round} are saved: start the run "
                    "again, and it goes on from there"
                )
            sleep(self.fleet.poll)
            self.fleet.look()

    # Devices --------------------------------------------------------------------------

    def _why_not(self, hello: Hello) -> str:
        """Why a device cannot take part; empty if it can."""
        own = {"version": fedspu_version(), "protocol": VERSION, "task": self.task.name}
        usual = self._usual or hello.like
        if differs := usual.model_copy(update=own).differs(hello):
            return f"{differs}; it must be the same everywhere"
        if self._usual is None:
            return ""
        outputs = self._saved_outputs or self.deploy.outputs
        if self._base is not None:
            outputs = self._sample.num_outputs
        if outputs and hello.num_outputs > outputs:
            return (
                f"its data needs {hello.num_outputs} outputs, the model has {outputs}; "
                "set deploy.outputs"
            )
        if self.settings.guard.noise and self.names and hello.name not in self.names:
            return "with guard.noise, a run has the devices that it began with"
        known = self._capacities.get(hello.name)
        if known is not None and known != hello.capacity:
            return (
                f"its capacity is {hello.capacity:g}, in this run it was {known:g}; "
                "undo that"
            )
        all_known = set(self._capacities.values())
        if self.method.remodel and all_known and hello.capacity not in all_known:
            return (
                f"its capacity is {hello.capacity:g}, and {self.method.name} needs to "
                "know all from the beginning"
            )
        return ""

    def _seat_new(self) -> bool:
        """Give devices that are new a number, in the order of their names."""
        new = sorted(self.fleet.devices.keys() - set(self.names))
        self.names += new
        for name, hello in self.fleet.devices.items():
            self._capacities[name] = hello.capacity
        return bool(new)

    def _seat(self, plan: Plan, client: int) -> Seat:
        assert self._usual is not None, "there is no plan yet"
        return Seat(
            run=self.run_key,
            like=self._usual,
            client=client,
            num_clients=plan.num_clients,
            capacity=float(plan.capacity(client)),
            capacities=tuple(map(float, plan.distinct_capacities)),
            num_outputs=self._sample.num_outputs,
            table=self._table,
            frozen=self._frozen,
        )

    # The plan -------------------------------------------------------------------------

    def _plan(self) -> Plan:
        given = tuple(self._capacities[name] for name in self.names)
        clients = self.settings.clients.model_copy(
            update={
                "number": len(given),
                "per_round": min(self.settings.clients.per_round, len(given)),
                "capacities": given,
            }
        )
        settings = self.settings.model_copy(update={"clients": clients})
        if self._base is None:
            number = self._sample.num_outputs
            build = self._model or partial(models.build, settings.model, number)
            self._base = make_plan(
                settings, self.method, self.task, build, self._sample
            )
            self._text = describe_plan(self._base, self._sample)
            self._table, self._frozen = digest(self._text), frozen_digest(self._base)
        capacities = tuple(map(as_fraction, given))
        plan = replace(self._base, settings=settings, capacities=capacities)
        # Devices know the run's seed; with it they could take the noise off again.
        return replace(plan, noise_seed=secrets.randbits(128))

    def _make_sample(self) -> Sample:
        """Two examples like the devices': of the same shape and type."""
        hellos = list(self.fleet.devices.values())
        usual, _ = Counter(hello.like for hello in hellos).most_common(1)[0]
        self._usual = usual
        for hello in hellos:
            if problem := self._why_not(hello):
                self.fleet.refuse(hello.name, problem)
        hellos = list(self.fleet.devices.values())
        needed = max(hello.num_outputs for hello in hellos)
        number = self._saved_outputs or self.deploy.outputs or needed
        return Sample("the devices' data", *examples_like(usual), number)

    # The run folder -------------------------------------------------------------------

    def _check_out(self) -> None:
        out = self.deploy.out
        if out is not None and not out.is_absolute():
            raise SettingsError(
                f"deploy.out = {str(out)!r}: expected an absolute path, on the server"
            )

    def _open(self) -> Checkpoint | None:
        """Where the run in the folder stands; None if a new one begins."""
        out = self.deploy.out
        if out is None or is_free(out):
            return None
        if not self.deploy.resume:
            raise StorageError(
                f"{out} is in use already; choose another deploy.out, or set "
                "deploy.resume to go on with the run in it"
            )
        self.folder = RunFolder.open(out)
        self.folder.has_memories = False
        index = self.folder.saved.index
        self.run_key, self.names = parse_devices(index.data, out)
        plan = json.loads(self.folder.saved.plan_text())
        self._saved_outputs = int(plan["num_outputs"])
        now = json.loads(self.settings.model_dump_json(exclude_none=True))
        saved: dict[str, Any] = {**index.settings}
        for table in (saved, now):
            table["clients"] = {
                name: value
                for name, value in table.get("clients", {}).items()
                if f"clients.{name}" not in FOLLOWS
            }
        check_settings(out, saved, now, "rounds")
        if self.settings.rounds < saved["rounds"]:
            raise SettingsError(
                f"rounds = {self.settings.rounds}: expected no fewer than the run's "
                f"{saved['rounds']}"
            )
        found: Any = index.settings["clients"]
        self._capacities = dict(zip(self.names, found["capacities"], strict=True))
        return self.folder.saved.checkpoint()

    def _create(self) -> None:
        if self.deploy.out is None:
            return
        plan = self.plan
        self.folder = RunFolder.create(
            self.deploy.out,
            plan.settings.to_toml(),
            self._text,
            plan.initial,
            format_devices(self.run_key, self.names),
            durable=plan.settings.store.durable,
            has_memories=False,
        )
        self._write_names()

    def _extend(self) -> None:
        if self.folder is not None:
            data = format_devices(self.run_key, self.names)
            self.folder.extend(self.plan.settings.to_toml(), data)
            self._write_names()

    def _write_names(self) -> None:
        """Which device each client is, for people."""
        if self.folder is not None:
            named = {str(client): name for client, name in enumerate(self.names)}
            content = json.dumps(named, indent=2).encode() + b"\n"
            write_whole(self.folder.path / "devices.json", content)

    def _records(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        if self.folder is None:
            return [], []
        saved = self.folder.saved
        return saved.lines("rounds.jsonl"), saved.lines("times.jsonl")

    def _said(self, played: Round, line: Mapping[str, Any]) -> str:
        """A round in one line, for the log."""
        metric = self.plan.task.metric
        number = len(played.answers)
        what = f"round {line['round']} of {self.plan.settings.rounds}"
        if played.federation.is_finished:
            what = "last models"
        parts = [f"{what}: {number} device{'' if number == 1 else 's'}"]
        if (score := line[f"personal_{metric.name}"]) is not None:
            parts.append(f"personal {metric.title} {metric.show(score)}")
        if line["stopped_clients"]:
            parts.append(f"{line['stopped_clients']} stopped so far")
        lost = {**played.missing, **played.refused}
        parts += [f"without {self.names[k]} ({why})" for k, why in lost.items()]
        return ", ".join(parts)
