"""Read a model's graph as stages that the compiled code can run.

Whatever comes in another order than in a stage begins a new one, so any order works.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

from fedspu.partial.chain.find import is_in_place
from fedspu.partial.chain.native.operations import (
    ACTIVATIONS,
    AVERAGE_POOL,
    FUNCTIONS,
    MAX_POOL,
    METHODS,
    is_batch_size,
    pair,
)
from fedspu.partial.chain.native.stages import (
    ACT,
    ADD,
    DROPOUT,
    INPUT,
    MOST_TAPS,
    NONE,
    NORM,
    POOL,
    NotAChainError,
    Shape,
    Stage,
    Value,
    padding_of,
)


def read_stages(traced: torch.fx.GraphModule, shape: tuple[int, ...]) -> list[Stage]:
    """The model's stages, for examples of this shape, or a NotAChainError."""
    return Reader(traced, shape).stages


class Reader:
    """Reads a graph node by node, and puts each into a stage."""

    def __init__(self, traced: torch.fx.GraphModule, shape: tuple[int, ...]) -> None:
        if len(shape) not in (1, 3):
            raise NotAChainError(f"examples of shape {shape}")
        self.traced = traced
        channels, height, width = shape if len(shape) == 3 else (*shape, 1, 1)
        self.shape: Shape = (channels, height, width)
        self.stages: list[Stage] = []
        self.values: dict[torch.fx.Node, Value] = {}
        nodes = list(traced.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            raise NotAChainError(f"{len(inputs)} inputs")
        self.values[inputs[0]] = Value(INPUT, len(shape) == 1)
        for node in nodes:
            if node.op == "output":
                self._end(node.args[0])
            elif node.op != "placeholder" and not is_batch_size(node):
                self.values[node] = self._read(node)
        self._check_stages()

    def _check_stages(self) -> None:
        """Refuse what stages can say, but the compiled code cannot run."""
        layers = [part for s in self.stages for part in (s.layer, s.norm) if part]
        if len(set(map(id, layers))) < len(layers):
            raise NotAChainError("a layer that is used twice")
        read = {i for stage in self.stages for i in (stage.source, stage.adds)}
        if not read.issuperset(range(len(self.stages) - 1)):
            raise NotAChainError("a layer whose output is not used")
        for source in read - {NONE}:
            readers = [s.layer for s in self.stages if s.source == source]
            pads = [padding_of(r) for r in readers if isinstance(r, nn.Conv2d)]
            has_linear = any(isinstance(layer, nn.Linear) for layer in readers)
            if has_linear and any(pad != (0, 0) for pad in pads):
                raise NotAChainError(
                    "a linear layer and a padded convolution that read the same"
                )

    def _end(self, node: Any) -> None:
        value = self.values.get(node) if isinstance(node, torch.fx.Node) else None
        if value is None:
            raise NotAChainError("an output that is not one tensor")
        if value.stage == INPUT or value.stage != len(self.stages) - 1:
            self._begin(value)
        last = self.stages[-1].output
        if value.is_flat and last[1:] != (1, 1):
            raise NotAChainError("an output that is flattened maps")
        self.stages[-1] = replace(self.stages[-1], gives_maps=not value.is_flat)

    # One node -------------------------------------------------------------------------

    def _read(self, node: torch.fx.Node) -> Value:
        if is_in_place(self.traced, node):
            first = self._shown(node.args[0])
            if first.op == "placeholder" or self._num_readers(first) > 1:
                raise NotAChainError(
                    f"{node.name}, which changes a value that other layers also read"
                )
        if node.op == "call_module":
            layer = self.traced.get_submodule(str(node.target))
            if len(node.args) != 1 or node.kwargs:
                raise NotAChainError(f"{node.name}, called with more than its input")
            value = self.value(node.args[0])
            return self._layer(layer, value, self.is_last_use(node.args[0]), node.name)
        if node.op == "get_attr":
            raise NotAChainError(f"the tensor {node.target}")
        read = (METHODS if node.op == "call_method" else FUNCTIONS).get(node.target)
        if read is None:
            name = getattr(node.target, "__name__", node.target)
            raise NotAChainError(f"the operation {name}")
        return read(self, node)

    def value(self, node: Any) -> Value:
        """What a node gives."""
        if not isinstance(node, torch.fx.Node) or node not in self.values:
            raise NotAChainError(f"{node} as the input of an operation")
        return self.values[node]

    def is_last_use(self, node: Any) -> bool:
        """Whether nothing else reads these values, so that their stage may go on."""
        return self._num_readers(self._shown(node)) == 1

    def _shown(self, node: Any) -> torch.fx.Node:
        """The node whose values this one shows, perhaps in another shape."""
        self.value(node)  # refuses what is no value
        while self._shows_its_input(node):
            node = node.args[0]
        found: torch.fx.Node = node
        return found

    def _num_readers(self, node: torch.fx.Node) -> int:
        """How many operations read a node's values, under whatever name."""
        return sum(
            self._num_readers(user) if self._shows_its_input(user) else 1
            for user in node.users
            if not is_batch_size(user)
        )

    def _shows_its_input(self, node: torch.fx.Node) -> bool:
        """Whether a node may show the same values as its input; dropout may, too."""
        if node.op == "call_module":
            layer = self.traced.get_submodule(str(node.target))
            return isinstance(layer, nn.Identity | nn.Flatten | nn.Dropout)
        return node.target in ("flatten", "view", "reshape") or node.target in (
            *(torch.flatten, torch.reshape, F.dropout),
        )

    def shape_of(self, value: Value) -> Shape:
        """Channels, height and width of a value."""
        return self.shape if value.stage == INPUT else self.stages[value.stage].output

    # Stages ---------------------------------------------------------------------------

    def _begin(self, value: Value, **given: Any) -> int:
        shape = self.shape_of(value)
        self.stages.append(
            Stage(**{"source": value.stage, "input": shape, "middle": shape, **given})
        )
        return len(self.stages) - 1

    def follow(
        self, value: Value, is_last_use: bool, place: int, **given: Any
    ) -> Value:
        """The value after what follows a layer; in its own stage, if that fits."""
        index = value.stage
        fits = index != INPUT and self.stages[index].reached < place and is_last_use
        if fits and place == POOL and given["pool"] == "max":
            fits = self.stages[index].adds == NONE
        if not fits:
            index = self._begin(value)
        self.stages[index] = replace(self.stages[index], reached=place, **given)
        return Value(index, value.is_flat)

    def _layer(
        self, layer: nn.Module, value: Value, is_last_use: bool, name: str
    ) -> Value:
        kind = type(layer)
        if kind is nn.Identity:
            return value
        if isinstance(layer, nn.Flatten) and _ends(layer) == (1, -1):
            return Value(value.stage, True)
        if isinstance(layer, nn.Conv2d) and kind is nn.Conv2d:
            return self._convolution(layer, value)
        if isinstance(layer, nn.Linear) and kind is nn.Linear:
            channels, height, width = self.shape_of(value)
            if not value.is_flat or layer.in_features != channels * height * width:
                raise NotAChainError(f"{name}, a linear layer on maps")
            _check_shape(layer.weight, (layer.out_features, layer.in_features))
            middle = (layer.out_features, 1, 1)
            return Value(self._begin(value, layer=layer, middle=middle), True)
        if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm):
            self._check_norm(layer, value, name)
            return self.follow(value, is_last_use, NORM, norm=layer)
        found = ACTIVATIONS.get(kind)
        if found is not None:
            return self.follow(value, is_last_use, ACT, **found(layer))
        if isinstance(layer, nn.Dropout):
            p = layer.p if layer.training else 0.0
            return self.dropout(value, is_last_use, p)
        if kind is nn.MaxPool2d:
            given = {k: getattr(layer, k) for k in MAX_POOL}
            return self.pool(value, is_last_use, "max", **given)
        if kind is nn.AvgPool2d:
            given = {k: getattr(layer, k) for k in AVERAGE_POOL}
            return self.pool(value, is_last_use, "average", **given)
        if kind is nn.AdaptiveAvgPool2d:
            return self.global_average(value, is_last_use, layer.output_size)
        raise NotAChainError(f"{name}, a {kind.__name__}")

    def _convolution(self, layer: nn.Conv2d, value: Value) -> Value:
        if layer.groups != 1 or layer.padding_mode != "zeros" or value.is_flat:
            raise NotAChainError("a convolution with groups or other padding")
        channels, height, width = self.shape_of(value)
        if channels * math.prod(layer.kernel_size) > MOST_TAPS:
            raise NotAChainError(
                f"a convolution with {channels} input channels: PyTorch is faster there"
            )
        if channels != layer.in_channels:
            raise NotAChainError(f"{channels} channels for {layer.in_channels}")
        _check_shape(layer.weight, (layer.out_channels, channels, *layer.kernel_size))
        size = tuple(
            (side + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for side, pad, dilation, kernel, stride in zip(
                (height, width),
                padding_of(layer),
                layer.dilation,
                layer.kernel_size,
                layer.stride,
                strict=True,
            )
        )
        if min(size) < 1:
            raise NotAChainError("an image smaller than the kernel")
        middle = (layer.out_channels, size[0], size[1])
        return Value(self._begin(value, layer=layer, middle=middle), False)

    def _check_norm(self, norm: Any, value: Value, name: str) -> None:
        channels, *size = self.shape_of(value)
        if isinstance(norm, nn.GroupNorm):
            is_usual = norm.num_channels == channels
        else:
            is_usual = norm.num_features == channels and norm.momentum is not None
        is_1d = isinstance(norm, nn.BatchNorm1d)
        if is_1d != (value.is_flat and not isinstance(norm, nn.GroupNorm)):
            is_usual = False
        if value.is_flat and size != [1, 1]:
            is_usual = False
        if norm.weight is not None:
            is_usual &= tuple(norm.weight.shape) == (channels,)
        if not is_usual:
            raise NotAChainError(f"{name}, a norm of another kind")

    # What functions share with layers -------------------------------------------------

    def dropout(self, value: Value, is_last_use: bool, p: float) -> Value:
        """The value after dropout."""
        if p == 0:
            return value
        if p >= 1:
            raise NotAChainError("a dropout of everything")
        return self.follow(value, is_last_use, DROPOUT, dropout=p)

    def pool(
        self,
        value: Value,
        is_last_use: bool,
        kind: str,
        kernel_size: Any = None,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
        divisor_override: Any = None,
        count_include_pad: bool = True,
    ) -> Value:
        """The value after a pool; its arguments are those of PyTorch."""
        window, step = pair(kernel_size), pair(stride or kernel_size)
        _, height, width = self.shape_of(value)
        is_usual = window == step and pair(padding) == (0, 0)
        is_usual &= pair(dilation) == (1, 1) and not ceil_mode
        is_usual &= not return_indices and divisor_override is None
        is_usual &= not value.is_flat and window[0] <= height and window[1] <= width
        if not is_usual:
            raise NotAChainError("a pool with overlapping or padded windows")
        return self.follow(value, is_last_use, POOL, pool=kind, window=window)

    def global_average(self, value: Value, is_last_use: bool, size: Any) -> Value:
        """The value after an average over whole maps."""
        if pair(size) != (1, 1) or value.is_flat:
            raise NotAChainError("an adaptive pool to more than one pixel")
        _, height, width = self.shape_of(value)
        return self.pool(value, is_last_use, "average", (height, width))

    def add(self, one: Value, other: Value, is_last_use: bool) -> Value:
        """The sum of two values."""
        if self.shape_of(one) != self.shape_of(other) or one.is_flat != other.is_flat:
            raise NotAChainError("a sum of different shapes")
        first, last = sorted((one, other), key=lambda value: value.stage)
        if first.stage == INPUT:  # a stage that only copies it
            self._begin(first)
            first, last = last, Value(len(self.stages) - 1, first.is_flat)
            if first.stage == INPUT:
                raise NotAChainError("a sum of the input and itself")
        if first.stage == last.stage:
            raise NotAChainError("a sum of a value and itself")
        return self.follow(last, is_last_use, ADD, adds=first.stage)


def _check_shape(weight: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(weight.shape) != shape:
        raise NotAChainError(f"a weight of shape {tuple(weight.shape)} for {shape}")


def _ends(layer: nn.Flatten) -> tuple[int, int]:
    return layer.start_dim, layer.end_dim
