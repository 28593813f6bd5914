"""The bad days of a real deployment, each played for real.

    python benchmarks/bad_days.py               all of them, about an hour
    python benchmarks/bad_days.py gate          only what happens at the gate
    python benchmarks/bad_days.py run slow_device disk_full

SuperLink, SuperNodes, TLS and keys are real, on this machine. For each day the table
says what happened, what was said to whom, and whether a personal model or a saved
round was lost. At the end of ``run``, the same rounds are played again in one process,
without the devices that were missing: the global model and the personal models must be
the same, bit by bit. A full disk needs root, for a small file system in memory.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.torch import load_file

from fedspu.deploy import control, keys
from fedspu.deploy.processes import free_port
from fedspu.engines.local import LocalEngine
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Missing
from fedspu.federation.messages import Request
from fedspu.federation.rounds import play_round
from fedspu.federation.server import Federation
from fedspu.federation.storage.saved_run import SavedRun
from fedspu.neurons.table import State
from fedspu.prepare import Prepared, prepare
from tests.engines.fresh import environment
from tests.flower.deployment import Deployment, deployed

DEADLINE = 75.0
SETTINGS: dict[str, Any] = {
    "data.name": "digits",
    "data.alpha": 1.0,
    "rounds": 500,
    "clients.number": 2,
    "clients.per_round": 2,
    "clients.capacities": (0.5, 1.0),
    "clients.deadline": DEADLINE,
    "train.epochs": 1,
    "train.kernels": "torch",
    "judge.every": 500,
}
GOOD, BAD = "device-0000", "device-0001"


@dataclass
class Day:
    """A day: what happened, what was said (by whom), what was lost."""

    name: str
    happened: str = ""
    said: list[tuple[str, str]] = field(default_factory=list)
    lost: str = "nothing"

    def show(self) -> None:
        """Print it."""
        print(f"\n## {self.name}\n{self.happened}\nlost: {self.lost}", flush=True)
        for who, line in self.said:
            print(f"  {who}: {line}", flush=True)


class Lab:
    """A deployment in which days are played one after the other."""

    def __init__(self, deployment: Deployment, ready: Prepared) -> None:
        self.deployment, self.ready = deployment, ready
        self.server = deployment.server

    # What there is --------------------------------------------------------------------

    def folder(self, name: str) -> Path:
        """A device's folder."""
        return self.server.root / "devices" / name

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds that are saved."""
        file = self.server.run / "rounds.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def logged(self) -> str:
        """What the runs have logged, as `fedspu deploy logs` shows it."""
        with sqlite3.connect(f"file:{self.server.database}?mode=ro", uri=True) as state:
            found = state.execute("select log from task_logs order by rowid")
            return "".join(text for (text,) in found)

    def said(self, who: str) -> str:
        """All that was said so far by a device, by the server, or in the run's log."""
        return self.logged() if who == "log" else self.deployment.said(who)

    # What is done ---------------------------------------------------------------------

    def cli(self, *words: object) -> tuple[int, str]:
        """What a `fedspu` command says."""
        command = [sys.executable, "-m", "fedspu.cli", *map(str, words)]
        done = subprocess.run(
            command, capture_output=True, env=environment(), check=False, timeout=600
        )
        return done.returncode, (done.stdout + done.stderr).decode().strip()

    def fault(self, name: str, **faults: Any) -> None:
        """Let a device's app have faults from its next message on."""
        (self.folder(name) / "fault.json").write_text(json.dumps(faults))

    def restart(self, name: str) -> None:
        """End a device as a service manager does, and start it again."""
        if name in self.deployment.processes:
            self.deployment.stop(name)
        self.deployment.start(name)

    def wait(self, what: Callable[[], Any], why: str, seconds: float = 600.0) -> float:
        """Wait until something is true; the seconds that it took."""
        began = time.monotonic()
        while not what():
            if time.monotonic() - began > seconds:
                raise AssertionError(f"{why} after {seconds:g} s")
            time.sleep(0.5)
        return time.monotonic() - began

    def wait_line(self, who: str, text: str, before: int) -> str:
        """Wait for a line with this text, after the first ``before`` characters."""
        self.wait(lambda: text in self.said(who)[before:], f"{who} has not said {text}")
        lines = self.said(who)[before:].splitlines()
        return next(line.strip() for line in lines if text in line)

    def wait_for(self, *clients: int, more: int = 1) -> dict[str, Any]:
        """Wait until a new round was played by exactly these clients; that round."""
        before = len(self.rounds())

        def found() -> list[dict[str, Any]]:
            new = self.rounds()[before:]
            return [line for line in new if line["clients"] == list(clients)]

        self.wait(lambda: len(found()) >= more, f"no round of {clients}")
        return found()[0]

    def start_run(self) -> tuple[int, str]:
        """`fedspu deploy start`."""
        return self.cli("deploy", "start", self.server.root)

    def children(self, pid: int, text: str) -> list[int]:
        """Processes below one, whose command has this text."""
        listed = subprocess.run(
            ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, check=True
        ).stdout.decode()
        rows = [line.split(None, 2) for line in listed.splitlines()]
        below, found = {pid}, []
        for _ in rows:
            new = {int(r[0]) for r in rows if int(r[1]) in below} - below
            if not new:
                break
            below |= new
        for row in rows:
            if int(row[0]) in below - {pid} and len(row) > 2 and text in row[2]:
                found.append(int(row[0]))
        return found

    def kill(self, name: str, text: str) -> None:
        """SIGKILL the first process below one of ours with this text in its command."""
        found = self.children(self.deployment.processes[name].pid, text)
        os.kill(found[0], signal.SIGKILL)

    # What must hold -------------------------------------------------------------------

    def lost(self) -> str:
        """Which saved round or personal model is missing or damaged, in words."""
        saved = SavedRun(self.server.run)
        problems = []
        if saved.round < len(self.rounds()) - 1:
            problems.append(f"rounds after {saved.round}")
        for client, t in saved.checkpoint().federation.last.items():
            try:
                load_file(self.deployment.personal_file(client, t))
            except Exception as error:
                problems.append(f"the model of client {client}, round {t} ({error})")
        return ", ".join(problems) or "nothing"


