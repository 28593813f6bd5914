"""Follow every channel of a model through Torch-Pruning's dependency graph.

The graph says which channels of which layers belong together; ``layers/`` says where
they lie in the layers' tensors. The result is a list of units, one per neuron, which
are still to be proved (``proof.py``).
"""

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch_pruning
from torch import Tensor, nn
from torch_pruning._helpers import _HybridIndex
from torch_pruning.ops import OPTYPE

from fedspu.errors import ModelError
from fedspu.neurons.calls import all_tensors, call, flat_tensors
from fedspu.neurons.layers import Ports, kind_of
from fedspu.neurons.probe import Probe

Places = dict[tuple[str, int], list[int]]
"""(tensor, axis) -> sorted positions there."""

Key = tuple[str, int, int]
"""A position along an axis of a tensor, by name."""

OUTPUT = "they reach the model's output"
COMPUTED = "some of their weights are computed from other tensors"


@dataclass(frozen=True)
class Unit:
    """One neuron: where it lies and, if it must always be active, why."""

    places: Places
    reason: str = ""


@dataclass(frozen=True)
class Traced:
    """All neurons met, and the axes along which neurons are read."""

    units: list[Unit]
    readers: set[tuple[str, int]]


class _Links:
    """Union-find: which places and channels belong to one neuron."""

    def __init__(self) -> None:
        self.parent: dict[Any, Any] = {}

    def find(self, item: Any) -> Any:
        """The representative of an item's set."""
        root = item
        while (above := self.parent.setdefault(root, root)) != root:
            root = above
        while self.parent[item] != root:
            self.parent[item], item = root, self.parent[item]
        return root

    def join(self, a: Any, b: Any) -> None:
        """Put two items into one set."""
        self.parent[self.find(a)] = self.find(b)


def trace(probe: Probe) -> Traced:
    """The model's neurons, as its dependency graph shows them.

    There are none if the model cannot be traced.
    """
    for with_buffers in (True, False):  # some buffers cannot have a gradient
        try:
            return _trace_once(probe, with_buffers)
        except _TROUBLE:
            continue
    return Traced([], set())


# Errors that the tracer is known to raise on models it cannot follow.
_TROUBLE = (
    ModelError,
    RuntimeError,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    ZeroDivisionError,
)


