"""A model's neuron groups, and the tensor axes each lies along.

Everything else in fedspu is derived from this table: which entries train, what
travels, what is averaged, what a slim model keeps. ``map_neurons`` (mapping.py) derives
the table from a model; it can also be written by hand::

    NeuronGroup("conv2", 16, (
        Axis("conv2.weight", dim=0), Axis("conv2.bias", dim=0),  # what makes the neuron
        Axis("fc1.weight", dim=1, repeat=64),  # what reads it: an 8x8 map, flattened
    ))
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspu.errors import ModelError

State = dict[str, Tensor]
"""Parameter or buffer name -> its values."""

Active = dict[str, Tensor]
"""Neuron group name -> sorted indices of its active neurons."""

Blocks = dict[str, tuple[Tensor | None, ...]]
"""Tensor name -> sorted active positions along each axis; None means all of them."""

Payload = dict[str, Tensor]
"""Tensor name -> its active block, dense: the slim sub-model's state."""


@dataclass(frozen=True, order=True)
class Axis:
    """Where the neurons of a group lie along one axis of one tensor.

    Neuron ``j`` owns the positions ``offset + j*repeat + r + c*stride`` for every
    ``r < repeat`` and ``c < copies``: a flattened map has ``repeat`` = its pixels, a
    concatenation has an ``offset``, an LSTM's gates have ``copies=4, stride=hidden``.
    Where neurons lie in no such order (channels that were shuffled), ``index`` lists
    the positions of the first neuron, then those of the second, and so on.
    """

    tensor: str
    dim: int
    repeat: int = 1
    offset: int = 0
    copies: int = 1
    stride: int = 0
    index: tuple[int, ...] = ()

    @classmethod
    def through(cls, tensor: str, dim: int, rows: Tensor) -> "Axis":
        """The axis on which neurons have these positions, one sorted row for each."""
        first = rows[0].tolist()
        repeat = 1
        while repeat < len(first) and first[repeat] == first[0] + repeat:
            repeat += 1
        copies = len(first) // repeat
        stride = first[repeat] - first[0] if copies > 1 else 0
        axis = cls(tensor, dim, repeat, first[0], copies, stride)
        if torch.equal(axis.positions(len(rows)), rows):
            return axis
        return cls(tensor, dim, index=tuple(rows.flatten().tolist()))

    def positions(self, size: int) -> Tensor:
        """The positions of each of ``size`` neurons, one row per neuron."""
        return torch.from_numpy(self.rows(size))

    def rows(self, size: int) -> np.ndarray:
        """The same as an array: of few neurons, several times as fast."""
        if self.index:
            return np.array(self.index).reshape(size, -1)
        end = self.offset + size * self.repeat
        runs = np.arange(self.offset, end).reshape(size, self.repeat)
        if self.copies == 1:
            return runs
        starts = self.stride * np.arange(self.copies)
        return (runs[:, None, :] + starts[None, :, None]).reshape(size, -1)


@dataclass(frozen=True)
class NeuronGroup:
    """The neurons of one layer, and every tensor axis they lie along.

    A ``permutable`` group was proved to be a symmetry of the model: any reordering of
    its neurons leaves the output unchanged. Where only some reorderings do that
    (normalisation groups, the values of a hand-written attention), the group is not
    permutable and its neurons keep their places. That is also the default for a table
    written by hand. ``slim`` says whether a physically smaller copy of the model can
    leave out neurons of this group. ``counts`` names the integers that the model stores
    of their number, like ``blocks.0.attention.num_heads``; a smaller copy changes them.
    ``padded``: a smaller copy stores it without these neurons, but computes with zeros
    in their place, because the number of neurons cannot be changed in the model's code.
    """

    name: str
    size: int
    axes: tuple[Axis, ...]
    permutable: bool = False
    slim: bool = True
    padded: bool = False
    counts: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors it lies along, each once."""
        return tuple(dict.fromkeys(axis.tensor for axis in self.axes))

    def in_words(self) -> tuple[str, ...]:
        """Name, number of neurons, kind, whether it can be slimmed, and its axes."""
        return (
            self.name,
            str(self.size),
            "permutable" if self.permutable else "aligned",
            "padded" if self.padded else "yes" if self.slim else "no",
            ", ".join(map(_describe, self.axes)),
        )


@dataclass(frozen=True)
class Fixed:
    """Neurons that are always active, and why."""

    tensors: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Call:
    """An operation in a line of a model's code, as one of its layers runs it."""

    layer: str
    line: str
    operation: str


@dataclass(frozen=True)
class Along:
    """The channels along an axis of a tensor, each so many times."""

    tensor: str
    dim: int
    repeat: int = 1


Absence = tuple[int, Along]
"""An axis, counted from the end (-1, -2 ...), and the channels that lie along it."""

