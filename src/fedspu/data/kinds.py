"""Ways to divide examples: each function gives every example its client.

In every kind that reads alpha, a lower one makes clients differ more.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedspu.errors import SettingsError

Indices = NDArray[np.int64]
Labels = NDArray[np.integer]
Rng = np.random.Generator


@dataclass(frozen=True, eq=False)
class Task:
    """What is divided, among how many clients, and how unevenly."""

    labels: Labels
    num_clients: int
    alpha: float = 0.1
    shards: int = 2  # for each client, in `shards` alone
    owners: Labels | None = None  # whose each example is, for `natural` alone


def dirichlet(task: Task, rng: Rng) -> Indices:
    """Each class spread over the clients in proportions drawn from Dirichlet(alpha)."""
    clients = np.empty(len(task.labels), dtype=np.int64)
    by_class = np.argsort(task.labels, kind="stable")
    _, firsts = np.unique(task.labels[by_class], return_index=True)
    for examples in np.split(by_class, firsts[1:]):
        shares = rng.dirichlet(np.full(task.num_clients, task.alpha))
        clients[rng.permutation(examples)] = _spread(shares, len(examples), rng)
    return clients


def dirichlet_client(task: Task, rng: Rng) -> Indices:
    """A mix of classes drawn for each client from Dirichlet(alpha); sizes alike.

    Classes run out: clients that want more of one than is left are served at random,
    and draw again from the rest of their mix.
    """
    _, codes = np.unique(task.labels, return_inverse=True)
    left = np.bincount(codes)
    mixes = rng.dirichlet(np.full(len(left), task.alpha), size=task.num_clients)
    wanted = np.bincount(_dealt(len(codes), task.num_clients))
    held = np.zeros(mixes.shape, dtype=np.int64)
    while wanted.any():
        drawn = _draw(mixes, wanted, left > 0, rng)
        for c in np.flatnonzero(drawn.sum(0) > left):
            drawn[:, c] = rng.multivariate_hypergeometric(
                drawn[:, c], left[c], method="marginals"
            )
        held += drawn
        left -= drawn.sum(0)
        wanted -= drawn.sum(1)

    clients = np.empty(len(codes), dtype=np.int64)
    one_class = np.tile(np.arange(task.num_clients), len(left))
    clients[_by_class(codes, rng)] = np.repeat(one_class, held.T.ravel())
    return clients


def iid(task: Task, rng: Rng) -> Indices:
    """Equally many random examples for each client, give or take one."""
    return rng.permutation(_dealt(len(task.labels), task.num_clients))


def shards(task: Task, rng: Rng) -> Indices:
    """Examples sorted by class, cut into equal shards; as many random ones for each.

    As in "Communication-efficient learning" (McMahan et al., 2017). A shard on the
    border of two classes has some of both.
    """
    n, num_shards = len(task.labels), task.shards * task.num_clients
    by_shard = rng.permutation(_dealt(num_shards, task.num_clients))
    clients = np.empty(n, dtype=np.int64)
    clients[_by_class(task.labels, rng)] = by_shard[np.arange(n) * num_shards // n]
    return clients


def quantity(task: Task, rng: Rng) -> Indices:
    """Random examples, in sizes by a power law: the k-th largest is k^(-1/alpha) of it.

    That is Pareto's law with index alpha; alpha = 1 is Zipf's.
    """
    ranks = 1.0 + rng.permutation(task.num_clients)
    shares = ranks ** (-1 / task.alpha)
    return rng.permutation(_spread(shares / shares.sum(), len(task.labels), rng))


def natural(task: Task, rng: Rng) -> Indices:
    """All examples of an owner together: a speaker, a writer, a client column.

    With as many owners as clients, client k is the k-th owner in sorted order; with
    more, each client has equally many random ones, give or take one.
    """
    if task.owners is None:
        raise SettingsError(
            "data.partition = 'natural': the data set does not say whose its examples "
            "are; add an array `client` to your .npz file, or use another partition"
        )
    names, codes = np.unique(task.owners, return_inverse=True)
    if len(names) < task.num_clients:
        raise SettingsError(
            f"clients.number = {task.num_clients}: with data.partition = 'natural' "
            f"expected at most {len(names)}, as many as the examples have owners"
        )
    if len(names) == task.num_clients:
        return codes.astype(np.int64)
    return rng.permutation(_dealt(len(names), task.num_clients))[codes]


PARTITIONS: dict[str, Callable[[Task, Rng], Indices]] = {
    "dirichlet": dirichlet,
    "dirichlet-client": dirichlet_client,
    "iid": iid,
    "natural": natural,
    "quantity": quantity,
    "shards": shards,
}


def _dealt(number: int, num_clients: int) -> Indices:
    """Clients in turn, 0, 1, …, as in dealing cards."""
    return np.arange(number) % num_clients


def _spread(shares: NDArray[np.float64], number: int, rng: Rng) -> Indices:
    """A client for each of ``number`` examples, by shares that sum to one."""
    ends = np.cumsum(shares)
    # Evenly spaced from a random start: fixed places would favour some clients
    # wherever there are fewer examples than clients.
    places = (np.arange(number) + rng.random()) / number
    # The last client's share ends at 1, whatever the sum was rounded to.
    return np.searchsorted(ends[:-1], places)


def _by_class(labels: Labels, rng: Rng) -> Indices:
    """All examples, class by class, in random order within a class."""
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def _draw(
    mixes: NDArray[np.float64], wanted: Indices, is_open: NDArray[np.bool_], rng: Rng
) -> Indices:
    """How many of each class each client draws from its mix of the open ones."""
    asking = np.flatnonzero(wanted)
    chances = mixes[asking] * is_open
    # At a small alpha a mix is one class, and nothing remains once that has run out.
    chances[chances.sum(1) == 0] = is_open
    chances /= chances.sum(1, keepdims=True)
    drawn = np.zeros(mixes.shape, dtype=np.int64)
    drawn[asking] = rng.multinomial(wanted[asking], chances)
    return drawn