def _trace_once(probe: Probe, with_buffers: bool) -> Traced:
    model = copy.deepcopy(probe.model)
    names = {id(tensor): name for name, tensor in all_tensors(model)}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    lifted = _constants(model) if with_buffers else []
    for buffer in lifted:
        buffer.requires_grad_()
    known: dict[nn.Module, Ports] = {}
    opaque = []
    for layer in list(model.modules()):
        if inside := kind_of(layer).stand_in(layer):
            known.update(inside)
            opaque.append(layer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch_pruning.DependencyGraph().build_dependency(
            model,
            example_inputs=probe.example,
            # A fresh operation on each output makes it a node of its own.
            forward_fn=lambda m, x: [
                out * 1 for out in flat_tensors(call(m, x)) if out.requires_grad
            ],
            unwrapped_parameters=[
                (buffer, _last_wide_dim(buffer)) for buffer in lifted
            ],
            ignored_layers=opaque,
            verbose=False,
        )
    widest = max((n for _, t in all_tensors(model) for n in t.shape), default=0)
    return _Walk(graph, known, names, widest).walk()


def _constants(model: nn.Module) -> list[Tensor]:
    """Buffers that are read like parameters: a positional encoding, a scale."""
    norms = {id(b) for m in model.modules() if kind_of(m).is_norm for b in m.buffers()}
    return [
        buffer
        for buffer in model.buffers()
        if buffer.is_floating_point() and buffer.numel() > 1 and id(buffer) not in norms
    ]


def _last_wide_dim(tensor: Tensor) -> int:
    return max(dim for dim, n in enumerate(tensor.shape) if n > 1)


class _Walk:
    """Follows every channel through the dependency graph, joining what it meets."""

    def __init__(
        self,
        graph: Any,
        known: dict[nn.Module, Ports],
        names: dict[int, str],
        widest: int,
    ) -> None:
        self.graph, self.known, self.names = graph, known, names
        # No tensor has more channels than this. Torch-Pruning mistakes some
        # concatenations for ones along channels; in a loop these count up forever.
        self.widest = widest
        self.links = _Links()
        self.places: set[Key] = set()
        self.readers: set[tuple[str, int]] = set()
        self.reasons: list[tuple[str, Any]] = []

    def walk(self) -> Traced:
        """All neurons met on the walk, each with its positions."""
        todo = []
        for module, node in self.graph.module2node.items():
            port = self._ports(module)
            if port is None:
                continue
            makes = self.graph.get_pruner_of_module(module).prune_out_channels
            todo.append((node, makes, list(range(port.num_outputs))))
            for tie in port.ties:
                keys = [self._key(place) for place in tie]
                for key in keys[1:]:
                    self.links.join(keys[0], key)
        seen: set[Any] = set()
        while todo:
            node, side, channels = todo.pop()
            channels = [
                c for c in channels if c < self.widest and (node, side, c) not in seen
            ]
            seen.update((node, side, c) for c in channels)
            if channels:
                self._visit(node, side, channels)
                todo.extend(self._neighbours(node, side, channels))
        return self._collect()

    def _ports(self, module: Any) -> Ports | None:
        return self.known.get(module) or kind_of(module).ports(module)

    def _key(self, place: tuple[Tensor, int, int]) -> Key:
        tensor, dim, position = place
        return (self.names.get(id(tensor), ""), dim, position)

    def _visit(self, node: Any, side: Any, channels: list[int]) -> None:
        """Join each channel at this side of a node with its places in tensors."""
        if node.type == OPTYPE.OUTPUT:
            self.reasons.extend((OUTPUT, (node, side, c)) for c in channels)
        module = node.module
        for channel in channels:
            if isinstance(module, Tensor):
                places = [(module, node.pruning_dim, channel)]
            else:
                places = self._layer_places(module, side, channel)
            for key in map(self._key, places):
                if key[0]:
                    self.places.add(key)
                    self.links.join(key, (node, side, channel))
                else:
                    self.reasons.append((COMPUTED, (node, side, channel)))

    def _layer_places(
        self, module: nn.Module, side: Any, channel: int
    ) -> list[tuple[Tensor, int, int]]:
        port = self._ports(module)
        if port is None:
            return []
        pruner = self.graph.get_pruner_of_module(module)
        places: list[tuple[Tensor, int, int]] = []
        if side == pruner.prune_out_channels:
            places += port.outputs(channel)
        if side == pruner.prune_in_channels:
            read = port.inputs(channel)
            places += read
            if side != pruner.prune_out_channels:
                self.readers.update(self._key(place)[:2] for place in read)
        return places

    def _neighbours(
        self, node: Any, side: Any, channels: list[int]
    ) -> Iterator[tuple[Any, Any, list[int]]]:
        for step in node.dependencies:
            if not step.is_triggered_by(side):
                continue
            pairs = [_HybridIndex(idx=c, root_idx=c) for c in channels]
            for mapping in step.index_mapping:
                pairs = mapping(pairs) if mapping is not None else pairs
            for there, here in pairs:
                self.links.join((node, side, here), (step.target, step.handler, there))
            yield step.target, step.handler, [there for there, _ in pairs]

    def _collect(self) -> Traced:
        found: dict[Any, Places] = defaultdict(lambda: defaultdict(list))
        for name, dim, position in sorted(self.places):
            places = found[self.links.find((name, dim, position))]
            places[name, dim].append(position)
        reasons = {self.links.find(item): reason for reason, item in self.reasons}
        units = [Unit(dict(p), reasons.get(root, "")) for root, p in found.items()]
        return Traced(units, self.readers)
