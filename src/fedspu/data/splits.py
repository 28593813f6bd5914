"""A client's examples by use: to train, to validate, to test."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspu.errors import DataError, SettingsError
from fedspu.random_streams import stream

Indices = NDArray[np.int64]
Labels = NDArray[np.integer]

SPLITS = {
    "three-way": "70 % to train, 15 % to validate, 15 % to test",
    "paper": "70 % to train, and the same 30 % to validate and to test",
}

MIN_EXAMPLES = 3  # one for each part

MOST_KNOWN = 256
"""The splits of so many clients are kept."""


@dataclass(frozen=True, eq=False)
class Split:
    """One client's examples by use, as sorted indices into the data set."""

    train: Indices
    val: Indices
    test: Indices


def split(
    indices: Indices,
    labels: Labels,
    kind: str,
    rng: np.random.Generator,
) -> Split:
    """One client's examples, split so that every part has about the same class mix.

    ``labels`` are those of the whole data set; ``indices`` are the client's own. The
    training part gets its share of each class, rounded up or down; validation and test
    get theirs of what is held out.
    """
    if kind not in SPLITS:
        known = ", ".join(sorted(SPLITS))
        raise SettingsError(f"data.split = {kind!r}: expected one of {known}")
    n = len(indices)
    if n < MIN_EXAMPLES:
        raise DataError(
            f"{n} examples; expected at least {MIN_EXAMPLES} for a client, to train, "
            "validate and test; raise data.min_examples or lower clients.number"
        )

    # Class by class, so that evenly spaced examples have the labels in proportion.
    shuffled = rng.permutation(indices)
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    num_held = n - (7 * n + 5) // 10  # 30 %, rounded, in whole numbers
    if kind == "paper":
        train, held = map(np.sort, _spaced(by_class, num_held, rng))
        return Split(train, val=held, test=held)
    train, held = _spaced(by_class, max(num_held, 2), rng)
    # If the number is odd, the test part gets one more.
    val, test = _spaced(held, (len(held) + 1) // 2, rng)
    return Split(np.sort(train), np.sort(val), np.sort(test))


class Splits(Sequence[Split]):
    """Each client's train, validation and test examples; computed when asked for."""

    def __init__(
        self, shares: Sequence[Indices], labels: Labels, kind: str, seed: int
    ) -> None:
        self._all = shares, labels, kind, seed
        self.sizes = np.fromiter(map(len, shares), np.int64, len(shares))
        self._known: dict[int, Split] = {}  # some of them, as they are asked for often

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[k] for k in range(len(self))[client]]
        found = self._known.get(client)
        if found is None:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            found = self._known[client] = self._split(client)
        return found

    def _split(self, client: int) -> Split:
        shares, labels, kind, seed = self._all
        try:
            rng = stream(seed, "split", client=client)
            return split(shares[client], labels, kind, rng)
        except DataError as error:
            raise DataError(f"client {client}: {error}") from None

    def too_few_to_train(self) -> int | None:
        """The first client with a single training example, if there is one."""
        for client in np.flatnonzero(self.sizes <= MIN_EXAMPLES + 1).tolist():
            if len(self[client].train) < 2:
                return int(client)
        return None


def _spaced(
    values: Indices, num_taken: int, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """What is left, and ``num_taken`` evenly spaced values from a random start.

    Any run of r neighbours loses its share r * num_taken / n, rounded up or down.
    """
    n = len(values)
    taken = (rng.integers(n) + n * np.arange(num_taken)) // num_taken
    return np.delete(values, taken), values[taken]