# Days of a run ------------------------------------------------------------------------


def start_twice(lab: Lab, day: Day) -> None:
    """Someone starts a run that is going on."""
    code, text = lab.start_run()
    day.happened = f"`fedspu deploy start` during a run: refused (exit code {code})"
    day.said = [("terminal", text)]


def killed_supernode(lab: Lab, day: Day) -> None:
    """A SuperNode is killed while its app trains."""
    before = len(lab.logged())
    lab.fault(BAD, slow=20)
    lab.wait((lab.folder(BAD) / "busy").exists, "it does not train")
    mark = len(lab.said(BAD))
    lab.kill(BAD, "fedspu.deploy.supernode")
    lab.fault(BAD)
    began = time.monotonic()
    without = lab.wait_for(0)
    seconds = time.monotonic() - began
    back = lab.wait(lambda: lab.rounds()[-1]["clients"] == [0, 1], "it is not back")
    day.happened = (
        f"the round ended without it {seconds:.0f} s after the kill; it was back "
        f"{seconds + back:.0f} s after the kill, and went on from its own model"
    )
    why = without["missing_clients"].get("1", "")
    day.said = [
        ("log", lab.wait_line("log", f"without {BAD}", before)),
        ("record", why),
        ("device", lab.wait_line(BAD, "ended by signal 9", mark)),
    ]


def slow_device(lab: Lab, day: Day) -> None:
    """A device is ten times slower than the others, then quick again."""
    before, first = len(lab.logged()), len(lab.rounds())
    lab.fault(BAD, slow=3 * DEADLINE)
    lab.wait((lab.folder(BAD) / "busy").exists, "it does not train")
    began = time.monotonic()
    lab.wait(lambda: lab.rounds()[-1]["clients"] == [0], "no round without it")
    at_deadline = time.monotonic() - began
    lab.fault(BAD)
    lab.wait(lambda: lab.rounds()[-1]["clients"] == [0, 1], "it is not back")
    whole = time.monotonic() - began
    times = SavedRun(lab.server.run).lines("times.jsonl")[first:]
    walls = [round(line["wall_seconds"]) for line in times]
    day.happened = (
        f"slow for {3 * DEADLINE:g} s, deadline {DEADLINE:g} s: the round ended after "
        f"{at_deadline:.0f} s; these rounds took {walls} s; it took part again after "
        f"{whole:.0f} s"
    )
    day.said = [
        ("log", lab.wait_line("log", "no answer within", before)),
        ("log", lab.wait_line("log", f"{BAD} is late", before)),
    ]


