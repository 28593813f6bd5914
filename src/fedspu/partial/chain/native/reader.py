"""Read a model's graph as stages that the compiled code can run.

Whatever comes in another order than in a stage begins a new one, so any order works.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

from fedspu.partial.chain.find import is_in_place
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
    padding_of,
)


@dataclass(frozen=True)
class _Value:
    """What a node of the graph gives: a stage's output, as maps or as features."""

    stage: int
    is_flat: bool


def read_stages(traced: torch.fx.GraphModule, shape: tuple[int, ...]) -> list[Stage]:
    """The model's stages, for examples of this shape, or a NotAChainError."""
    return _Reader(traced, shape).stages


class _Reader:
    def __init__(self, traced: torch.fx.GraphModule, shape: tuple[int, ...]) -> None:
        if len(shape) not in (1, 3):
            raise NotAChainError(f"examples of shape {shape}")
        self.traced = traced
        channels, height, width = shape if len(shape) == 3 else (*shape, 1, 1)
        self.shape: Shape = (channels, height, width)
        self.stages: list[Stage] = []
        self.values: dict[torch.fx.Node, _Value] = {}
        nodes = list(traced.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            raise NotAChainError(f"{len(inputs)} inputs")
        self.values[inputs[0]] = _Value(INPUT, len(shape) == 1)
        for node in nodes:
            if node.op == "output":
                self._end(node.args[0])
            elif node.op != "placeholder" and not _is_batch_size(node):
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

    def _read(self, node: torch.fx.Node) -> _Value:
        if is_in_place(self.traced, node):
            first = self._shown(node.args[0])
            if first.op == "placeholder" or self._num_readers(first) > 1:
                raise NotAChainError(f"{node.name}, in place on what others read too")
        if node.op == "call_module":
            layer = self.traced.get_submodule(str(node.target))
            if len(node.args) != 1 or node.kwargs:
                raise NotAChainError(f"{node.name}, called with more than its input")
            value = self._value(node.args[0])
            return self._layer(layer, value, self._is_last_use(node.args[0]), node.name)
        if node.op == "get_attr":
            raise NotAChainError(f"the tensor {node.target}")
        read = (_METHODS if node.op == "call_method" else _FUNCTIONS).get(node.target)
        if read is None:
            name = getattr(node.target, "__name__", node.target)
            raise NotAChainError(f"the operation {name}")
        return read(self, node)

    def _value(self, node: Any) -> _Value:
        if not isinstance(node, torch.fx.Node) or node not in self.values:
            raise NotAChainError(f"{node} as the input of an operation")
        return self.values[node]

    def _is_last_use(self, node: Any) -> bool:
        """Whether nothing else reads these values, so that their stage may go on."""
        return self._num_readers(self._shown(node)) == 1

    def _shown(self, node: Any) -> torch.fx.Node:
        """The node whose values this one shows, perhaps in another shape."""
        self._value(node)  # refuses what is no value
        while self._shows_its_input(node):
            node = node.args[0]
        found: torch.fx.Node = node
        return found

    def _num_readers(self, node: torch.fx.Node) -> int:
        """How many operations read a node's values, under whatever name."""
        return sum(
            self._num_readers(user) if self._shows_its_input(user) else 1
            for user in node.users
            if not _is_batch_size(user)
        )

    def _shows_its_input(self, node: torch.fx.Node) -> bool:
        """Whether a node may show the same values as its input; dropout may, too."""
        if node.op == "call_module":
            layer = self.traced.get_submodule(str(node.target))
            return isinstance(layer, nn.Identity | nn.Flatten | nn.Dropout)
        return node.target in ("flatten", "view", "reshape") or node.target in (
            *(torch.flatten, torch.reshape, F.dropout),
        )

    def shape_of(self, value: _Value) -> Shape:
        return self.shape if value.stage == INPUT else self.stages[value.stage].output

    # Stages ---------------------------------------------------------------------------

    def _begin(self, value: _Value, **given: Any) -> int:
        shape = self.shape_of(value)
        self.stages.append(
            Stage(**{"source": value.stage, "input": shape, "middle": shape, **given})
        )
        return len(self.stages) - 1

    def follow(
        self, value: _Value, is_last_use: bool, place: int, **given: Any
    ) -> _Value:
        """The value after what follows a layer; in its own stage, if that fits."""
        index = value.stage
        fits = index != INPUT and self.stages[index].reached < place and is_last_use
        if fits and place == POOL and given["pool"] == "max":
            fits = self.stages[index].adds == NONE
        if not fits:
            index = self._begin(value)
        self.stages[index] = replace(self.stages[index], reached=place, **given)
        return _Value(index, value.is_flat)

    def _layer(
        self, layer: nn.Module, value: _Value, is_last_use: bool, name: str
    ) -> _Value:
        kind = type(layer)
        if kind is nn.Identity:
            return value
        if isinstance(layer, nn.Flatten) and _ends(layer) == (1, -1):
            return _Value(value.stage, True)
        if isinstance(layer, nn.Conv2d) and kind is nn.Conv2d:
            return self._convolution(layer, value)
        if isinstance(layer, nn.Linear) and kind is nn.Linear:
            channels, height, width = self.shape_of(value)
            if not value.is_flat or layer.in_features != channels * height * width:
                raise NotAChainError(f"{name}, a linear layer on maps")
            _check_shape(layer.weight, (layer.out_features, layer.in_features))
            middle = (layer.out_features, 1, 1)
            return _Value(self._begin(value, layer=layer, middle=middle), True)
        if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm):
            self._check_norm(layer, value, name)
            return self.follow(value, is_last_use, NORM, norm=layer)
        found = _ACTIVATIONS.get(kind)
        if found is not None:
            return self.follow(value, is_last_use, ACT, **found(layer))
        if isinstance(layer, nn.Dropout):
            p = layer.p if layer.training else 0.0
            return self.dropout(value, is_last_use, p)
        if kind is nn.MaxPool2d:
            given = {k: getattr(layer, k) for k in _MAX_POOL}
            return self.pool(value, is_last_use, "max", **given)
        if kind is nn.AvgPool2d:
            given = {k: getattr(layer, k) for k in _AVERAGE_POOL}
            return self.pool(value, is_last_use, "average", **given)
        if kind is nn.AdaptiveAvgPool2d:
            return self.global_average(value, is_last_use, layer.output_size)
        raise NotAChainError(f"{name}, a {kind.__name__}")

    def _convolution(self, layer: nn.Conv2d, value: _Value) -> _Value:
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
        return _Value(self._begin(value, layer=layer, middle=middle), False)

    def _check_norm(self, norm: Any, value: _Value, name: str) -> None:
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

    def dropout(self, value: _Value, is_last_use: bool, p: float) -> _Value:
        if p == 0:
            return value
        if p >= 1:
            raise NotAChainError("a dropout of everything")
        return self.follow(value, is_last_use, DROPOUT, dropout=p)

    def pool(
        self,
        value: _Value,
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
    ) -> _Value:
        window, step = _pair(kernel_size), _pair(stride or kernel_size)
        _, height, width = self.shape_of(value)
        is_usual = window == step and _pair(padding) == (0, 0)
        is_usual &= _pair(dilation) == (1, 1) and not ceil_mode
        is_usual &= not return_indices and divisor_override is None
        is_usual &= not value.is_flat and window[0] <= height and window[1] <= width
        if not is_usual:
            raise NotAChainError("a pool with overlapping or padded windows")
        return self.follow(value, is_last_use, POOL, pool=kind, window=window)

    def global_average(self, value: _Value, is_last_use: bool, size: Any) -> _Value:
        if _pair(size) != (1, 1) or value.is_flat:
            raise NotAChainError("an adaptive pool to more than one pixel")
        _, height, width = self.shape_of(value)
        return self.pool(value, is_last_use, "average", (height, width))

    def add(self, one: _Value, other: _Value, is_last_use: bool) -> _Value:
        if self.shape_of(one) != self.shape_of(other) or one.is_flat != other.is_flat:
            raise NotAChainError("a sum of different shapes")
        first, last = sorted((one, other), key=lambda value: value.stage)
        if first.stage == INPUT:  # a stage that only copies it
            self._begin(first)
            first, last = last, _Value(len(self.stages) - 1, first.is_flat)
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


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    if isinstance(value, list | tuple) and len(value) == 2:
        return value[0], value[1]
    raise NotAChainError(f"a size of {value!r}")


