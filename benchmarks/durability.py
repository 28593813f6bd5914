"""What it costs that a saved round outlives a power cut, on the CIFAR-10 workload.

    python benchmarks/durability.py --data-dir FOLDER --out FOLDER [--rounds 24]

Plays ``configs/cifar10-alpha-0.1.toml`` with two workers. Rounds alternate between
saves that wait for the disk and saves that do not; printed are the medians of both, in
milliseconds and as a share of a round. --out should be on the disk in question.
"""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import fedspu
from fedspu.federation.storage.run_folder import RunFolder
from fedspu.settings_text import flatten, read_toml

CONFIG = Path(__file__).parent.parent / "configs/cifar10-alpha-0.1.toml"


def main() -> None:
    """Play, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=24)
    given = parser.parse_args()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    save = RunFolder.save

    def timed(self: RunFolder, played: Any, lines: Any) -> None:
        self.durable = played.federation.round % 2 == 0
        began = perf_counter()
        save(self, played, lines)
        seconds[self.durable].append(perf_counter() - began)

    RunFolder.save = timed  # type: ignore[method-assign]  # to measure it
    settings: Mapping[str, Any] = {
        **dict(flatten(read_toml(CONFIG))),
        "data.dir": str(given.data_dir),
        "out": str(given.out),
        "rounds": given.rounds,
        "workers": 2,
    }
    run = fedspu.simulate(settings)
    shutil.rmtree(given.out)
    round_ = median(line["wall_seconds"] for line in run.times[1:])
    print(f"A round takes {round_ * 1e3:.0f} ms.\n")
    print("| a save | ms | share of a round |\n|---|---|---|")
    for durable, words in ((False, "does not wait"), (True, "waits for the disk")):
        found = median(seconds[durable])
        print(f"| {words} | {found * 1e3:.1f} | {found / round_:.1%} |")
    waiting = median(seconds[True]) - median(seconds[False])
    print(f"| waiting alone | {waiting * 1e3:.1f} | {waiting / round_:.1%} |")


if __name__ == "__main__":
    main()
