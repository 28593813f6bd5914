"""Bad days while a run goes on."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.bad_days.lab import (
    BAD,
    DEADLINE,
    GOOD,
    SETTINGS,
    Day,
    Lab,
    prepared,
    start_all,
)
from fedspu.engines.local import LocalEngine
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Missing
from fedspu.federation.messages import Request
from fedspu.federation.rounds import play_round
from fedspu.federation.server import Federation
from fedspu.federation.storage.saved_run import SavedRun
from fedspu.neurons.table import State
from fedspu.prepare import Prepared, prepare


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
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k,mode=700", "tmpfs", str(place)]
    subprocess.run(mount, check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
