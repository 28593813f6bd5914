"""The neurons of a model, as one forward pass shows them.

The result is a list of neurons, which are still to be proved
(``proof.py``).
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspu.neurons.calls import (
    all_tensors,
    call,
    flat_tensors,
    outputs_of,
    plain_tensors,
    restored,
    without_shortcuts,
)
from fedspu.neurons.layers import Ports, kind_of
from fedspu.neurons.probe import Probe, forget
from fedspu.neurons.tracing.classes import Classes
from fedspu.neurons.tracing.follow import Follower, Known, Table, dims
from fedspu.neurons.tracing.live import Live
from fedspu.neurons.tracing.rules import VOCABULARY, follow
from fedspu.neurons.tracing.units import Units, collect

OUTPUT = "they reach the model's output"
ORDER = "their order matters to the operation {}"

TABLE = "a table that the model computes (number {})"

BLOCK = "they act only as a whole block"

MOST_PASSES = 8

SINGLE = "they make a single head"
SILENT = (OUTPUT, VOCABULARY, SINGLE)
"""Reasons that lie in what the model is for."""


@dataclass(frozen=True)
class Traced:
    """All neurons met, and the axes along which neurons are read.

    ``finer`` are neurons inside whole units, for units that turn out to be no neurons.
    ``pinned`` are tensors that lie only along places of the input or the output.
    ``unused`` tensors take no part in the pass; ``unheard`` ones do, but the output
    does not depend on them. ``tables`` are values that the model computes of sizes
    alone, and neurons lie along.
    """

    units: list[Units] = field(default_factory=list)
    finer: list[Units] = field(default_factory=list)
    readers: set[tuple[str, int]] = field(default_factory=set)
    pinned: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()
    tables: dict[str, Tensor] = field(default_factory=dict)


def trace(probe: Probe) -> Traced:
    """The model's neurons; none if its forward pass cannot be followed at all."""
    try:
        with restored(probe.model):
            return _Trace(probe).run()
    except Exception:  # the user's own code, under conditions it was not written for
        return Traced()


