"""What a round takes as clients, cohorts and models grow: seconds, and RAM.

    python benchmarks/scale.py --folder FOLDER

Clients have ten examples of 28x28 bytes each, in one memory-mapped file that the
command makes in FOLDER (784 MB for 100,000 clients). Every cell is a process of its
own. A turn is five epochs in batches of 16 on an MLP; RAM is anonymous memory, shared
pages counted once, of the server and all workers, after the last round; a hundred
clients are judged.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import nn

import fedspu

CLASSES = 62
WIDTHS = {"0.1 M": (128,), "1 M": (800, 400), "11 M": (2900, 2900)}

CELLS = (
    *((number, 10, "0.1 M") for number in (100, 1_000, 10_000, 100_000)),
    *((10_000, sampled, "0.1 M") for sampled in (100, 1_000)),
    *((1_000, 10, size) for size in ("1 M", "11 M")),
    (1_000, 100, "1 M"),
    (1_000, 1_000, "1 M"),
)


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
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cell", type=int)
    given = parser.parse_args()
    if given.cell is not None:
        print(json.dumps(play(given.folder, given.workers, *CELLS[given.cell])))
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    make_examples(given.folder, 100_000)
    print("| clients | a round | model | start, s | s a round | RAM after, MB |")
    print("|---|---|---|---|---|---|")
    for cell, (number, sampled, size) in enumerate(CELLS):
        command = [sys.executable, __file__, "--cell", str(cell)]
        command += ["--folder", str(given.folder), "--workers", str(given.workers)]
        found = json.loads(
            subprocess.run(command, check=True, capture_output=True).stdout
        )
        print(
            f"| {number:,} | {sampled:,} | {size} | {found['start']:.1f} | "
            f"{found['seconds']:.3f} | {found['ram']:.0f} |",
            flush=True,
        )


def make_examples(folder: Path, number: int) -> None:
    """A file of random images, ten for each client."""
    file = folder / "x.npy"
    if file.exists():
        return
    shape = (10 * number, 28, 28)
    x = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)
    rng = np.random.default_rng(0)
    for start in range(0, len(x), 10_000):
        x[start : start + 10_000] = rng.integers(0, 256, (10_000, 28, 28), np.uint8)
    x.flush()


def play(
    folder: Path, workers: int, number: int, sampled: int, size: str
) -> dict[str, float]:
    """One cell: seconds to start, seconds a round, MB in the end."""
    from time import perf_counter

    x = np.load(folder / "x.npy", mmap_mode="r")[: 10 * number]
    y = np.random.default_rng(1).integers(0, CLASSES, len(x))
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    ram: list[float] = []
    began = perf_counter()
    run = fedspu.simulate(
        {
            "clients.number": number,
            "clients.per_round": sampled,
            "rounds": 8 if sampled < 1_000 else 3,
            "data.partition": "iid",
            "train.epochs": 5,
            "train.batch_size": 16,
            "train.lr": 0.01,
            "judge.clients": 100,
            "judge.every": 1_000,
            "workers": workers,
            "out": str(out),
        },
        model=lambda: build(size),
        data=(x, y),
        watch=lambda plan, report: ram.append(anonymous_mb()),
    )
    walls = [line["wall_seconds"] for line in run.times]
    whole = perf_counter() - began
    shutil.rmtree(out)
    return {
        "start": whole - sum(walls),
        "seconds": median(walls[1:-1]),  # the last also judges the global model
        "ram": ram[-1],
    }


def anonymous_mb() -> float:
    """Anonymous memory of this process and its children, shared pages counted once."""
    me = os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    total = 0
    for process in (me, *children):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                total += int(line.split()[1])
    return total / 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
