"""Recognise a network that is one chain of layers, and read it as links."""

import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu.neurons.calls import undisturbed


@dataclass(frozen=True)
class Link:
    """One weighted layer, and what directly follows it."""

    layer: nn.Conv2d | nn.Linear
    norm: nn.BatchNorm2d | None = None
    has_relu: bool = False
    has_pool: bool = False
    flattens: bool = False  # its input, from maps to features


@dataclass(frozen=True)
class Traced:
    """A model's graph, and the chain that it is; empty if it is none."""

    made_of: Any
    graph: torch.fx.GraphModule | None
    links: tuple[Link, ...]


_KNOWN: "WeakKeyDictionary[nn.Module, dict[Any, Traced]]" = WeakKeyDictionary()
"""For each model its graphs: in training, in eval mode, and a few more."""

MOST_GRAPHS = 8


def find_chain(model: nn.Module) -> tuple[Link, ...]:
    """The model as a chain of links; empty if it is not a chain that we can run."""
    return trace(model).links


def trace(model: nn.Module) -> Traced:
    """The model's graph in its present mode, traced once; None if it has none."""
    if is_watched(model) or any("forward" in vars(m) for m in model.modules()):
        return Traced(None, None, ())
    made_of = _made_of(model)
    known = _KNOWN.setdefault(model, {})
    if made_of not in known:
        if len(known) == MOST_GRAPHS:
            known.clear()
        with undisturbed(), _buffers_kept(model) as has_changed:
            before = _generators()
            try:
                graph = _Tracer().graph_of(model)
            except Exception:  # the user's own code; without a graph, it runs as usual
                graph = None
            # A graph would not make these changes, nor draw again.
            if has_changed() or _generators() != before:
                graph = None
        if _made_of(model) != made_of:
            graph = None
        known[made_of] = Traced(made_of, graph, _chain(graph))
    return known[made_of]


def _made_of(model: nn.Module) -> tuple[Any, ...]:
    return tuple((id(m), type(m), m.training, _plain(m)) for m in model.modules())


def _plain(layer: nn.Module) -> tuple[Any, ...]:
    """A layer's numbers and words, on which its forward pass may depend."""
    return tuple(
        (name, value)
        for name, value in vars(layer).items()
        if isinstance(value, _PLAIN)
        or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value))
    )


_PLAIN = (int, float, str, type(None))


class _Proxy(torch.fx.Proxy):
    """Tells ``y += z``, which changes y for all that know it, from ``y = y + z``."""

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy(
            "call_function", operator.iadd, (self, other), {}
        )

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy(
            "call_function", operator.imul, (self, other), {}
        )