def data_vanishes(lab: Lab, day: Day) -> None:
    """A device's data file is gone between two rounds, and comes back."""
    before, mark = len(lab.logged()), len(lab.said(BAD))
    file = lab.folder(BAD) / "own.npz"
    file.rename(file.with_suffix(".away"))
    lab.wait_for(0)
    file.with_suffix(".away").rename(file)
    lab.wait_for(0, 1)
    day.happened = "rounds went on without it; it took part again with its file"
    day.said = [
        ("log", lab.wait_line("log", f"without {BAD}", before)),
        ("device", lab.wait_line(BAD, "not in this round", mark)),
    ]


def disk_full(lab: Lab, day: Day) -> None:
    """A device's disk is full, and then no longer."""
    before, mark = len(lab.logged()), len(lab.said(BAD))
    models = lab.folder(BAD) / "models"
    with (models / "ballast").open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(512))
        except OSError:
            pass
    lab.wait_for(0)
    lost = lab.lost()
    (models / "ballast").unlink()
    lab.wait_for(0, 1)
    day.lost = lost
    day.happened = "rounds went on without it; it took part again with free space"
    day.said = [
        ("log", lab.wait_line("log", f"without {BAD}", before)),
        ("device", lab.wait_line(BAD, "not in this round", mark)),
    ]


def _refused(lab: Lab, day: Day, words: str, **faults: Any) -> None:
    """The device comes back with a fault, and is refused."""
    before, mark = len(lab.logged()), len(lab.said(BAD))
    if faults:
        lab.fault(BAD, **faults)
    lab.restart(BAD)
    on_server = lab.wait_line("log", f"{BAD} cannot take part", before)
    on_device = lab.wait_line(BAD, words, mark)
    day.said += [("log", on_server), ("device", on_device)]
    lab.fault(BAD)


def other_version(lab: Lab, day: Day) -> None:
    """A device has another version of fedspu."""
    _refused(lab, day, "cannot take part", version="0.0.1")
    day.happened = "refused; rounds went on without it"


def other_model(lab: Lab, day: Day) -> None:
    """A device builds another model."""
    _refused(lab, day, "another model", model="mlp")
    day.happened = "refused at its first turn; rounds went on without it"


def other_shapes(lab: Lab, day: Day) -> None:
    """A device's examples have another shape."""
    with _other_data(lab, np.zeros((50, 1, 9, 9), np.float32), np.arange(50) % 10):
        _refused(lab, day, "cannot take part")
    day.happened = "refused; rounds went on without it"


def no_examples(lab: Lab, day: Day) -> None:
    """A device has no examples; then it has some again, and nobody restarts it."""
    with _other_data(lab, np.zeros((0, 1, 8, 8), np.float32), np.zeros(0, np.int64)):
        _refused(lab, day, "cannot take part")
    seconds = lab.wait(lambda: lab.rounds()[-1]["clients"] == [0, 1], "it is not back")
    day.happened = (
        f"rounds went on without it; with its examples it was asked again, and took "
        f"part {seconds:.0f} s later"
    )


@contextmanager
def _other_data(lab: Lab, x: Any, y: Any) -> Iterator[None]:
    file = lab.folder(BAD) / "own.npz"
    file.rename(file.with_suffix(".away"))
    np.savez(file, x=x, y=y)
    try:
        yield
    finally:
        file.with_suffix(".away").rename(file)


def same_name(lab: Lab, day: Day) -> None:
    """Two devices have the same name, each with its own key."""
    file = lab.folder(BAD) / "device.toml"
    text = file.read_text()
    file.write_text(text.replace(BAD, GOOD))
    before, mark = len(lab.logged()), len(lab.said(BAD))
    lab.deployment.stop(BAD)
    # The server asks for names only if it has seen the device leave.
    lab.wait(lambda: "1" not in lab.wait_for(0)["missing_clients"], "it is not away")
    lab.deployment.start(BAD)
    day.said = [
        ("log", lab.wait_line("log", f"{GOOD} cannot take part", before)),
        ("device", lab.wait_line(BAD, "cannot take part", mark)),
    ]
    file.write_text(text)
    lab.restart(BAD)
    lab.wait(lambda: lab.rounds()[-1]["clients"] == [0, 1], "it is not back")
    day.happened = "the second one is refused; it is back under its own name"