def _is_batch_size(node: torch.fx.Node) -> bool:
    """Whether a node is ``x.size(0)``, or ``x.shape[0]`` on the way to it."""
    if node.op == "call_method" and node.target == "size":
        return node.args[1:] == (0,)
    if node.op == "call_function" and node.target is getattr:
        return node.args[1:] == ("shape",) and all(map(_is_batch_size, node.users))
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        is_shape = isinstance(source, torch.fx.Node) and source.target is getattr
        return is_shape and node.args[1:] == (0,)
    return False


# Activations --------------------------------------------------------------------------

_ACTIVATIONS: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    nn.ReLU: lambda layer: {"act": "relu"},
    nn.Tanh: lambda layer: {"act": "tanh"},
    nn.LeakyReLU: lambda layer: {"act": "leaky", "slope": layer.negative_slope},
    nn.GELU: lambda layer: {"act": _gelu(layer.approximate)},
}
_MAX_POOL = (
    *("kernel_size", "stride", "padding", "dilation"),
    *("ceil_mode", "return_indices"),
)
_AVERAGE_POOL = ("kernel_size", "stride", "padding", "ceil_mode", "divisor_override")


def _gelu(approximate: str) -> str:
    return "gelu" if approximate == "none" else "gelu_tanh"


# Functions ----------------------------------------------------------------------------

_Read = Callable[[_Reader, torch.fx.Node], _Value]


