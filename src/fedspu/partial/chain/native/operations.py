"""The operations of a model's graph, and how each is read as a part of a stage."""

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

from fedspu.partial.chain.native.stages import ACT, NotAChainError, Value

if TYPE_CHECKING:
    from fedspu.partial.chain.native.reader import Reader


def pair(value: Any) -> tuple[int, int]:
    """A size that is given as one number or as two, as two."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, list | tuple) and len(value) == 2:
        return value[0], value[1]
    raise NotAChainError(f"a size of {value!r}")


def is_batch_size(node: torch.fx.Node) -> bool:
    """Whether a node is ``x.size(0)``, or ``x.shape[0]`` on the way to it."""
    if node.op == "call_method" and node.target == "size":
        return node.args[1:] == (0,)
    if node.op == "call_function" and node.target is getattr:
        return node.args[1:] == ("shape",) and all(map(is_batch_size, node.users))
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        is_shape = isinstance(source, torch.fx.Node) and source.target is getattr
        return is_shape and node.args[1:] == (0,)
    return False


# Activations --------------------------------------------------------------------------

ACTIVATIONS: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    nn.ReLU: lambda layer: {"act": "relu"},
    nn.Tanh: lambda layer: {"act": "tanh"},
    nn.LeakyReLU: lambda layer: {"act": "leaky", "slope": layer.negative_slope},
    nn.GELU: lambda layer: {"act": _gelu(layer.approximate)},
}
MAX_POOL = (
    *("kernel_size", "stride", "padding", "dilation"),
    *("ceil_mode", "return_indices"),
)
AVERAGE_POOL = ("kernel_size", "stride", "padding", "ceil_mode", "divisor_override")


def _gelu(approximate: str) -> str:
    return "gelu" if approximate == "none" else "gelu_tanh"


# Functions ----------------------------------------------------------------------------

_Read = Callable[["Reader", torch.fx.Node], Value]


def _bound(node: torch.fx.Node, *names: str) -> dict[str, Any]:
    """The arguments of a call by name; ``inplace`` makes no difference."""
    if len(node.args) > len(names) or any(name not in names for name in node.kwargs):
        raise NotAChainError(f"{node.name}, called in another way")
    found = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    found.pop("inplace", None)
    return found


def _activation(*names: str, make: Callable[..., dict[str, Any]]) -> _Read:
    def read(reader: "Reader", node: torch.fx.Node) -> Value:
        found = _bound(node, "input", *names)
        source = found.pop("input")
        value, is_last = reader.value(source), reader.is_last_use(source)
        return reader.follow(value, is_last, ACT, **make(**found))

    return read


def _pooled(kind: str, *names: str) -> _Read:
    def read(reader: "Reader", node: torch.fx.Node) -> Value:
        found = _bound(node, "input", *names)
        source = found.pop("input")
        value, is_last = reader.value(source), reader.is_last_use(source)
        return reader.pool(value, is_last, kind, **found)

    return read


def _adaptive(reader: "Reader", node: torch.fx.Node) -> Value:
    found = _bound(node, "input", "output_size")
    value, is_last = reader.value(found["input"]), reader.is_last_use(found["input"])
    return reader.global_average(value, is_last, found["output_size"])


def _mean(reader: "Reader", node: torch.fx.Node) -> Value:
    found = _bound(node, "input", "dim", "keepdim")
    dims = found.get("dim")
    if not isinstance(dims, list | tuple) or tuple(dims) not in ((2, 3), (-2, -1)):
        raise NotAChainError("a mean over other axes than height and width")
    value, is_last = reader.value(found["input"]), reader.is_last_use(found["input"])
    value = reader.global_average(value, is_last, 1)
    return Value(value.stage, not found.get("keepdim", False))


def _dropped(reader: "Reader", node: torch.fx.Node) -> Value:
    found = _bound(node, "input", "p", "training", "inplace")
    p = found.get("p", 0.5) if found.get("training", True) else 0.0
    value, is_last = reader.value(found["input"]), reader.is_last_use(found["input"])
    return reader.dropout(value, is_last, p)


def _flattened(reader: "Reader", node: torch.fx.Node) -> Value:
    found = _bound(node, "input", "start_dim", "end_dim")
    if (found.get("start_dim", 0), found.get("end_dim", -1)) != (1, -1):
        raise NotAChainError("a flatten of other axes")
    return Value(reader.value(found["input"]).stage, True)


def _viewed(reader: "Reader", node: torch.fx.Node) -> Value:
    """``x.view(len(x), -1)``, with the numbers written in any of the usual ways."""
    source, *size = node.args
    if len(size) == 1 and isinstance(size[0], list | tuple):
        size = list(size[0])
    value = reader.value(source)
    features = math.prod(reader.shape_of(value))
    is_batch = len(size) == 2 and (
        (isinstance(size[0], torch.fx.Node) and is_batch_size(size[0]))
        or size == [-1, features]
    )
    if not is_batch or size[1] not in (-1, features) or node.kwargs:
        raise NotAChainError("a view of another shape")
    return Value(value.stage, True)


def _added(reader: "Reader", node: torch.fx.Node) -> Value:
    found = _bound(node, "input", "other")
    one, other = found["input"], found["other"]
    later = max(one, other, key=lambda node: reader.value(node).stage)
    return reader.add(reader.value(one), reader.value(other), reader.is_last_use(later))


_relu = _activation("inplace", make=lambda: {"act": "relu"})
_tanh = _activation(make=lambda: {"act": "tanh"})
_max_pool = _pooled("max", *MAX_POOL)

FUNCTIONS: dict[Any, _Read] = {
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

METHODS: dict[Any, _Read] = {
    **dict.fromkeys(("relu", "relu_"), _relu),
    **dict.fromkeys(("tanh", "tanh_"), _tanh),
    **dict.fromkeys(("add", "add_"), _added),
    **dict.fromkeys(("view", "reshape"), _viewed),
    "mean": _mean,
    "flatten": _flattened,
}