def killed_server_app(lab: Lab, day: Day) -> None:
    """The process that plays the rounds is killed."""
    number = len(lab.rounds())
    lab.kill("server", "flwr-serverapp")
    began = time.monotonic()
    _start_again(lab, day, began)
    lab.wait(lambda: len(lab.rounds()) > number, "it does not go on")
    day.happened += f"; it went on after round {number}"


def killed_superlink(lab: Lab, day: Day) -> None:
    """The SuperLink is killed, and started again."""
    number, mark = len(lab.rounds()), len(lab.said("server"))
    lab.kill("server", "fedspu.deploy.superlink")
    began = time.monotonic()
    code = lab.deployment.processes.pop("server").wait(120)
    ended = lab.wait_line("server", "the SuperLink was ended", mark)
    mark = len(lab.said("server"))
    lab.deployment.start("server")
    lab.wait_line("server", "ready: listening", mark)
    day.said = [(f"server, exit code {code}", ended)]
    _start_again(lab, day, began)
    lab.wait(lambda: len(lab.rounds()) > number, "it does not go on")
    lab.wait(lambda: lab.rounds()[-1]["clients"] == [0, 1], "devices are not back")
    day.happened += f"; it went on after round {number}, with both devices"


def _start_again(lab: Lab, day: Day, began: float) -> None:
    """Type `fedspu deploy start` until it works."""
    for number in range(60):
        code, text = lab.start_run()
        if number == 0:
            day.said.append(("status", lab.cli("deploy", "status", lab.server.root)[1]))
            day.said.append(("start, at once", text))
        if code == 0:
            break
        time.sleep(5)
    seconds = time.monotonic() - began
    day.happened = f"`fedspu deploy start` worked {seconds:.0f} s after the kill"


def same_bits(lab: Lab, day: Day) -> None:
    """All these rounds in one process, without the devices that were missing."""
    lab.cli("deploy", "stop", lab.server.root)
    saved = SavedRun(lab.server.run)
    there = saved.checkpoint().federation
    cohorts = [line["clients"] for line in saved.lines("rounds.jsonl")]
    with TemporaryDirectory() as place:
        alone, folder = replay(lab.ready, cohorts, Path(place))
        is_same = all(
            there.global_state[name].equal(w) for name, w in alone.global_state.items()
        )
        own = all(
            lab.deployment.personal_file(k, t).read_bytes()
            == (folder / f"client-{k}-round-{t}.safetensors").read_bytes()
            for k, t in alone.last.items()
        )
    without = sum(len(cohort) < 2 for cohort in cohorts)
    day.happened = (
        f"{len(cohorts)} rounds, {without} of them without {BAD}: global model "
        f"{'the same' if is_same else 'NOT THE SAME'} as in one process, personal "
        f"models {'the same' if own else 'NOT THE SAME'}"
    )
    day.lost = "nothing" if is_same and own else "BITS DIFFER"
    lab.start_run()


class Replay:
    """An engine in this process that reaches only some clients."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.here, self.facts = engine, set[int](), engine.facts

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """Answers of those who are here."""
        here = {k: request for k, request in requests.items() if k in self.here}
        yield from self.engine.exchange(here, broadcast)
        yield from ((k, Missing("away")) for k in requests if k not in self.here)

    def close(self) -> None:
        """Nothing to close."""


def replay(
    ready: Prepared, cohorts: list[list[int]], folder: Path
) -> tuple[Federation, Path]:
    """Play rounds in one process, each with the clients that took part in it."""
    engine = Replay(LocalEngine(ready.plan, ready.examples, Shelf(folder)))
    federation = Federation(0, ready.plan.initial)
    for cohort in cohorts:
        engine.here = set(cohort)
        federation = play_round(federation, ready.plan, engine).federation
    return federation, folder


def emptied_folder(lab: Lab, day: Day) -> None:
    """A device's folder of models was emptied; its owner lets it begin anew."""
    before, mark = len(lab.logged()), len(lab.said(BAD))
    for run in (lab.folder(BAD) / "models").iterdir():
        shutil.rmtree(run) if run.is_dir() else run.unlink()
    lab.wait_for(0, more=2)
    day.said = [
        ("log", lab.wait_line("log", f"{BAD} cannot take part", before)),
        ("device", lab.wait_line(BAD, "lost or damaged", mark)),
    ]
    lab.deployment.stop(BAD)
    mark = len(lab.said(BAD))
    lab.deployment.start(BAD, "--begin-anew")
    lab.wait(lambda: lab.rounds()[-1]["clients"] == [0, 1], "it does not begin anew")
    day.said += [("device", lab.wait_line(BAD, "begins with a new model", mark))]
    day.happened = "rounds went on without it; with --begin-anew it took part again"
    day.lost = f"its model (deleted on purpose); else {lab.lost()}"


