"""The bad days of a real deployment, each played for real.

    python -m benchmarks.bad_days               all of them, about an hour
    python -m benchmarks.bad_days gate          only what happens at the gate
    python -m benchmarks.bad_days run slow_device disk_full

SuperLink, SuperNodes, TLS and keys are real, on this machine. For each day the table
says what happened, what was said to whom, and whether a personal model or a saved
round was lost. At the end of ``run``, the same rounds are played again in one process,
without the devices that were missing: the global model and the personal models must be
the same, bit by bit. A full disk needs root, for a small file system in memory.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bad_days.at_the_gate import play_gate
from benchmarks.bad_days.in_a_run import play_run
from benchmarks.bad_days.lab import Day
from benchmarks.bad_days.others import play_others

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
