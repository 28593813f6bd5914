"""Average each entry over the clients that trained it (paper, step 4 and Figure 3)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspu.compiled.rows import add_blocks
from fedspu.errors import ModelError
from fedspu.neurons.blocks import Where
from fedspu.neurons.table import Blocks, Payload, State


@dataclass(frozen=True)
class Update:
    """What one client trained: where, to which values, on how many examples."""

    where: Blocks
    payload: Payload
    num_examples: int


@runtime_checkable
class Accumulator(Protocol):
    """Combines many updates into one state; they arrive one by one, in client order."""

    def add(self, update: Update) -> None:
        """Add what one client trained."""

    def result(self) -> State:
        """The next state; an entry that no client trained keeps its value."""


class Average:
    """The mean of each entry over the clients that trained it.

    An entry that no client trained keeps its value in ``state``. Computed as
    ``state + sum n_i (payload_i - state) / sum n_i`` in float64, in the order given, so
    payloads equal to ``state`` give ``state`` back bit for bit. No update is kept after
    it is added: a thousand of them need no more memory than one.
    """

    def __init__(self, state: Mapping[str, Tensor], by_examples: bool = True) -> None:
        self.state, self.by_examples = state, by_examples
        # All tensors of one kind in a row: an update is then a few operations, not a
        # few for each tensor.
        self._rows = _Row.by_kind(state)

    def add(self, update: Update) -> None:
        """Add what one client trained."""
        if update.num_examples < 1:
            raise ModelError(
                f"an update has num_examples = {update.num_examples}: expected at "
                "least 1, because examples are the update's weight"
            )
        for row in self._rows:
            row.add(update, update.num_examples if self.by_examples else 1)

    def result(self) -> State:
        """The mean of every entry, in new tensors."""
        averaged: State = {}
        for row in self._rows:
            averaged |= row.average()
        return {name: averaged[name] for name in self.state}


def average_by_examples(state: State) -> Average:
    """An average that weights each client by its number of training examples."""
    return Average(state)


def average_by_clients(state: State) -> Average:
    """An average in which all clients have the same weight."""
    return Average(state, by_examples=False)


def average(state: Mapping[str, Tensor], updates: Iterable[Update]) -> State:
    """Average each entry over the clients that trained it, by their examples.

    An entry that no client trained keeps its value in ``state``; unchanged payloads
    give ``state`` back bit for bit.
    """
    mean = Average(state)
    for update in updates:
        mean.add(update)
    return mean.result()


class _Row:
    """All tensors of one dtype and device in one flat row, with sums for each entry."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.values = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        lengths = [tensor.numel() for tensor in tensors.values()]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self.starts = dict(zip(tensors, [0, *ends[:-1]], strict=True))
        self.before = self.values.double()
        self.moved = torch.zeros_like(self.before)
        self.weight = torch.zeros_like(self.moved)

    @staticmethod
    def by_kind(state: Mapping[str, Tensor]) -> "list[_Row]":
        """A row for each kind of tensor in a state."""
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        for name, tensor in state.items():
            kinds.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
        return [_Row(tensors) for tensors in kinds.values()]

    def add(self, update: Update, weight: int) -> None:
        """Add what one client trained, with this weight."""
        names = [name for name in update.where if name in self.tensors]
        if not names:
            return
        if self._add_by_compiled_code(update, names, weight):
            return
        trained = torch.cat([update.payload[name].reshape(-1) for name in names])
        step = trained.double()
        if len(trained) == len(self.values) and names == list(self.tensors):
            self.moved += step.sub_(self.before).mul_(weight)
            self.weight += weight
            return
        found = [
            _places(self.tensors[name], update.where[name], self.starts[name])
            for name in names
        ]
        places = torch.from_numpy(np.concatenate(found)).to(self.values.device)
        step.sub_(self.before.index_select(0, places)).mul_(weight)
        self.moved.index_add_(0, places, step)
        count = torch.tensor(weight, dtype=torch.float64).to(step.device)
        self.weight.index_add_(0, places, count.expand(len(places)))

    def _add_by_compiled_code(
        self, update: Update, names: Sequence[str], weight: int
    ) -> bool:
        blocks = [
            (self.tensors[n].shape, update.payload[n], update.where[n], self.starts[n])
            for n in names
        ]
        return add_blocks(blocks, weight, self.before, self.moved, self.weight)

    def average(self) -> State:
        """The average of every entry, in new tensors."""
        mean = self.moved / self.weight.clamp(min=1)
        changed = (self.before + mean).to(self.values.dtype)
        # An entry that did not move keeps its bits: -0.0 + 0.0 would be 0.0.
        values = torch.where(mean == 0, self.values, changed)
        return {
            name: values[start : start + tensor.numel()].view(tensor.shape).clone()
            for (name, tensor), start in zip(
                self.tensors.items(), self.starts.values(), strict=True
            )
        }


def _places(tensor: Tensor, where: Where, start: int) -> NDArray[np.int64]:
    """The positions of a block's entries in a row in which its tensor begins there."""
    # In numpy: calls of PyTorch take longer than the numbers do.
    places, stride = np.array(start), tensor.numel()
    for dim, (size, axis) in enumerate(zip(tensor.shape, where, strict=True)):
        stride //= size
        along = np.arange(size) if axis is None else axis.numpy()
        if axis is not None and not ((along >= 0) & (along < size)).all():
            raise ModelError(
                f"an update has a position outside of its tensor, along axis {dim}: "
                f"expected 0 to {size - 1}"
            )
        places = np.add.outer(places, along * stride)
    return places.reshape(-1)
