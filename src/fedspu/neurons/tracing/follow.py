"""Follow the neurons through a forward pass, operation by operation.

Every tensor of the pass carries *slots*. A slot has the tensor's number of axes, and
labels its elements: equal labels belong to one neuron. Its size is one along the axes
on which the neuron does not depend (examples, tokens, pixels). A weight has a slot for
each axis; the output of a layer has one slot, with the labels of the weight's rows.
Data that moves takes its labels along; where values meet, their labels are joined.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedspu.neurons.calls import Operations
from fedspu.neurons.tracing.classes import NONE, Classes
from fedspu.neurons.tracing.live import Live, memory_of, tensors_in

Slots = list[Tensor]
Place = tuple[Tensor, int]
"""A tensor and one of its axes."""


@dataclass
class Known:
    """What is known of a tensor in the forward pass."""

    slots: Slots = field(default_factory=list)
    from_example: bool = False
    from_weights: bool = False
    raw: Slots = field(default_factory=list)  # of a weight: its own places' labels
    version: int = -1  # of the classes, when the slots were tidied


@dataclass
class Operand:
    """One side of an operation; ``value`` is None if it was never computed."""

    slots: Slots
    shape: tuple[int, ...]
    value: Tensor | None = None
    is_weight: bool = False
    raw: Slots = field(default_factory=list)
    _is_even: dict[int, bool] = field(default_factory=dict)

    def is_even(self, dim: int) -> bool:
        """Whether all values along an axis are the same."""
        if self.shape[dim] <= 1:
            return True
        if self.value is None:
            return False
        if dim not in self._is_even:
            first = self.value.narrow(dim, 0, 1)
            self._is_even[dim] = bool(
                ((self.value == first) | (self.value.isnan() & first.isnan())).all()
            )
        return self._is_even[dim]

    def lifted(self, view: Callable[[Tensor], Tensor]) -> "Operand":
        """The same operand in a space with more axes."""
        shape = tuple(view(torch.empty(self.shape, device="meta")).shape)
        value = None if self.value is None else view(self.value)
        slots, raw = [view(s) for s in self.slots], [view(s) for s in self.raw]
        return Operand(slots, shape, value, self.is_weight, raw)


@dataclass(frozen=True)
class Meeting:
    """Two slots that met, of which one depends on axes that the other has not."""

    a: Tensor
    b: Tensor
    of_weight: bool


@dataclass(frozen=True)
class Block:
    """Labels of whole blocks of neurons, and the slot from which they were made."""

    labels: Tensor
    members: Tensor


@dataclass(frozen=True)
class Table:
    """Values that a model computes of nothing but sizes, and labels along one axis."""

    value: Tensor
    dim: int
    labels: Tensor


def dims(slot: Tensor) -> frozenset[int]:
    """The axes on which the neurons of a slot depend."""
    return frozenset(d for d, n in enumerate(slot.shape) if n > 1)


class Follower(Operations):
    """Inside, all operations are followed by ``rules``.

    ``live`` has the operations on which the output depends: what is computed and
    thrown away says nothing about neurons, and is only followed if ``live`` is None.
    ``reasons`` collects what ties neurons
    together so that none is left, ``tables`` what the model computes of sizes alone.
    """

    def __init__(
        self,
        classes: Classes,
        rules: Callable[..., None],
        live: Live | None,
        reasons: list[tuple[Tensor, str]],
        tables: list[Table],
    ) -> None:
        super().__init__()
        self.classes, self.rules, self.live = classes, rules, live
        self.reasons, self.tables = reasons, tables
        self.number = 0
        self.known: dict[int, tuple[Any, Known]] = {}
        self.by_storage: dict[int, list[Any]] = {}
        self.meetings: list[Meeting] = []
        self.blocks: list[Block] = []
        self.makers: list[Tensor] = []
        self.readers: list[Tensor] = []
        self.operation = ""
        self.used: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operation = func.overloadpacket.__name__
        matters = self.live is None or self.live.has(self.number, self.operation)
        self.number += 1
        if matters:
            self.used.update(id(tensor) for tensor in tensors_in((args, kwargs)))
        given = args
        if matters and self.operation.endswith("_") and isinstance(args[0], Tensor):
            was = args[0].clone()  # its values are about to be overwritten
            self.set(was, replace(self.of(args[0])))
            given = (was, *args[1:])
        out = func(*args, **kwargs)
        if matters:
            self.rules(self, func, given, kwargs, out)
        return out

    # What is known of tensors

    def of(self, tensor: Tensor) -> Known:
        """What is known of a tensor, its slots brought up to date."""
        found = self.known.get(id(tensor))
        if found is not None and found[0]() is tensor:
            known = found[1]
        else:
            known = self._same_memory(tensor)
        if known.version != self.classes.version:
            known.slots = self.tidied(known.slots)
            known.version = self.classes.version
        return known

    def _same_memory(self, tensor: Tensor) -> Known:
        """What is known of another tensor with the same memory, as ``.data`` has."""
        for ref in self.by_storage.get(memory_of(tensor), []):
            other = ref()
            if (
                other is not None
                and other.shape == tensor.shape
                and other.stride() == tensor.stride()
                and other.storage_offset() == tensor.storage_offset()
                and other.dtype == tensor.dtype
            ):
                return self.of(other)
        return Known()

    def set(self, tensor: Tensor, known: Known) -> None:
        """Remember what is known of a tensor."""
        ref = weakref.ref(tensor)
        self.known[id(tensor)] = (ref, known)
        if memory := memory_of(tensor):
            others = self.by_storage.setdefault(memory, [])
            others[:] = [r for r in others if r() is not None and r() is not tensor]
            others.append(ref)

    def written(self, tensor: Tensor) -> None:
        """Tell all tensors with the same memory that this one was written to."""
        now = self.of(tensor)
        for ref in list(self.by_storage.get(memory_of(tensor), [])):
            other = ref()
            if other is None or other is tensor:
                continue
            was = self.of(other)
            was.from_example |= now.from_example
            if not now.slots:
                continue
            size = other.untyped_storage().nbytes() // other.element_size()
            slots: Slots = []
            for number, slot in enumerate(now.slots):
                memory = torch.full((size,), NONE)
                if number < len(was.slots):
                    window(memory, other).copy_(was.slots[number].expand(other.shape))
                window(memory, tensor).copy_(slot.expand(tensor.shape))
                slots.append(window(memory, other).clone())
            was.slots = slots + was.slots[len(slots) :]
            was.version = -1

    def operand(self, tensor: Tensor) -> Operand:
        """A tensor as one side of an operation."""
        known = self.of(tensor)
        is_weight = known.from_weights and not known.from_example
        raw = known.raw if is_weight else []
        return Operand(known.slots, tuple(tensor.shape), tensor, is_weight, raw)

    def put(
        self, out: Any, slots: Slots, inputs: Iterable[Any], raw: Slots | None = None
    ) -> None:
        """Remember the slots of an output, and where it comes from."""
        of_inputs = [self.of(t) for t in inputs if isinstance(t, Tensor)]
        self.set(
            out,
            Known(
                self.tidied(slots),
                any(known.from_example for known in of_inputs),
                any(known.from_weights for known in of_inputs),
                raw or [],
                self.classes.version,
            ),
        )

    # Slots

    def tidy(self, slot: Tensor) -> Tensor | None:
        """The slot with the axes it depends on alone; None if there are none."""
        for dim, (size, stride) in enumerate(
            zip(slot.shape, slot.stride(), strict=True)
        ):
            if size > 1 and stride == 0:
                slot = slot.narrow(dim, 0, 1)
        if slot.numel() <= 1:
            return None
        slot = self.classes.roots(slot)
        for dim, size in enumerate(slot.shape):
            if size > 1:
                top = slot.amax(dim, keepdim=True)
                if bool(((slot == top) | (slot == NONE)).all()):
                    slot = top
        return slot if slot.numel() > 1 else None

    def tidied(self, slots: Slots) -> Slots:
        """The slots that are left once all are tidied."""
        return [tidy for slot in slots if (tidy := self.tidy(slot)) is not None]

    def tie(self, slot: Tensor, axes: Iterable[int]) -> Tensor | None:
        """Make one neuron of all that lie along these axes of a slot."""
        axes = [d for d in axes if slot.shape[d] > 1]
        if dims(slot) <= set(axes):
            self.classes.join_all(slot)
        else:
            for dim in axes:
                self.classes.join(slot, slot.amax(dim, keepdim=True))
        tidy = self.tidy(slot)
        if axes and tidy is None:
            self.reasons.append((slot.reshape(-1)[:1], self.operation))
        return tidy

    def tie_all(self, tensor: Tensor, axes: Iterable[int] | None = None) -> Slots:
        """Tie all slots of a tensor along these axes (default: all of them)."""
        chosen = range(tensor.dim()) if axes is None else list(axes)
        slots = [self.tie(slot, chosen) for slot in self.of(tensor).slots]
        return [slot for slot in slots if slot is not None]

    def combine(self, operands: Sequence[Operand]) -> Slots:
        """The slots of values that are computed element by element from operands."""
        together: Slots = []
        of_weight: list[bool] = []
        for operand in operands:
            for slot in operand.slots:
                self._meet(together, of_weight, slot, operand.is_weight)
        # Values without labels that differ along an axis pin down what they meet there.
        out: Slots = []
        for slot in together:
            pinned = {
                dim
                for operand in operands
                for dim in dims(slot)
                if not any(dim in dims(own) for own in operand.slots)
                and not operand.is_even(dim)
            }
            tied = self.tie(slot, sorted(pinned)) if pinned else self.tidy(slot)
            if tied is not None:
                out.append(tied)
        return out

    def with_table(self, tensor: Tensor, side: Operand, others: Slots) -> Operand:
        """A computed table that meets neurons along one axis lies along it as well."""
        known = self.of(tensor)
        is_table = not (known.slots or known.from_example or known.from_weights)
        if not is_table or not tensor.is_floating_point():
            return side
        missing = len(side.shape) - tensor.dim()
        for dim in range(missing, len(side.shape)):
            met = [dims(slot) for slot in others if dim in dims(slot)]
            if met and set(met) == {frozenset({dim})} and not side.is_even(dim):
                shape = [-1 if d == dim else 1 for d in range(len(side.shape))]
                labels = self._labels(tensor, dim - missing)
                side = replace(side, slots=[*side.slots, labels.view(shape)])
        return side

    def _labels(self, tensor: Tensor, dim: int) -> Tensor:
        for table in self.tables:
            if (
                table.dim == dim
                and table.value.shape == tensor.shape
                and torch.equal(table.value, tensor)
            ):
                return table.labels
        labels = self.classes.new(tensor.shape[dim])
        self.tables.append(Table(tensor.detach().clone(), dim, labels))
        return labels

    def _meet(
        self, together: Slots, of_weight: list[bool], slot: Tensor, is_weight: bool
    ) -> None:
        for at in reversed(range(len(together))):
            other = together[at]
            if not dims(other) & dims(slot):
                continue
            if dims(other) == dims(slot):
                self.classes.join(other, slot)
                return
            pair = of_weight[at] or is_weight
            if not self._is_own_block(other, slot):
                self.meetings.append(Meeting(other, slot, pair))
            if dims(slot) < dims(other):
                return
            if dims(other) < dims(slot):
                del together[at], of_weight[at]
        together.append(slot)
        of_weight.append(is_weight)

    def _is_own_block(self, a: Tensor, b: Tensor) -> bool:
        """Whether one slot labels blocks of the other, as a mean over groups does."""
        small, large = sorted((a, b), key=Tensor.numel)
        if not dims(small) < dims(large):
            return False
        for block in self.blocks:
            if torch.equal(block.labels.reshape(-1), small.reshape(-1)):
                members = self.classes.roots(block.members)
                return torch.equal(members.unique(), self.classes.roots(large).unique())
        return False

    def reduce(self, slots: Slots, axes: Iterable[int]) -> Slots:
        """The slots of values that are summed along these axes, which stay as 1."""
        gone = set(axes)
        out: Slots = []
        for slot in slots:
            along = dims(slot) & gone
            if along and dims(slot) - gone:
                shape = [1 if d in along else n for d, n in enumerate(slot.shape)]
                labels = self.classes.new(int(torch.Size(shape).numel())).view(shape)
                self.blocks.append(Block(labels, slot))
                out.append(labels)
            elif not along:
                out.append(slot)
        return out

    def contract(self, a: Operand, b: Operand, axes: Sequence[int]) -> Slots:
        """The slots of a product that is summed along these axes of the joint space."""
        for operand, other in ((a, b), (b, a)):
            if operand.is_weight and not other.is_weight:
                for slot in operand.raw:
                    is_read = bool(dims(slot) & set(axes))
                    (self.readers if is_read else self.makers).append(slot)
        return self.reduce(self.combine([a, b]), axes)


def window(memory: Tensor, like: Tensor) -> Tensor:
    """The part of some memory that a tensor like this one shows."""
    return memory.as_strided(like.shape, like.stride(), like.storage_offset())