def _bound(node: torch.fx.Node, *names: str) -> dict[str, Any]:
    """The arguments of a call by name; ``inplace`` makes no difference."""
    if len(node.args) > len(names) or any(name not in names for name in node.kwargs):
        raise NotAChainError(f"{node.name}, called in another way")
    found = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    found.pop("inplace", None)
    return found


def _activation(*names: str, make: Callable[..., dict[str, Any]]) -> _Read:
    def read(reader: _Reader, node: torch.fx.Node) -> _Value:
        found = _bound(node, "input", *names)
        source = found.pop("input")
        value, is_last = reader._value(source), reader._is_last_use(source)
        return reader.follow(value, is_last, ACT, **make(**found))

    return read


def _pooled(kind: str, *names: str) -> _Read:
    def read(reader: _Reader, node: torch.fx.Node) -> _Value:
        found = _bound(node, "input", *names)
        source = found.pop("input")
        value, is_last = reader._value(source), reader._is_last_use(source)
        return reader.pool(value, is_last, kind, **found)

    return read


def _adaptive(reader: _Reader, node: torch.fx.Node) -> _Value:
    found = _bound(node, "input", "output_size")
    value, is_last = reader._value(found["input"]), reader._is_last_use(found["input"])
    return reader.global_average(value, is_last, found["output_size"])


def _mean(reader: _Reader, node: torch.fx.Node) -> _Value:
    found = _bound(node, "input", "dim", "keepdim")
    dims = found.get("dim")
    if not isinstance(dims, list | tuple) or tuple(dims) not in ((2, 3), (-2, -1)):
        raise NotAChainError("a mean over other axes than height and width")
    value, is_last = reader._value(found["input"]), reader._is_last_use(found["input"])
    value = reader.global_average(value, is_last, 1)
    return _Value(value.stage, not found.get("keepdim", False))


def _dropped(reader: _Reader, node: torch.fx.Node) -> _Value:
    found = _bound(node, "input", "p", "training", "inplace")
    p = found.get("p", 0.5) if found.get("training", True) else 0.0
    value, is_last = reader._value(found["input"]), reader._is_last_use(found["input"])
    return reader.dropout(value, is_last, p)


def _flattened(reader: _Reader, node: torch.fx.Node) -> _Value:
    found = _bound(node, "input", "start_dim", "end_dim")
    if (found.get("start_dim", 0), found.get("end_dim", -1)) != (1, -1):
        raise NotAChainError("a flatten of other axes")
    return _Value(reader._value(found["input"]).stage, True)


def _viewed(reader: _Reader, node: torch.fx.Node) -> _Value:
    """``x.view(len(x), -1)``, with the numbers written in any of the usual ways."""
    source, *size = node.args
    if len(size) == 1 and isinstance(size[0], list | tuple):
        size = list(size[0])
    value = reader._value(source)
    features = math.prod(reader.shape_of(value))
    is_batch = len(size) == 2 and (
        (isinstance(size[0], torch.fx.Node) and _is_batch_size(size[0]))
        or size == [-1, features]
    )
    if not is_batch or size[1] not in (-1, features) or node.kwargs:
        raise NotAChainError("a view of another shape")
    return _Value(value.stage, True)


def _added(reader: _Reader, node: torch.fx.Node) -> _Value:
    found = _bound(node, "input", "other")
    one, other = found["input"], found["other"]
    later = max(one, other, key=lambda node: reader._value(node).stage)
    return reader.add(
        reader._value(one), reader._value(other), reader._is_last_use(later)
    )


_relu = _activation("inplace", make=lambda: {"act": "relu"})
_tanh = _activation(make=lambda: {"act": "tanh"})
_max_pool = _pooled("max", *_MAX_POOL)

_FUNCTIONS: dict[Any, _Read] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_), _relu),
    **dict.fromkeys((F.tanh, torch.tanh, torch.tanh_), _tanh),
    F.gelu: _activation(
        "approximate", make=lambda approximate="none": {"act": _gelu(approximate)}
    ),
    F.leaky_relu: _activation(
        "negative_slope",
        "inplace",
        make=lambda negative_slope=0.01: {"act": "leaky", "slope": negative_slope},
    ),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _max_pool),
    F.avg_pool2d: _pooled(
        *("average", "kernel_size", "stride", "padding", "ceil_mode"),
        *("count_include_pad", "divisor_override"),
    ),
    F.adaptive_avg_pool2d: _adaptive,
    torch.mean: _mean,
    F.dropout: _dropped,
    torch.flatten: _flattened,
    torch.reshape: _viewed,
    **dict.fromkeys((torch.add, operator.add, operator.iadd), _added),
}

_METHODS: dict[Any, _Read] = {
    **dict.fromkeys(("relu", "relu_"), _relu),
    **dict.fromkeys(("tanh", "tanh_"), _tanh),
    **dict.fromkeys(("add", "add_"), _added),
    **dict.fromkeys(("view", "reshape"), _viewed),
    "mean": _mean,
    "flatten": _flattened,
}