def removed(lab: Lab, day: Day) -> None:
    """A device is removed while the run goes on."""
    before, mark = len(lab.logged()), len(lab.said(BAD))
    code, text = lab.cli("deploy", "remove", lab.server.root, BAD)
    lab.wait_for(0, more=2)
    day.happened = f"removed (exit code {code}); rounds went on without it"
    day.said = [
        ("terminal", text.replace("\n", " / ")),
        ("device", lab.wait_line(BAD, "does not know the key", mark)),
    ]
    lines = lab.logged()[before:].splitlines()
    day.said += [("log", line) for line in lines if BAD in line][:2]


RUN = (
    start_twice,
    killed_supernode,
    killed_server_app,
    killed_superlink,
    data_vanishes,
    disk_full,
    slow_device,
    other_version,
    other_model,
    other_shapes,
    no_examples,
    same_name,
    same_bits,
    emptied_folder,
    removed,
)


def play_run(folder: Path, names: list[str]) -> list[Day]:
    """Days of one long run."""
    ready = prepare(SETTINGS)
    days = []
    with small_disk(folder / "disk") as disk, prepared(folder / "lab", ready) as made:
        models = made.server.root / "devices" / BAD / "models"
        models.symlink_to(disk)
        lab = Lab(made, ready)
        start_all(lab)
        made.wait_online()
        lab.start_run()
        lab.wait(lambda: lab.rounds(), "no first round")
        for play in RUN:
            if names and play.__name__ not in names:
                continue
            day = Day(play.__name__)
            try:
                play(lab, day)
                if day.lost == "nothing":
                    day.lost = lab.lost()
            except Exception as error:
                day.happened += f" FAILED: {type(error).__name__}: {error}"
            day.show()
            days.append(day)
    return days


@contextmanager
def prepared(root: Path, ready: Prepared) -> Iterator[Deployment]:
    """A deployment with the app of ``bad_client.py``; nothing is started yet."""
    found = Deployment(root, ready)
    project = found.server.app / "pyproject.toml"
    text = project.read_text()
    app = "benchmarks.bad_client:app"
    project.write_text(text.replace("fedspu.flower.client_app:app", app))
    before = dict(os.environ)
    os.environ.update(environment())
    try:
        yield found
    finally:
        for name in reversed(list(found.processes)):
            found.stop(name)
        os.environ.clear()
        os.environ.update(before)


