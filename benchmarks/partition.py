"""How long it takes to divide 814,255 examples among 100 and 10,000 clients.

Labels have frequencies like EMNIST's (62 classes; digits are half of all). Where
flwr-datasets is installed, its DirichletPartitioner divides the same labels in the same
run (it needs an environment of its own: no version of it fits constraints.txt).

    python benchmarks/partition.py
"""

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from fedspu.data import FROM_MEMORY
from fedspu.data.dataset import Dataset
from fedspu.data.examples import allot, divide
from fedspu.data.partition import PARTITIONS
from fedspu.resolve import resolve
from fedspu.settings import Settings
from fedspu.tasks.classification import classification
from fedspu.tasks.task import Task

NUM_EXAMPLES = 814_255
NUM_OWNERS = 20_000
NUMBERS = (100, 10_000)
ALPHA = 0.1


def emnist_like() -> Dataset:
    """Labels and owners alone; an example is a single value."""
    rng = np.random.default_rng(0)
    letters = 1.0 / np.arange(1, 53)
    shares = np.concatenate([np.full(10, 0.05), 0.5 * letters / letters.sum()])
    labels = rng.choice(62, NUM_EXAMPLES, p=shares)
    owners = rng.integers(0, NUM_OWNERS, NUM_EXAMPLES)
    return Dataset(
        name="like EMNIST",
        x=torch.zeros(NUM_EXAMPLES, 1),
        y=torch.from_numpy(labels),
        num_outputs=62,
        owners=torch.from_numpy(owners),
    )


def settings_for(kind: str, number: int) -> Settings:
    """A run with this many clients."""
    given = {"data.partition": kind, "clients.number": number, "data.alpha": ALPHA}
    return resolve({"model": "emnist", "data.name": FROM_MEMORY, **given})


def seconds(function: Callable[[], object], repetitions: int) -> float:
    """The median wall time of a call."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times)


def division_seconds(
    kind: str,
    number: int,
    data: Dataset,
    division: Callable[[Settings, Dataset, Task], object],
    repetitions: int,
) -> float:
    """The median time to divide the data among this many clients."""
    settings = settings_for(kind, number)
    return seconds(lambda: division(settings, data, classification), repetitions)


def flower_seconds(labels: NDArray[np.int64], number: int) -> float:
    """The time flwr-datasets takes to divide the same labels, once.

    It draws again until every client has ten examples, ten times at most.
    """
    from datasets import Dataset as Table  # type: ignore[import-not-found]  # optional
    from flwr_datasets.partitioner import (  # type: ignore[import-not-found]  # optional
        DirichletPartitioner,
    )

    partitioner = DirichletPartitioner(
        num_partitions=number, partition_by="label", alpha=ALPHA, seed=0
    )
    partitioner.dataset = Table.from_dict({"label": labels})
    return seconds(lambda: partitioner.load_partition(0), 1)


def main() -> None:
    """Print one row for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    data = emnist_like()

    print("| seconds | " + " | ".join(f"{n:,} clients" for n in NUMBERS) + " |")
    print("|---" * (1 + len(NUMBERS)) + "|")
    for kind in PARTITIONS:
        times = [division_seconds(kind, n, data, allot, repetitions) for n in NUMBERS]
        print(f"| {kind} | {_cells(times)} |")
    for kind in ("dirichlet", "iid"):
        times = [division_seconds(kind, n, data, divide, repetitions) for n in NUMBERS]
        print(f"| {kind}, and train / validation / test | {_cells(times)} |")

    if find_spec("flwr_datasets") is None:
        print("\nflwr-datasets is not installed: no ratio to it.")
        return
    theirs = flower_seconds(data.y.numpy(), NUMBERS[0])
    ours = division_seconds("dirichlet", NUMBERS[0], data, allot, repetitions)
    print(
        f"\nflwr-datasets' DirichletPartitioner, {NUMBERS[0]} clients: {theirs:.1f} s; "
        f"`dirichlet`: {ours:.2f} s, a ratio of {theirs / ours:.0f}."
    )


def _cells(times: list[float]) -> str:
    return " | ".join(f"{value:.2f}" for value in times)


if __name__ == "__main__":
    main()
