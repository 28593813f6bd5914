"""Who has what: how many examples of each class each client holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedspu.data.kinds import Indices, Labels


@dataclass(frozen=True, eq=False)
class Shares:
    """The examples of each client by class: ``counts`` is (clients, classes)."""

    counts: Indices

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
        """The entropy of each client's labels, in bits; one class alone has none."""
        return entropy(self.counts)

    @cached_property
    def whole_entropy(self) -> float:
        """The entropy of all labels together, in bits: what even shares would have."""
        return float(entropy(self.counts.sum(0, keepdims=True))[0])

    @property
    def num_single(self) -> int:
        """How many clients have examples of one class alone."""
        return int((self.num_classes == 1).sum())


def count_shares(parts: Sequence[Indices], labels: Labels, num_classes: int) -> Shares:
    """The shares of clients whose examples are at ``parts``."""
    clients = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    cells = clients * num_classes + labels[np.concatenate(parts)]
    counts = np.bincount(cells, minlength=len(parts) * num_classes)
    return Shares(counts.reshape(len(parts), num_classes))


def entropy(counts: Indices) -> NDArray[np.float64]:
    """The entropy of each row of counts, in bits; a row of nothing has none."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    logs = np.log2(shares, where=shares > 0, out=np.zeros_like(shares))
    bits: NDArray[np.float64] = np.maximum(-(shares * logs).sum(1), 0.0)  # never -0.0
    return bits