def start_all(lab: Lab) -> None:
    """Start the server, then all devices."""
    lab.deployment.start("server")
    lab.wait_line("server", "ready: listening", 0)
    for name in lab.deployment.names:
        lab.deployment.start(name)


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k,mode=700", "tmpfs", str(place)]
    subprocess.run(mount, check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


# Days at the gate ---------------------------------------------------------------------


def play_gate(folder: Path, names: list[str]) -> list[Day]:
    """Keys, clocks, ports, certificates: no run is needed."""
    ready = prepare(SETTINGS)
    days = []
    with prepared(folder / "lab", ready) as made:
        lab = Lab(made, ready)
        if not names or "port_in_use" in names:
            days.append(_play_one(port_in_use, lab))
        start_all(lab)
        made.wait_online()
        for name in made.names:
            made.stop(name)
        for play in GATE:
            if names and play.__name__ not in names:
                continue
            days.append(_play_one(play, lab))
    return days


def _play_one(play: Callable[[Lab, Day], None], lab: Lab) -> Day:
    day = Day(play.__name__, lost="nothing: no run was going on")
    try:
        play(lab, day)
    except Exception as error:
        day.happened += f" FAILED: {type(error).__name__}: {error}"
    day.show()
    return day


def port_in_use(lab: Lab, day: Day) -> None:
    """Another program listens on the server's port."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", lab.server.port))
        other.listen()
        code, text = lab.cli("deploy", "server", lab.server.root)
    day.happened = f"the server does not start (exit code {code})"
    day.said = [("server", text)]


def expired(lab: Lab, day: Day) -> None:
    """The server's certificate has expired: before it starts, and while it runs."""
    root = lab.server.root
    authority = keys.Pair(
        (root / "ca/ca.key").read_bytes(), (root / "ca/ca.crt").read_bytes()
    )
    now = datetime.now(UTC)
    end = now + timedelta(seconds=100)  # the server must start before
    period = keys.Period(now - timedelta(days=2), end)
    pair = keys.make_server_certificate(authority, lab.server.hosts, period)
    lab.server.key.write_bytes(pair.private)
    lab.server.certificate.write_bytes(pair.public)
    _restart_server(lab)
    lab.wait(lambda: datetime.now(UTC) > end, "time stands still")
    mark = len(lab.said(GOOD))
    lab.deployment.start(GOOD)
    day.said = [("device", lab.wait_line(GOOD, "expired", mark))]
    day.said += [("check", _last(lab.cli("deploy", "check", lab.folder(GOOD))[1]))]
    lab.deployment.stop("server")
    code, text = lab.cli("deploy", "server", root)
    day.said += [(f"server, exit code {code}", text)]
    lab.cli("deploy", "renew", root)
    _restart_server(lab)
    seconds = lab.wait(
        lambda: "connected; waiting" in lab.said(GOOD)[mark:], "not connected"
    )
    day.happened = (
        "devices refuse it, the server does not start with it; after `fedspu deploy "
        f"renew` the device connected by itself, {seconds:.0f} s later"
    )
    lab.deployment.stop(GOOD)


def _restart_server(lab: Lab) -> None:
    if "server" in lab.deployment.processes:
        lab.deployment.stop("server")
    mark = len(lab.said("server")) if lab.deployment.log("server").exists() else 0
    lab.deployment.start("server")
    lab.wait_line("server", "ready: listening", mark)


def _last(text: str) -> str:
    return next(line for line in reversed(text.splitlines()) if "✗" in line)


def supernode_port_in_use(lab: Lab, day: Day) -> None:
    """The port that a SuperNode chose is taken before it listens there."""
    port = free_port()
    code = (
        "import fedspu.deploy.processes as p, itertools, sys\n"
        f"ports = itertools.chain([{port}], iter(p.free_port, None))\n"
        "p.free_port = lambda: next(ports)\n"
        "from fedspu.cli.main import main; main()\n"
    )
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        place = str(lab.folder(GOOD))
        _device_with(lab, code, place)
        mark = len(lab.said(GOOD))
        line = lab.wait_line(GOOD, "trying again", 0)
        seconds = lab.wait(
            lambda: "connected; waiting" in lab.said(GOOD)[mark:], "it does not connect"
        )
    day.happened = f"it took another port, and was connected {seconds:.0f} s later"
    lines = lab.said(GOOD).splitlines()
    above = next(text for text in lines if "in use" in text or "bind" in text)
    day.said = [("device", above.strip()), ("device", line)]
    lab.deployment.stop(GOOD)


def _device_with(lab: Lab, code: str, place: str) -> None:
    lab.deployment.log(GOOD).write_text("")
    with lab.deployment.log(GOOD).open("ab") as log:
        lab.deployment.processes[GOOD] = subprocess.Popen(
            [sys.executable, "-c", code, "deploy", "device", place],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )


def unregistered_key(lab: Lab, day: Day) -> None:
    """A device has a key that the server does not know."""
    file = lab.folder(GOOD) / "key"
    own = file.read_bytes()
    file.write_bytes(keys.make_device_key().private)
    mark = len(lab.said(GOOD))
    lab.deployment.start(GOOD)
    day.said = [("device", lab.wait_line(GOOD, "does not know the key", mark))]
    lab.deployment.stop(GOOD)
    file.write_bytes(own)
    day.happened = "it is refused before it connects, and keeps trying"


def wrong_clock(lab: Lab, day: Day) -> None:
    """A device's clock is an hour ahead: it signs another time."""
    code = (
        "import datetime, flwr.supercore.date as d\n"
        "import flwr.supernode.node_auth_http_interceptor as i\n"
        "import fedspu.deploy.probe as p\n"
        "hour = datetime.timedelta(hours=1)\n"
        "i.now = lambda now=d.now: now() + hour\n"
        "class Ahead(datetime.datetime):\n"
        "    @classmethod\n"
        "    def now(cls, tz=None): return datetime.datetime.now(tz) + hour\n"
        "p.datetime = Ahead\n"
        "from fedspu.cli.main import main; main()\n"
    )
    _device_with(lab, code, str(lab.folder(GOOD)))
    day.said = [("device", lab.wait_line(GOOD, "clocks differ", 0))]
    lab.deployment.stop(GOOD)
    day.happened = "it is refused before it connects, and keeps trying"


def killed_commands(lab: Lab, day: Day) -> None:
    """`fedspu deploy device` and `fedspu deploy server` themselves are killed."""
    mark = len(lab.said(GOOD))
    lab.deployment.start(GOOD)
    lab.wait_line(GOOD, "connected; waiting", mark)
    _kill_command(lab, GOOD)
    mark = len(lab.said(GOOD))
    lab.deployment.start(GOOD)
    seconds = lab.wait(
        lambda: "connected; waiting" in lab.said(GOOD)[mark:], "not back"
    )
    _kill_command(lab, "server")
    lab.wait(lambda: not control.is_running(lab.server), "its SuperLink still runs", 30)
    mark = len(lab.said("server"))
    lab.deployment.start("server")
    lab.wait_line("server", "ready: listening", mark)
    day.happened = (
        "what they had started ended with them; both could be started again (the "
        f"device was connected {seconds:.0f} s later)"
    )
    lab.deployment.stop(GOOD)
    day.lost = "nothing"


def _kill_command(lab: Lab, name: str) -> None:
    process = lab.deployment.processes.pop(name)
    process.kill()
    process.wait()


GATE = (supernode_port_in_use, unregistered_key, wrong_clock, killed_commands, expired)


# Days of their own --------------------------------------------------------------------


def play_others(folder: Path, names: list[str]) -> list[Day]:
    """Days that need no deployment, or one of their own."""
    days = []
    for play in (no_ray, all_stop):
        if not names or play.__name__ in names:
            day = Day(play.__name__)
            try:
                play(folder / play.__name__, day)
            except Exception as error:
                day.happened += f" FAILED: {type(error).__name__}: {error}"
            day.show()
            days.append(day)
    return days


def no_ray(folder: Path, day: Day) -> None:
    """A Ray cluster that is not there."""
    words = ["run", "--engine", "ray", "--ray-address", "127.0.0.1:1"]
    command = [sys.executable, "-m", "fedspu.cli", *words, "--rounds", "1"]
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, env=environment(), check=False, timeout=300
    )
    seconds = time.monotonic() - began
    day.happened = f"refused after {seconds:.0f} s (exit code {done.returncode})"
    day.said = [("terminal", (done.stdout + done.stderr).decode().strip())]


