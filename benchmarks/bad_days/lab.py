"""A deployment in which bad days are played, and what is noted of each."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fedspu.federation.storage.saved_run import SavedRun
from fedspu.prepare import Prepared
from tests.engines.fresh import environment
from tests.flower.deployment import Deployment

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


@contextmanager
def prepared(root: Path, ready: Prepared) -> Iterator[Deployment]:
    """A deployment with the app of ``client.py``; nothing is started yet."""
    found = Deployment(root, ready)
    project = found.server.app / "pyproject.toml"
    text = project.read_text()
    app = "benchmarks.bad_days.client:app"
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


def play_one(play: Callable[[Lab, Day], None], lab: Lab) -> Day:
    """A day that needs no run."""
    day = Day(play.__name__, lost="nothing: no run was going on")
    try:
        play(lab, day)
    except Exception as error:
        day.happened += f" FAILED: {type(error).__name__}: {error}"
    day.show()
    return day