class _Trace:
    """Passes through a model, until no more neurons are found to be one."""

    def __init__(self, probe: Probe) -> None:
        self.example = probe.whole_example
        self.model = probe.model  # its weights are only read
        self.wide = probe.wide
        self.tensors = {
            name: tensor
            for name, tensor in (
                *all_tensors(self.model),
                *plain_tensors(self.model),
            )
            if tensor.is_floating_point() and tensor.numel() > 1
        }
        stand_ins: dict[nn.Module, Ports] = {}
        for layer in list(self.model.modules()):
            stand_ins.update(kind_of(layer).stand_in(layer))
        self.stand_ins = stand_ins
        self.classes = Classes()
        self.reasons: list[tuple[Tensor, str]] = []
        self.tables: list[Table] = []
        self.first = {
            (id(tensor), dim): int(self.classes.new(size)[0])
            for tensor in self.tensors.values()
            for dim, size in enumerate(tensor.shape)
        }
        self.num_places = len(self.classes)
        self.slots = {
            id(tensor): (tensor, self._slots(tensor))
            for tensor in self.tensors.values()
        }
        for linear, ports in stand_ins.items():
            self._stand_in(linear, ports)

    def _slots(self, tensor: Tensor) -> list[Tensor]:
        """A slot for each axis of a weight."""
        slots = []
        for dim, size in enumerate(tensor.shape):
            shape = [1] * tensor.dim()
            shape[dim] = size
            first = self.first[id(tensor), dim]
            slots.append(torch.arange(first, first + size).view(shape))
        return slots

    def _label(self, place: tuple[Tensor, int, int]) -> Tensor:
        tensor, dim, position = place
        return torch.tensor([self.first[id(tensor), dim] + position])

    def _stand_in(self, linear: Any, ports: Ports) -> None:
        """Give a stand-in's weight the labels of what it stands for."""
        weight = linear.weight
        rows, columns = self.classes.new(len(weight)), self.classes.new(weight.shape[1])
        for labels, places in ((rows, ports.outputs), (columns, ports.inputs)):
            for channel in range(len(labels)):
                for place in places(channel):
                    self.classes.join(labels[channel : channel + 1], self._label(place))
        if len(ports.ties) == 1:
            self.reasons.append((self._label(ports.ties[0][0]), SINGLE))
        for tie in ports.ties:
            for place in tie[1:]:
                self.classes.join(self._label(tie[0]), self._label(place))
        self.slots[id(weight)] = (weight, [rows[:, None], columns[None]])
        if linear.bias is not None:
            self.slots[id(linear.bias)] = (linear.bias, [rows])

    def run(self) -> Traced:
        """All neurons met, in the coarse reading and in the fine one."""
        finer: list[Units] = []
        self.live = self._what_matters()
        for number in range(MOST_PASSES):
            now = self._pass(self.live)
            if number == 0:
                finer, num_reasons = self._units(now), len(self.reasons)
            before = self._num_classes()
            _settle(now, of_weight=False)
            if self._num_classes() == before:
                _settle(now, of_weight=True)
            if self._num_classes() == before:
                break
        is_same = number == 0 and len(self.reasons) == num_reasons
        units = finer if is_same else self._units(now)
        met = {name for unit in units for name, _ in unit.axes}
        reached = {
            name for name, tensor in self.tensors.items() if id(tensor) in now.used
        }
        pinned = tuple(n for n in self.tensors if n in reached - met)
        tables = {TABLE.format(i): table.value for i, table in enumerate(self.tables)}
        readers = self._readers(now)
        unused = [name for name in self.tensors if name not in reached]
        unheard: tuple[str, ...] = ()
        if unused and (wider := self._units_with_unheard(reached)):
            units, unheard = wider
        unused = [name for name in unused if name not in unheard]
        return Traced(units, finer, readers, pinned, tuple(unused), unheard, tables)

    def _units_with_unheard(
        self, reached: set[str]
    ) -> tuple[list[Units], tuple[str, ...]] | None:
        """The units with their places in tensors that the output does not depend on.

        And the names of these tensors. None if there are none, or if what is done with
        them ties neurons together that are apart without it.
        """
        places = self._places_of(reached)
        before = len(self.classes.roots(places).unique())
        parents, reasons, tables = self.classes.copy(), self.reasons, self.tables
        self.reasons, self.tables = list(reasons), list(tables)
        now = self._pass(live=None)
        unheard = tuple(
            name
            for name, tensor in self.tensors.items()
            if id(tensor) in now.used and name not in reached
        )
        is_same = len(self.classes.roots(places).unique()) == before
        self.reasons, self.tables = reasons, tables
        units = self._units(now)
        self.classes = parents
        if not unheard or not is_same:
            return None
        heard = [u for u in units if any(name in reached for name, _ in u.axes)]
        return heard, unheard

    def _places_of(self, names: set[str]) -> Tensor:
        """The labels of all places in these tensors."""
        return torch.cat(
            [
                slot.reshape(-1)
                for name in names
                for slot in self._slots(self.tensors[name])
            ]
            or [torch.arange(0)]
        )

    def _num_classes(self) -> int:
        return len(self.classes.roots(torch.arange(self.num_places)).unique())

    def _what_matters(self) -> Live:
        forget(self.model)
        live = Live()
        with torch.no_grad(), without_shortcuts(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with self.wide(), live:
                torch.manual_seed(0)
                out = call(self.model, self.example)
        live.end(outputs_of(out))
        return live

    def _pass(self, live: Live | None) -> Follower:
        forget(self.model)
        now = Follower(self.classes, follow, live, self.reasons, self.tables)
        for tensor, slots in self.slots.values():
            wide = [slot for slot in slots if slot.numel() > 1]
            now.set(tensor, Known(now.tidied(slots), from_weights=True, raw=wide))
        for tensor in flat_tensors(self.example):
            now.set(tensor, Known(from_example=True))
        with torch.no_grad(), without_shortcuts(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            with self.wide(), now:
                out = call(self.model, self.example)
            for tensor in outputs_of(out):
                now.operation = OUTPUT
                now.tie_all(tensor)
        return now

    def _units(self, now: Follower) -> list[Units]:
        roots = self.classes.roots(torch.arange(self.num_places)).numpy()
        reasons: dict[int, str] = {}
        for label, operation in self.reasons:
            root = int(self.classes.roots(label)[0])
            if operation in SILENT:
                reasons[root] = operation
            elif operation == BLOCK:
                reasons.setdefault(root, BLOCK)
            else:
                reasons.setdefault(root, ORDER.format(operation))
        classes = {
            (name, dim): roots[first : first + size]
            for name, tensor in self.tensors.items()
            for dim, size in enumerate(tensor.shape)
            if size > 1 and (first := self.first[id(tensor), dim]) >= 0
        }
        for number, table in enumerate(self.tables):
            axis = (TABLE.format(number), table.dim)
            classes[axis] = self.classes.roots(table.labels).numpy()
        return collect(classes, _classes_of(self.classes, now.makers), reasons)

    def _readers(self, now: Follower) -> set[tuple[str, int]]:
        """The axes of weights along which neurons are read."""
        slots = [slot.reshape(-1) for slot in now.readers]
        read = set(torch.cat(slots).tolist()) if slots else set()
        found = {
            (name, dim)
            for name, tensor in self.tensors.items()
            for dim in range(tensor.dim())
            if self.first[id(tensor), dim] in read
        }
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        for linear, ports in self.stand_ins.items():
            weight: Any = linear.weight
            for channel in range(weight.shape[1]):
                found.update((names[id(t)], d) for t, d, _ in ports.inputs(channel))
        return found


def _classes_of(classes: Classes, slots: list[Tensor]) -> np.ndarray:
    labels = [slot.reshape(-1) for slot in slots]
    found: np.ndarray = classes.roots(torch.cat([*labels, torch.arange(0)])).numpy()
    return np.unique(found)


def _settle(now: Follower, of_weight: bool) -> None:
    """Make whole units where neurons met blocks of other neurons."""
    classes = now.classes
    for meeting in now.meetings:
        if meeting.of_weight != of_weight:
            continue
        a, b = now.tidy(meeting.a), now.tidy(meeting.b)
        if a is None or b is None:
            continue
        common = dims(a) & dims(b)
        if not common:
            continue
        now.operation = BLOCK
        a, b = now.tie(a, dims(a) - common), now.tie(b, dims(b) - common)
        if a is not None and b is not None:
            classes.join(a, b)
    is_shared = classes.num_members() > 1
    for block in now.blocks:
        if bool(is_shared[block.labels].any()):
            classes.join(block.labels, block.members)
