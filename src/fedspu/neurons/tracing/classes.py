"""Which positions of a model's tensors belong to one neuron: a union-find in bulk."""

import numpy as np
import torch
from torch import Tensor

NONE = -1
"""The label of an element that belongs to no neuron: a zero that was padded on."""

MANY = 10_000
"""Of more pairs than this, those that come again are left out first."""


class Classes:
    """Labels, some of which are known to mean the same neuron."""

    def __init__(self) -> None:
        # The last entry is not a label: NONE, as an index, finds itself there.
        self._parent = np.array([NONE], dtype=np.int64)
        self.version = 0
        """Grows whenever classes are joined."""

    def __len__(self) -> int:
        return len(self._parent) - 1

    def copy(self) -> "Classes":
        """The same labels and classes, which may then go other ways."""
        other = Classes()
        other._parent, other.version = self._parent.copy(), self.version
        return other

    def new(self, number: int) -> Tensor:
        """Labels that were never given before, each in a class of its own."""
        fresh = np.arange(len(self), len(self) + number, dtype=np.int64)
        self._parent = np.concatenate([self._parent[:-1], fresh, self._parent[-1:]])
        return torch.from_numpy(fresh)

    def roots(self, labels: Tensor) -> Tensor:
        """One label for each class, in the shape of ``labels``."""
        return torch.from_numpy(self._find(labels.numpy()))

    def _find(self, labels: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._parent[labels]
        while True:
            above: np.ndarray = self._parent[found]
            if (above == found).all():
                break
            found = above
        self._parent[labels] = found
        return found

    def join(self, a: Tensor, b: Tensor) -> None:
        """Say that elements at the same place of ``a`` and ``b`` are one neuron."""
        a, b = torch.broadcast_tensors(a, b)
        left, right = a.reshape(-1).numpy(), b.reshape(-1).numpy()
        chosen = (left != right) & (left >= 0) & (right >= 0)
        left, right = left[chosen], right[chosen]
        if len(left) > MANY:  # mostly the same few pairs again and again
            pairs = np.unique(left * np.int64(len(self)) + right)
            left, right = pairs // len(self), pairs % len(self)
        while True:
            left, right = self._find(left), self._find(right)
            differ = left != right
            if not differ.any():
                return
            self.version += 1
            left, right = left[differ], right[differ]
            # Of many to join with one class, the least: else each turn joins only one.
            np.minimum.at(
                self._parent, np.maximum(left, right), np.minimum(left, right)
            )

    def join_all(self, labels: Tensor) -> None:
        """Say that all of these labels are one neuron."""
        is_there = np.zeros(len(self) + 1, dtype=bool)
        is_there[labels.numpy()] = True
        together = torch.from_numpy(np.flatnonzero(is_there[:-1]))
        if len(together) > 1:
            self.join(together, together[:1])

    def num_members(self) -> Tensor:
        """How many labels there are in the class of each label."""
        roots = self._find(np.arange(len(self)))
        return torch.from_numpy(np.bincount(roots, minlength=len(self))[roots])