def all_stop(folder: Path, day: Day) -> None:
    """Every device stops early: the run ends by itself."""
    given = {**SETTINGS, "early_stopping.on": True, "train.lr": 0.5}
    ready = prepare(given)
    with deployed(folder, ready) as made:
        lab = Lab(made, ready)
        made.wait_online()
        ended = made.play(1800)
        summary = json.loads((made.server.run / "summary.json").read_text())
        day.happened = (
            f"{ended.status} after {len(lab.rounds())} of 500 rounds, "
            f"{summary['stopped_clients']} devices stopped"
        )
        day.said = [("log", line) for line in lab.logged().splitlines()[-2:]]
        day.said += [("whole log", lab.logged()), ("device", lab.said(GOOD))]
        day.said += [("server", lab.said("server"))]
        day.lost = lab.lost()


PARTS = {"gate": play_gate, "others": play_others, "run": play_run}


def main() -> None:
    """Play the days that are asked for, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=[*PARTS, "all"], default="all")
    parser.add_argument("names", nargs="*", help="only these days")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what was started
    days: list[Day] = []
    for part, play in PARTS.items():
        if given.part in (part, "all"):
            with TemporaryDirectory(dir=os.environ.get("BAD_DAYS")) as place:
                days += play(Path(place), given.names)
    print("\n| day | what happened | lost |\n|---|---|---|")
    for day in days:
        print(f"| {day.name} | {day.happened} | {day.lost} |")


if __name__ == "__main__":
    main()
