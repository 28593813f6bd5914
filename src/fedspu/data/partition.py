"""Who gets which examples.

A partition gives every example its client. Clients that then have too few are helped by
the largest ones; no example is ever repeated or left out.
"""

from math import isfinite

import numpy as np

from fedspu.data.kinds import PARTITIONS, Indices, Labels, Rng, Task
from fedspu.errors import SettingsError
from fedspu.settings import nearest

__all__ = ["PARTITIONS", "partition"]


def partition(
    labels: Labels,
    num_clients: int,
    kind: str,
    alpha: float,
    min_examples: int,
    rng: Rng,
    shards: int = 2,
    owners: Labels | None = None,
) -> list[Indices]:
    """Each client's examples, as sorted indices into ``labels``.

    ``shards`` is read by that kind alone, ``owners`` (whose each example is) by
    `natural` alone.
    """
    _refuse_impossible(len(labels), num_clients, kind, alpha, min_examples)
    if kind == "shards":
        _refuse_small_shards(len(labels), num_clients, shards)
    task = Task(labels, num_clients, alpha, shards, owners)
    clients = PARTITIONS[kind](task, rng)
    clients = _help_the_smallest(clients, num_clients, min_examples, rng)

    by_client = np.argsort(clients, kind="stable")
    sizes = np.bincount(clients, minlength=num_clients)
    return np.split(by_client, np.cumsum(sizes)[:-1])


def _refuse_impossible(
    num_examples: int, num_clients: int, kind: str, alpha: float, min_examples: int
) -> None:
    if kind not in PARTITIONS:
        known = ", ".join(sorted(PARTITIONS))
        raise SettingsError(
            f"data.partition = {kind!r}: expected one of {known}"
            f"{nearest(kind, list(PARTITIONS))}"
        )
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


def _refuse_small_shards(num_examples: int, num_clients: int, shards: int) -> None:
    if shards < 1:
        raise SettingsError(f"data.shards = {shards}: expected 1 or more")
    if num_clients * shards > num_examples:
        raise SettingsError(
            f"clients.number = {num_clients} with data.shards = {shards} makes "
            f"{num_clients * shards} shards, but there are {num_examples} examples; "
            "lower one of the two"
        )


def _help_the_smallest(
    clients: Indices, num_clients: int, min_examples: int, rng: Rng
) -> Indices:
    """Move random examples of the largest clients to those below ``min_examples``."""
    sizes = np.bincount(clients, minlength=num_clients)
    wanted = np.maximum(min_examples - sizes, 0)
    if not wanted.any():
        return clients
    given = _levelled(sizes, int(wanted.sum()))

    # The first given[k] of client k's examples, in random order, are moved.
    by_client = rng.permutation(len(clients))
    by_client = by_client[np.argsort(clients[by_client], kind="stable")]
    rank = np.arange(len(clients)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = by_client[rank < given[clients[by_client]]]

    helped = clients.copy()
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
