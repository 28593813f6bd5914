"""Who gets which examples.

A partition gives every example an owner, the client that holds it. Clients that then
have too few are helped by the largest ones; no example is ever repeated or left out.
"""

from collections.abc import Callable
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from fedspu.errors import SettingsError

Indices = NDArray[np.int64]
Labels = NDArray[np.integer]
Rng = np.random.Generator


def partition(
    labels: Labels,
    num_clients: int,
    kind: str,
    alpha: float,
    min_examples: int,
    rng: Rng,
) -> list[Indices]:
    """Each client's examples, as sorted indices into ``labels``."""
    _refuse_impossible(len(labels), num_clients, kind, alpha, min_examples)
    owners = PARTITIONS[kind](labels, num_clients, alpha, rng)
    owners = _help_the_smallest(owners, num_clients, min_examples, rng)

    by_owner = np.argsort(owners, kind="stable")
    sizes = np.bincount(owners, minlength=num_clients)
    return np.split(by_owner, np.cumsum(sizes)[:-1])


def dirichlet_owners(
    labels: Labels, num_clients: int, alpha: float, rng: Rng
) -> Indices:
    """Each class spread over the clients in proportions drawn from Dirichlet(alpha)."""
    owners = np.empty(len(labels), dtype=np.int64)
    by_class = np.argsort(labels, kind="stable")
    _, firsts = np.unique(labels[by_class], return_index=True)
    for examples in np.split(by_class, firsts[1:]):
        ends = np.cumsum(rng.dirichlet(np.full(num_clients, alpha)))
        # Evenly spaced from a random start: fixed places would favour some clients
        # wherever a class has fewer examples than there are clients.
        places = (np.arange(len(examples)) + rng.random()) / len(examples)
        # The last client's share ends at 1, whatever the sum was rounded to.
        owners[rng.permutation(examples)] = np.searchsorted(ends[:-1], places)
    return owners


def iid_owners(labels: Labels, num_clients: int, alpha: float, rng: Rng) -> Indices:
    """Equally many random examples for each client, give or take one."""
    return rng.permutation(np.arange(len(labels)) % num_clients)


PARTITIONS: dict[str, Callable[[Labels, int, float, Rng], Indices]] = {
    "dirichlet": dirichlet_owners,
    "iid": iid_owners,
}


def _refuse_impossible(
    num_examples: int, num_clients: int, kind: str, alpha: float, min_examples: int
) -> None:
    if kind not in PARTITIONS:
        known = ", ".join(sorted(PARTITIONS))
        raise SettingsError(f"data.partition = {kind!r}: expected one of {known}")
    if not (alpha > 0 and isfinite(alpha)):
        raise SettingsError(f"data.alpha = {alpha}: expected a number above 0")
    if min_examples < 0:
        raise SettingsError(f"data.min_examples = {min_examples}: expected 0 or more")
    if not 1 <= num_clients <= num_examples:
        raise SettingsError(
            f"clients.number = {num_clients}: expected a number from 1 to "
            f"{num_examples}, as many as there are examples"
        )
    if num_clients * min_examples > num_examples:
        raise SettingsError(
            f"clients.number = {num_clients} with data.min_examples = {min_examples} "
            f"needs {num_clients * min_examples} examples, but there are "
            f"{num_examples}; lower one of the two"
        )


def _help_the_smallest(
    owners: Indices, num_clients: int, min_examples: int, rng: Rng
) -> Indices:
    """Move random examples of the largest clients to those below ``min_examples``."""
    sizes = np.bincount(owners, minlength=num_clients)
    wanted = np.maximum(min_examples - sizes, 0)
    if not wanted.any():
        return owners
    given = _levelled(sizes, int(wanted.sum()))

    # The first given[k] of client k's examples, in random order, are moved.
    by_owner = rng.permutation(len(owners))
    by_owner = by_owner[np.argsort(owners[by_owner], kind="stable")]
    rank = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = by_owner[rank < given[owners[by_owner]]]

    helped = owners.copy()
    helped[rng.permutation(moved)] = np.repeat(np.arange(num_clients), wanted)
    return helped


def _levelled(sizes: Indices, total: int) -> Indices:
    """How many each client gives so that ``total`` are given, always by the largest.

    That cuts the largest clients to one level, the highest that yields ``total``; those
    below it give nothing.
    """
    level, high = 0, int(sizes.max())
    while level < high:
        middle = (level + high + 1) // 2
        if np.maximum(sizes - middle, 0).sum() >= total:
            level = middle
        else:
            high = middle - 1
    given = np.maximum(sizes - level, 0)
    # Not all who are cut need to go down to the level: the first keep one more.
    spared = np.flatnonzero(given)[: given.sum() - total]
    given[spared] -= 1
    return given
