"""Which positions of a model's tensors belong to one neuron: a union-find in bulk."""

import numpy as np
import torch
from torch import Tensor

NONE = -1
"""The label of an element that belongs to no neuron: a zero that was padded on."""


class Classes:
    """Labels, some of which are known to mean the same neuron."""

    def __init__(self) -> None:
        self._parent = np.zeros(0, dtype=np.int64)
        self.version = 0
        """Grows whenever classes are joined."""

    def __len__(self) -> int:
        return len(self._parent)

    def new(self, number: int) -> Tensor:
        """Labels that were never given before, each in a class of its own."""
        first = len(self._parent)
        fresh = np.arange(first, first + number, dtype=np.int64)
        self._parent = np.concatenate([self._parent, fresh])
        return torch.from_numpy(fresh)

    def roots(self, labels: Tensor) -> Tensor:
        """One label for each class, in the shape of ``labels``."""
        return torch.from_numpy(self._find(labels.numpy()))

    def _find(self, labels: np.ndarray) -> np.ndarray:
        given, place = np.unique(labels, return_inverse=True)
        found = given.copy()
        known = found >= 0
        while True:
            above = self._parent[found[known]]
            if (above == found[known]).all():
                break
            found[known] = above
        self._parent[given[known]] = found[known]
        return found[place].reshape(labels.shape)

    def join(self, a: Tensor, b: Tensor) -> None:
        """Say that elements at the same place of ``a`` and ``b`` are one neuron."""
        a, b = torch.broadcast_tensors(a, b)
        pairs = torch.stack([a.reshape(-1), b.reshape(-1)])
        left, right = pairs[:, (pairs >= 0).all(0)].numpy()
        while True:
            left, right = self._find(left), self._find(right)
            differ = left != right
            if not differ.any():
                return
            self.version += 1
            left, right = left[differ], right[differ]
            self._parent[np.maximum(left, right)] = np.minimum(left, right)

    def num_members(self, labels: Tensor) -> Tensor:
        """How many labels there are in the class of each of ``labels``."""
        everything = self._find(np.arange(len(self._parent)))
        counts = np.bincount(everything, minlength=len(self._parent))
        return torch.from_numpy(counts[self.roots(labels).numpy()])
