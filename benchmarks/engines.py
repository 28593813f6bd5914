"""What an engine costs in a round, besides local training.

    python benchmarks/engines.py --engines here,ray

Each cell is a process of its own with two workers; engines take turns, so that a busy
machine slows them all alike. A round has ten clients with 20 examples each, one epoch
in batches of 10. Overhead is a round's wall time less the mean of what its two workers
spent on turns; the table has medians over rounds, and then over repeats, and the
smallest and largest of the repeats. Start is the time before the first round ends.
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from torch import nn

import fedspu

CLASSES = 10
WIDTHS = {"0.1 M": (128,), "11 M": (2900, 2900)}
SKIPPED = 2
"""First rounds, in which files, caches and workers are new."""


def build(size: str) -> nn.Module:
    """An MLP of about this many parameters."""
    layers: list[nn.Module] = [nn.Flatten()]
    before = 784
    for width in WIDTHS[size]:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, CLASSES))


def main() -> None:
    """All cells, as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="here,ray")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cell", nargs=2, metavar=("ENGINE", "SIZE"))
    given = parser.parse_args()
    if given.cell is not None:
        print(json.dumps(play(*given.cell, given.rounds)))
        return
    engines = given.engines.split(",")
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _, size, engine in product(range(given.repeats), WIDTHS, engines):
        words = ["--rounds", str(given.rounds), "--cell", engine, size]
        command = [sys.executable, __file__, *words]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        cell = json.loads(said.stdout)
        print(size, engine, cell, file=sys.stderr)
        found.setdefault((size, engine), []).append(cell)
    print("| parameters | engine | round, s | training, s | overhead, s | start, s |")
    print("|---|---|---|---|---|---|")
    for (size, engine), cells in found.items():
        columns = " | ".join(
            spread([cell[name] for cell in cells])
            for name in ("round", "training", "overhead", "start")
        )
        print(f"| {size} | {engine} | {columns} |")


def spread(values: list[float]) -> str:
    """The median of some numbers, the smallest and the largest."""
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def play(engine: str, size: str, rounds: int) -> dict[str, float]:
    """The seconds of one run."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 1, 28, 28)).astype(np.float32)
    y = np.arange(2000) % CLASSES
    settings: dict[str, Any] = {
        "engine": engine,
        "workers": 2,
        "rounds": rounds,
        "clients.number": 100,
        "clients.per_round": 10,
        "data.partition": "iid",
        "train.epochs": 1,
        "train.batch_size": 10,
        "judge.every": rounds,
        "judge.clients": 1,
    }
    began = perf_counter()
    firsts: list[float] = []
    run = fedspu.simulate(
        settings,
        model=partial(build, size),
        data=(x, y),
        watch=lambda plan, played: firsts.append(perf_counter() - began),
    )
    lines = run.times[SKIPPED:-1]  # in the last round all are judged
    return {
        "round": median(line["wall_seconds"] for line in lines),
        "training": median(line["training"] for line in lines),
        "overhead": median(line["wall_seconds"] - line["training"] for line in lines),
        "start": firsts[0],
    }


if __name__ == "__main__":
    main()