def is_in_place(graph: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Whether an operation changes its first input."""
    if node.op == "call_module":
        return bool(getattr(graph.get_submodule(str(node.target)), "inplace", False))
    name = getattr(node.target, "__name__", str(node.target))
    is_asked = node.kwargs.get("inplace") is True or True in node.args[1:]
    return name.endswith("_") or name in ("iadd", "imul") or is_asked


class _Tracer(torch.fx.Tracer):
    """Traces a model; refuses one that switches gradients off or on by itself."""

    def graph_of(self, model: nn.Module) -> torch.fx.GraphModule:
        """The model's graph."""
        return torch.fx.GraphModule(model, self.trace(model))

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        """What stands for a node while the model runs."""
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A node of the graph, which does not say whether gradients are on."""
        if not torch.is_grad_enabled():
            raise _NoChainError
        return super().create_node(*args, **kwargs)


def _generators() -> Any:
    """Where the global random generators are."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002  # the user's model may use it
    of_torch = torch.get_rng_state().numpy().tobytes()
    return of_torch, random.getstate(), of_numpy[1].tobytes(), of_numpy[2:]


def _chain(graph: torch.fx.GraphModule | None) -> tuple[Link, ...]:
    try:
        return () if graph is None else tuple(_links(graph))
    except _NoChainError:
        return ()


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Undo what a forward pass inside does to buffers; yields a test for changes."""
    before = [
        (layer, name, buffer, buffer.clone())
        for layer in model.modules()
        for name, buffer in layer._buffers.items()
        if buffer is not None
    ]

    def has_changed() -> bool:
        return any(
            layer._buffers[name] is not buffer or not _is_same(buffer, values)
            for layer, name, buffer, values in before
        )

    try:
        yield has_changed
    finally:
        with torch.no_grad():
            for layer, name, buffer, values in before:
                layer._buffers[name] = buffer.copy_(values)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def is_watched(model: nn.Module, besides: int = 0) -> bool:
    """Whether a layer has hooks, which a chain would not call.

    ``besides`` is how many forward hooks of each kind we put on every layer ourselves.
    """
    has_global = any(
        getattr(nn.modules.module, f"_global_{kind}")
        for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks")
    )
    return has_global or any(
        len(layer._forward_hooks) > besides
        or len(layer._forward_pre_hooks) > besides
        or layer._backward_hooks
        or layer._backward_pre_hooks
        for layer in model.modules()
    )


class _NoChainError(Exception):
    """The model has something that no chain has."""


def _links(traced: torch.fx.GraphModule) -> Iterator[Link]:
    """Read the graph from its input to its output, link by link."""
    words: list[Any] = []
    nodes = list(traced.graph.nodes)
    if nodes[0].op != "placeholder" or nodes[-1].op != "output":
        raise _NoChainError
    before = nodes[0]
    for node in nodes[1:]:
        inputs = node.all_input_nodes
        if inputs != [before] or (len(before.users) != 1):
            raise _NoChainError
        if node.op != "output":
            words += _word(traced, node)
        before = node
    flattens = False
    while words:
        word = words.pop(0)
        if word == "flatten":
            flattens = True
            continue
        if not isinstance(word, nn.Conv2d | nn.Linear):
            raise _NoChainError
        norm, rest = None, {"relu": False, "pool": False}
        if words and isinstance(words[0], nn.BatchNorm2d):
            norm = words.pop(0)
        for name in ("relu", "pool"):
            if words and words[0] == name:
                rest[name] = True
                words.pop(0)
        needs_map = norm is not None or rest["pool"]
        if needs_map and not isinstance(word, nn.Conv2d):
            raise _NoChainError
        if rest["pool"] and not rest["relu"]:
            raise _NoChainError
        yield Link(word, norm, rest["relu"], rest["pool"], flattens)
        flattens = False
    if flattens:
        raise _NoChainError


def _word(traced: torch.fx.GraphModule, node: torch.fx.Node) -> list[Any]:
    """What a node of the graph does: a layer, or the name of an operation."""
    if node.op == "call_module":
        return _layer_word(traced.get_submodule(str(node.target)))
    rest: Any = node.args[1:]
    named: Any = node.kwargs
    name = node.target if isinstance(node.target, str) else node.target.__name__
    if name in ("relu", "relu_") and not rest:
        return ["relu"]
    if node.target in (F.max_pool2d, torch.max_pool2d) and _is_two(*rest, **named):
        return ["pool"]
    if name == "flatten" and (*rest, *named.values()) in ((1,), (1, -1)):
        return ["flatten"]
    raise _NoChainError


def _layer_word(layer: nn.Module) -> list[Any]:
    if isinstance(layer, nn.Identity):
        return []
    if isinstance(layer, nn.ReLU):
        return ["relu"]
    if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
        return ["flatten"]
    if isinstance(layer, nn.MaxPool2d) and _is_two(
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.ceil_mode,
        layer.return_indices,
    ):
        return ["pool"]
    if type(layer) is nn.BatchNorm2d:
        is_usual = layer.affine and layer.track_running_stats
        if is_usual and layer.momentum is not None:
            return [layer]
    if type(layer) is nn.Conv2d:
        is_usual = layer.groups == 1 and layer.padding_mode == "zeros"
        if is_usual and not isinstance(layer.padding, str):
            return [layer]
    if type(layer) is nn.Linear:
        return [layer]
    raise _NoChainError


def _is_two(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Whether a pool is 2x2, moves by 2, and does nothing else."""
    two = (2, (2, 2), [2, 2])
    return (
        kernel_size in two
        and (stride is None or stride in two)
        and padding in (0, (0, 0))
        and dilation in (1, (1, 1))
        and not ceil_mode
        and not return_indices
    )
