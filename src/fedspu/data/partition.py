"""Which client gets which examples, and how many of each class each client has.

A partition assigns every example to one client. Clients that end up with too few then
get some from the largest ones; no example is ever repeated or left out. In every kind
that uses alpha, a lower alpha makes clients differ more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from fedspu.data import bounds
from fedspu.errors import SettingsError
from fedspu.settings_text import nearest

Indices = NDArray[np.int64]
Labels = NDArray[np.integer]
Rng = np.random.Generator


@dataclass(frozen=True, eq=False)
class ToDivide:
    """What is divided, among how many clients, and how unevenly."""

    labels: Labels
    num_clients: int
    alpha: float = 0.1
    shards: int = 2  # per client; only used by `shards`
    owners: Labels | None = None  # who each example is from; only used by `natural`


def dirichlet(what: ToDivide, rng: Rng) -> Indices:
    """Each class spread over the clients in proportions drawn from Dirichlet(alpha)."""
    clients = np.empty(len(what.labels), dtype=np.int64)
    by_class = np.argsort(what.labels, kind="stable")
    _, firsts = np.unique(what.labels[by_class], return_index=True)
    for examples in np.split(by_class, firsts[1:]):
        shares = rng.dirichlet(np.full(what.num_clients, what.alpha))
        clients[rng.permutation(examples)] = _spread(shares, len(examples), rng)
    return clients


def dirichlet_client(what: ToDivide, rng: Rng) -> Indices:
    """A mix of classes drawn for each client from Dirichlet(alpha); equal sizes.

    If clients want more of a class than is left, it is shared out at random among them,
    and they draw what they still need from the rest of their mix.
    """
    _, codes = np.unique(what.labels, return_inverse=True)
    left = np.bincount(codes)
    refuse_many_cells(what.num_clients, len(left))
    mixes = rng.dirichlet(np.full(len(left), what.alpha), size=what.num_clients)
    wanted = np.bincount(_dealt(len(codes), what.num_clients))
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
    one_class = np.tile(np.arange(what.num_clients), len(left))
    clients[_by_class(codes, rng)] = np.repeat(one_class, held.T.ravel())
    return clients


def iid(what: ToDivide, rng: Rng) -> Indices:
    """Equally many random examples for each client, to within one."""
    return rng.permutation(_dealt(len(what.labels), what.num_clients))


def shards(what: ToDivide, rng: Rng) -> Indices:
    """The examples, sorted by class, in equal shards; the same number per client.

    Shards are dealt at random, as in "Communication-efficient learning" (McMahan et
    al., 2017). A shard on the border of two classes has some of both.
    """
    n, num_shards = len(what.labels), what.shards * what.num_clients
    by_shard = rng.permutation(_dealt(num_shards, what.num_clients))
    clients = np.empty(n, dtype=np.int64)
    clients[_by_class(what.labels, rng)] = by_shard[np.arange(n) * num_shards // n]
    return clients


def quantity(what: ToDivide, rng: Rng) -> Indices:
    """Random examples; the k-th largest client has k^(-1/alpha) of the largest one's.

    This is Pareto's law with index alpha; alpha = 1 is Zipf's law.
    """
    ranks = 1.0 + rng.permutation(what.num_clients)
    shares = ranks ** (-1 / what.alpha)
    return rng.permutation(_spread(shares / shares.sum(), len(what.labels), rng))


def natural(what: ToDivide, rng: Rng) -> Indices:
    """All examples of an owner (a speaker, a writer, ...) go to the same client.

    With as many owners as clients, client k is the k-th owner in sorted order; with
    more owners, each client gets equally many random ones, to within one.
    """
    if what.owners is None:
        raise SettingsError(
            "data.partition = 'natural': the data set does not say who its examples "
            "are from; add an array `client` to your .npz file, or use another "
            "partition"
        )
    names, codes = np.unique(what.owners, return_inverse=True)
    if len(names) < what.num_clients:
        raise SettingsError(
            f"clients.number = {what.num_clients}: with data.partition = 'natural' "
            f"expected at most {len(names)}, the number of owners in the data"
        )
    if len(names) == what.num_clients:
        return codes.astype(np.int64)
    return rng.permutation(_dealt(len(names), what.num_clients))[codes]


PARTITIONS: dict[str, Callable[[ToDivide, Rng], Indices]] = {
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
    """A client for each of ``number`` examples; the shares sum to one."""
    ends = np.cumsum(shares)
    # Evenly spaced from a random start: fixed places would favour some clients
    # whenever there are fewer examples than clients.
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
    """How many of each class each client draws from its mix of open classes."""
    asking = np.flatnonzero(wanted)
    chances = mixes[asking] * is_open
    # At a small alpha a mix may be a single class. Once that has run out, the client
    # draws from all open classes.
    chances[chances.sum(1) == 0] = is_open
    chances /= chances.sum(1, keepdims=True)
    drawn = np.zeros(mixes.shape, dtype=np.int64)
    drawn[asking] = rng.multinomial(wanted[asking], chances)
    return drawn


# The division ------------------------------------------------------------------------


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

    ``shards`` is only used by `shards`, ``owners`` (who each example is from) only by
    `natural`.
    """
    _refuse_impossible(len(labels), num_clients, kind, alpha, min_examples)
    if kind == "shards":
        _refuse_small_shards(len(labels), num_clients, shards)
    what = ToDivide(labels, num_clients, alpha, shards, owners)
    clients = PARTITIONS[kind](what, rng)
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
            f"{num_examples}, the number of examples"
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
    """How many examples each client gives so that the largest give ``total`` in all.

    This cuts the largest clients to one level, the highest that yields ``total``;
    clients below it give nothing.
    """
    level, high = 0, int(sizes.max())
    while level < high:
        middle = (level + high + 1) // 2
        if np.maximum(sizes - middle, 0).sum() >= total:
            level = middle
        else:
            high = middle - 1
    given = np.maximum(sizes - level, 0)
    # That may be too many: then the first of these clients keep one more.
    spared = np.flatnonzero(given)[: given.sum() - total]
    given[spared] -= 1
    return given


