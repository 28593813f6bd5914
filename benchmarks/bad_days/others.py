"""Days that need no deployment, or one of their own."""

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.bad_days.lab import GOOD, SETTINGS, Day, Lab
from fedspu.prepare import prepare
from tests.engines.fresh import environment
from tests.flower.deployment import deployed


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