Uncounted = dict[Call, tuple[Absence, ...]]
"""For each call, the axes along which neurons may be absent: of what it is given or, if
it treats values one by one, of what it returns."""


@dataclass(frozen=True)
class Neurons:
    """A model's table of neuron groups; prints as a table.

    ``shapes`` names the tensors that travel: the learnable parameters, and the
    floating-point statistics of normalisation layers (``statistics``).
    ``norm_tensors`` are all tensors of normalisation layers, for the policy that keeps
    them with the client. ``unreached`` parameters took no part in the example's forward
    pass, so nothing is known about what their neurons are connected to. ``resized`` are
    lines of the model's code that reshape, and must do so otherwise in a slim copy
    (``slimming/sizes.py``); ``uncounted`` are calls in it in which padded neurons must
    not count (``slimming/uncounted.py``).
    """

    groups: tuple[NeuronGroup, ...]
    shapes: dict[str, tuple[int, ...]]
    statistics: frozenset[str] = frozenset()
    norm_tensors: frozenset[str] = frozenset()
    fixed: tuple[Fixed, ...] = ()
    unreached: tuple[str, ...] = ()
    resized: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    uncounted: Uncounted = field(default_factory=dict)
    _index: dict[tuple[str, int], list[tuple[NeuronGroup, Tensor]]] = field(
        init=False, repr=False, compare=False
    )
    # Axes with the same groups at the same positions have the same number.
    _alike: dict[tuple[str, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the table by tensor axis, and refuse one that contradicts itself."""
        index: dict[tuple[str, int], list[tuple[NeuronGroup, Tensor]]] = {}
        along: dict[tuple[str, int], tuple[Any, ...]] = {}
        names = [group.name for group in self.groups]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ModelError(
                f"neuron groups named twice: {', '.join(sorted(twice))}; give each "
                "group its own name"
            )
        for group in self.groups:
            if group.size < 1:
                raise ModelError(
                    f"neuron group {group.name} has no neurons: size = {group.size}, "
                    "expected at least 1"
                )
            for axis in group.axes:
                if min(axis.dim, axis.offset, axis.stride) < 0 or axis.repeat < 1:
                    raise ModelError(
                        f"neuron group {group.name}, axis {axis.dim} of {axis.tensor}: "
                        "expected dim, offset and stride of at least 0 and repeat of "
                        f"at least 1, got {axis}"
                    )
                if len(axis.index) % group.size or min(axis.index, default=0) < 0:
                    raise ModelError(
                        f"neuron group {group.name}, axis {axis.dim} of {axis.tensor}: "
                        f"expected an index with as many positions, of at least 0, for "
                        f"each of {group.size} neurons, got {len(axis.index)} in all"
                    )
                where = index.setdefault((axis.tensor, axis.dim), [])
                where.append((group, axis.positions(group.size)))
                here = along.get((axis.tensor, axis.dim), ())
                anywhere = replace(axis, tensor="", dim=0)
                along[axis.tensor, axis.dim] = (*here, group.name, anywhere)
        for (tensor, dim), owners in index.items():
            self._check_axis(tensor, dim, owners)
        object.__setattr__(self, "_index", index)
        numbers = {groups: number for number, groups in enumerate(along.values())}
        alike = {place: numbers[groups] for place, groups in along.items()}
        object.__setattr__(self, "_alike", alike)

    def with_facts(
        self,
        groups: Iterable[NeuronGroup] = (),
        resized: dict[str, tuple[int | None, int | None]] | None = None,
        uncounted: Uncounted | None = None,
    ) -> "Neurons":
        """The same table with other facts about some groups or the model's code.

        The groups have the names, sizes and axes of those that are here, so nothing has
        to be checked or indexed again.
        """
        known = {group.name: group for group in groups}
        changed = copy.copy(self)
        index = {
            place: [(known.get(group.name, group), rows) for group, rows in owners]
            for place, owners in self._index.items()
        }
        now = tuple(known.get(group.name, group) for group in self.groups)
        object.__setattr__(changed, "groups", now)
        object.__setattr__(changed, "_index", index)
        if resized is not None:
            object.__setattr__(changed, "resized", resized)
        if uncounted is not None:
            object.__setattr__(changed, "uncounted", uncounted)
        return changed

    def _check_axis(
        self, tensor: str, dim: int, owners: list[tuple[NeuronGroup, Tensor]]
    ) -> None:
        taken = torch.cat([positions.flatten() for _, positions in owners])
        who = ", ".join(dict.fromkeys(group.name for group, _ in owners))
        if len(torch.unique(taken)) < len(taken):
            raise ModelError(
                f"neuron groups {who} share positions along axis {dim} of {tensor}; "
                "a position may belong to at most one neuron"
            )
        shape = self.shapes.get(tensor)
        if shape is not None and (dim >= len(shape) or int(taken.max()) >= shape[dim]):
            raise ModelError(
                f"neuron group {who} reaches position {int(taken.max())} along axis "
                f"{dim} of {tensor}, whose shape is {shape}"
            )

    @property
    def tensors(self) -> set[str]:
        """Names of the tensors that neurons lie along."""
        return {tensor for tensor, _ in self._index}

    def positions(self, tensor: str, dim: int) -> list[tuple[NeuronGroup, Tensor]]:
        """The groups along one axis, each with its positions, one row per neuron."""
        return self._index.get((tensor, dim), [])

    def blocks(
        self, active: Active, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> Blocks:
        """The active positions of every travelling tensor, axis by axis.

        An entry lies in the blocks when all the neurons it connects are active.
        ``shapes`` names the tensors to use instead of those that travel.
        """
        self._check_active(active)
        found: dict[tuple[int, int], Tensor | None] = {}

        def along(tensor: str, dim: int, size: int) -> Tensor | None:
            alike = self._alike.get((tensor, dim))
            if alike is None:
                return None
            if (alike, size) not in found:
                found[alike, size] = self.active_along(active, tensor, dim, size)
            return found[alike, size]

        return {
            name: tuple(along(name, dim, size) for dim, size in enumerate(shape))
            for name, shape in (self.shapes if shapes is None else shapes).items()
        }

    def active_along(
        self, active: Active, tensor: str, dim: int, size: int
    ) -> Tensor | None:
        """Active positions along an axis of this size; None if all of them are.

        Works for any tensor in the table, travelling or not. Positions that belong to
        no neuron are always active.
        """
        is_active = None
        for group, rows in self.positions(tensor, dim):
            if len(active[group.name]) < group.size:
                if is_active is None:
                    is_active = np.ones(size, dtype=np.bool_)  # quicker than PyTorch
                where = rows.numpy()
                is_active[where] = False
                is_active[where[active[group.name].numpy()]] = True
        return (
            None if is_active is None else torch.from_numpy(np.flatnonzero(is_active))
        )

    def _check_active(self, active: Active) -> None:
        sizes = {group.name: group.size for group in self.groups}
        if sizes.keys() != active.keys():
            wrong = sorted(sizes.keys() ^ active.keys())
            raise ModelError(
                f"active neurons do not fit the table: {', '.join(wrong)} is in only "
                "one of the two; choose them with choose_random, choose_ordered or "
                "choose_top on this table"
            )
        for name, indices in active.items():
            size = sizes[name]
            listed, known = indices.tolist(), set(range(size))
            if not listed or listed != sorted(set(listed) & known):
                raise ModelError(
                    f"active neurons of {name}: expected at least one index, sorted, "
                    f"each once, in 0..{size - 1}; got {_in_short(listed)}"
                )

    def everything(self) -> Active:
        """All neurons active: p = 1."""
        return {group.name: torch.arange(group.size) for group in self.groups}

    def num_entries(self, active: Active | None = None) -> int:
        """How many entries travel when these neurons (default: all) are active."""
        blocks = self.blocks(self.everything() if active is None else active)
        return sum(
            prod(
                n if where is None else len(where)
                for n, where in zip(self.shapes[name], axes, strict=True)
            )
            for name, axes in blocks.items()
        )

    def remarks(self) -> list[str]:
        """What is always active and why, and what the example did not reach."""
        lines = [
            f"always active: neurons of {', '.join(fixed.tensors)} ({fixed.reason})"
            for fixed in self.fixed
        ]
        if self.unreached:
            lines.append(f"not reached by the example: {', '.join(self.unreached)}")
        return lines

    def __str__(self) -> str:
        """The table, one line per group, then what is always active and why."""
        header = ("group", "neurons", "kind", "slim", "lies along")
        rows = [group.in_words() for group in self.groups]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        widths[-1] = len(header[-1])
        lines = [
            "  ".join(map(str.ljust, row, widths)).rstrip()
            for row in (header, tuple("-" * width for width in widths), *rows)
        ]
        return "\n".join([*lines, *self.remarks()])


def _describe(axis: Axis) -> str:
    place = f"{axis.tensor}[{axis.dim}]"
    if axis.index:
        return f"{place} at {len(axis.index)} listed places"
    if axis.repeat > 1:
        place += f" x{axis.repeat}"
    if axis.copies > 1:
        place += f" x{axis.copies} every {axis.stride}"
    if axis.offset:
        place += f" from {axis.offset}"
    return place


def _in_short(numbers: list[int]) -> str:
    """A list of numbers; of a long one, the beginning."""
    if len(numbers) <= MOST_LISTED:
        return str(numbers)
    return f"[{', '.join(map(str, numbers[:MOST_LISTED]))}, …], {len(numbers)} in all"


MOST_LISTED = 10