# Who has what ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """The examples of each client by class: ``counts`` is (clients, classes)."""

    counts: Indices

    @property
    def has_classes(self) -> bool:
        """Whether there is more than one class to tell clients apart by."""
        return len(self.counts[0]) > 1

    @cached_property
    def sizes(self) -> Indices:
        """How many examples each client has."""
        sizes: Indices = self.counts.sum(1)
        return sizes

    @cached_property
    def num_classes(self) -> Indices:
        """How many classes each client has examples of."""
        numbers: Indices = np.count_nonzero(self.counts, axis=1)
        return numbers

    @cached_property
    def entropies(self) -> NDArray[np.float64]:
        """The entropy of each client's labels, in bits; 0 for a single class."""
        return entropy(self.counts)

    @cached_property
    def whole_entropy(self) -> float:
        """The entropy of all labels together, in bits: that of an even share."""
        return float(entropy(self.counts.sum(0, keepdims=True))[0])

    @property
    def num_single(self) -> int:
        """How many clients have examples of only one class."""
        return int((self.num_classes == 1).sum())


def count_labels(
    parts: Sequence[Indices], labels: Labels, num_classes: int
) -> LabelCounts:
    """How many examples of each class each client has; client k has ``parts[k]``."""
    refuse_many_cells(len(parts), num_classes)
    clients = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    cells = clients * num_classes + labels[np.concatenate(parts)]
    counts = np.bincount(cells, minlength=len(parts) * num_classes)
    return LabelCounts(counts.reshape(len(parts), num_classes))


def refuse_many_cells(num_clients: int, num_classes: int) -> None:
    """Refuse a table of clients and classes that would take much memory."""
    if num_clients * num_classes > bounds.CELLS:
        raise SettingsError(
            f"clients.number = {num_clients} with {num_classes:,} classes makes a "
            f"table of {num_clients * num_classes:,} cells; expected at most "
            f"{bounds.CELLS:,}; lower clients.number, or give classes lower numbers"
        )


def entropy(counts: Indices) -> NDArray[np.float64]:
    """The entropy of each row of counts, in bits; 0 for a row of zeros."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    logs = np.log2(shares, where=shares > 0, out=np.zeros_like(shares))
    bits: NDArray[np.float64] = np.maximum(-(shares * logs).sum(1), 0.0)  # never -0.0
    return bits
