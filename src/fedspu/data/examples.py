"""A data set divided among clients: each one's own train, validation and test part."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedspu.data.dataset import Dataset
from fedspu.data.partition import Indices, Labels, partition
from fedspu.data.splits import MIN_EXAMPLES, Splits
from fedspu.random_streams import stream
from fedspu.settings import Settings
from fedspu.tasks.choices import check_partition
from fedspu.tasks.task import Task


@dataclass(frozen=True, eq=False)
class DividedData:
    """All clients' examples, on this machine."""

    data: Dataset
    splits: Splits  # one for each client

    def part(self, client: int, name: str) -> tuple[Tensor, Tensor]:
        """A client's own ``train``, ``val`` or ``test`` examples."""
        positions = torch.from_numpy(getattr(self.splits[client], name))
        return self.data.take(positions)

    def num_examples(self, client: int) -> int:
        """How many examples a client has in total."""
        return int(self.splits.sizes[client])


def divide(settings: Settings, data: Dataset, task: Task) -> DividedData:
    """Each client's train, validation and test examples, set by settings and data."""
    labels = strata(data, task)
    shares = allot(settings, data, task)
    splits = Splits(shares, labels, settings.data.split, settings.seed)
    for client in np.flatnonzero(splits.sizes < MIN_EXAMPLES)[:1].tolist():
        splits[client]  # raises an error: this client has too few
    return DividedData(data, splits)


def allot(settings: Settings, data: Dataset, task: Task) -> list[Indices]:
    """Each client's examples, as sorted positions, set by settings and data."""
    check_partition(settings.data.partition, task)
    return partition(
        strata(data, task),
        num_clients=settings.clients.number,
        kind=settings.data.partition,
        alpha=settings.data.alpha,
        min_examples=settings.data.min_examples,
        rng=stream(settings.seed, "partition"),
        shards=settings.data.shards,
        owners=None if data.owners is None else data.owners.numpy(),
    )


def strata(data: Dataset, task: Task) -> Labels:
    """The class of each example, to divide and stratify by; all 0 without classes."""
    if task.strata is None:
        return np.zeros(len(data.y), dtype=np.int64)
    return task.strata(data.y).numpy()
