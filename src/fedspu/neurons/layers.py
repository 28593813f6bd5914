"""Which tensor axes a layer's inputs and outputs lie along, layer kind by layer kind.

Supporting a new kind is one function registered with ``ports`` (a layer whose input and
output channels are those of its tensors), or with ``stand_in`` (a layer with neurons of
its own inside, which the dependency graph cannot follow).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

Place = tuple[Tensor, int, int]
"""A position along one axis of one tensor."""

Channel = Callable[[int], Sequence[Place]]
"""The places that belong to channel i."""


@dataclass(frozen=True)
class Ports:
    """Where a layer's input and output channels lie in its tensors.

    ``ties`` lists places that belong to one neuron although no channel says so.
    """

    inputs: Channel
    outputs: Channel
    num_outputs: int
    ties: Sequence[Sequence[Place]] = field(default=())


NORMS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm and InstanceNorm, all dimensions
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def _places(*tensors_and_dims: tuple[Tensor | None, int]) -> Channel:
    present = [(tensor, dim) for tensor, dim in tensors_and_dims if tensor is not None]
    return lambda i: [(tensor, dim, i) for tensor, dim in present]


@singledispatch
def ports(layer: Any) -> Ports | None:
    """The ports of one layer; None for a layer with no channels of its own."""
    return None


@ports.register
def _(layer: nn.Linear) -> Ports:
    return Ports(
        inputs=_places((layer.weight, 1)),
        outputs=_places((layer.weight, 0), (layer.bias, 0)),
        num_outputs=layer.out_features,
    )


@ports.register
def _(layer: nn.Embedding) -> Ports:
    return Ports(
        inputs=lambda i: [],
        outputs=_places((layer.weight, 1)),
        num_outputs=layer.embedding_dim,
    )


@ports.register(nn.modules.batchnorm._NormBase)
@ports.register(nn.GroupNorm)
@ports.register(nn.LayerNorm)
@ports.register(nn.PReLU)
def _(layer: Any) -> Ports | None:
    names = ("weight", "bias", "running_mean", "running_var")
    tensors = [t for n in names if (t := getattr(layer, n, None)) is not None]
    if not tensors or tensors[0].numel() == 1:
        return None  # one value for all channels, or none at all
    channel = _places(*((tensor, 0) for tensor in tensors))
    return Ports(inputs=channel, outputs=channel, num_outputs=len(tensors[0]))


def is_depthwise(layer: nn.modules.conv._ConvNd) -> bool:
    """Whether each input channel has output channels of its own.

    A grouped layer that was slimmed to one channel a group looks the same;
    ``slim_model`` notes which it is.
    """
    looks_so = layer.groups == layer.in_channels > 1
    return bool(vars(layer).get(DEPTHWISE, looks_so))


DEPTHWISE = "fedspu_is_depthwise"
"""An attribute of layers in slim models."""


@ports.register(nn.modules.conv._ConvNd)
def _(layer: nn.modules.conv._ConvNd) -> Ports:
    weight, groups, transposed = layer.weight, layer.groups, layer.transposed
    ins, outs = layer.in_channels // groups, layer.out_channels // groups
    depthwise = is_depthwise(layer)
    bias = _places((layer.bias, 0))

    # Weights are (out, in / groups, ...); transposed ones (in, out / groups, ...).
    def inputs(i: int) -> Sequence[Place]:
        if transposed:
            return [(weight, 0, i)]
        if depthwise:  # a channel owns the outputs made from it
            return [(weight, 0, i * outs + k) for k in range(outs)]
        return [(weight, 1, i % ins)]

    def outputs(o: int) -> Sequence[Place]:
        if not transposed:
            return [(weight, 0, o), *bias(o)]
        if depthwise:
            return [(weight, 0, o // outs), *bias(o)]
        return [(weight, 1, o % outs), *bias(o)]

    # In a grouped layer the active entries would be block-diagonal, which one index
    # vector per axis cannot say: channels with one local index in every group are one
    # neuron. (Along axis 1 the local index says so itself.)
    rows = ins if transposed else outs
    is_grouped = groups > 1 and not depthwise
    ties = [
        [(weight, 0, row) for row in range(local, rows * groups, rows)]
        for local in range(rows if is_grouped else 0)
    ]
    return Ports(inputs, outputs, layer.out_channels, ties)


# Layers with neurons inside -----------------------------------------------------------


@singledispatch
def stand_in(layer: nn.Module) -> dict[nn.Module, Ports]:
    """Make ``layer`` traceable: its forward pass becomes one of linear layers alone.

    What it computes then is not the layer's function; only which channel reaches which
    is the same. Returns the ports of the linear layers, in the layer's own tensors.
    Used on a throw-away copy of the model.
    """
    return {}


@stand_in.register
def _(layer: nn.MultiheadAttention) -> dict[nn.Module, Ports]:
    width, head = layer.embed_dim, layer.head_dim
    if layer.in_proj_weight is not None:
        weights = [(layer.in_proj_weight, k * width) for k in range(3)]
    else:
        weights = [
            (layer.q_proj_weight, 0),
            (layer.k_proj_weight, 0),
            (layer.v_proj_weight, 0),
        ]
    extras = (None, layer.bias_k, layer.bias_v)

    known: dict[nn.Module, Ports] = {}
    for k, name in enumerate(("query", "key", "value")):
        weight, start = weights[k]
        linear = _traced(layer, f"traced_{name}", weight.shape[1], width, weight)
        known[linear] = _projection(
            weight, start, layer.in_proj_bias, k * width, extras[k], width, head
        )

    def forward(
        self: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        tokens = 1 if self.batch_first and query.dim() == 3 else 0
        inputs = (query, key, value)
        q, k, v = (linear(x) for linear, x in zip(known, inputs, strict=True))
        mixed = q + (k + v).mean(tokens, keepdim=True)
        batch = [] if query.dim() == 2 else [query.shape[1 - tokens]]
        weights = torch.zeros(*batch, query.shape[tokens], key.shape[tokens])
        return self.out_proj(mixed), weights.to(query)

    layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]  # a copy
    return known


def _projection(
    weight: Tensor,
    start: int,
    bias: Tensor | None,
    bias_start: int,
    extra: Tensor | None,
    width: int,
    head: int,
) -> Ports:
    """Ports of an attention's query, key or value projection; heads stay whole."""

    def outputs(o: int) -> list[Place]:
        places = [(weight, 0, start + o)]
        if bias is not None:
            places.append((bias, 0, bias_start + o))
        if extra is not None:
            places.append((extra, 2, o))
        return places

    heads = [
        [(weight, 0, start + o) for o in range(first, first + head)]
        for first in range(0, width, head)
    ]
    return Ports(lambda i: [(weight, 1, i)], outputs, width, heads)


@stand_in.register
def _(layer: nn.RNNBase) -> dict[nn.Module, Ports]:
    if layer.proj_size:
        return {}
    hidden, directions = layer.hidden_size, 1 + layer.bidirectional
    known: dict[nn.Module, Ports] = {}
    stack: list[list[nn.Linear]] = []
    for depth in range(layer.num_layers):
        stack.append([])
        for suffix in ("", "_reverse")[:directions]:
            tail = f"l{depth}{suffix}"
            into = getattr(layer, f"weight_ih_{tail}")
            linear = _traced(layer, f"traced_{tail}", into.shape[1], hidden, into)
            known[linear] = _recurrence(layer, tail, into)
            stack[-1].append(linear)

    def forward(
        self: nn.RNNBase, x: Any, hx: Any = None
    ) -> tuple[Any, Tensor | tuple[Tensor, Tensor]]:
        out = x.data if isinstance(x, PackedSequence) else x
        for level in stack:
            steps = [linear(out) for linear in level]
            out = torch.cat(steps, -1)
        last = steps[-1] if len(steps) == 1 else steps[0] + steps[1]
        if isinstance(x, PackedSequence):
            final = last[: int(x.batch_sizes[0])]
            whole: Any = PackedSequence(out, *x[1:])
        else:
            final = last.select(1 if self.batch_first and last.dim() == 3 else 0, -1)
            whole = out
        final = final.expand(directions * self.num_layers, *final.shape)
        return whole, (final, final) if self.mode == "LSTM" else final

    layer.forward = MethodType(forward, layer)
    return known


def _recurrence(layer: nn.RNNBase, tail: str, into: Tensor) -> Ports:
    """Ports of one layer and direction: a hidden unit owns a row of every gate."""
    hidden = layer.hidden_size
    by_row = [into, getattr(layer, f"weight_hh_{tail}")]
    if layer.bias:
        by_row += [getattr(layer, f"bias_{kind}_{tail}") for kind in ("ih", "hh")]

    def outputs(o: int) -> list[Place]:
        rows = range(o, len(into), hidden)
        return [(by_row[1], 1, o), *((t, 0, row) for t in by_row for row in rows)]

    return Ports(lambda i: [(into, 1, i)], outputs, hidden)


def _traced(
    layer: nn.Module, name: str, width_in: int, width_out: int, like: Tensor
) -> nn.Linear:
    linear = nn.Linear(width_in, width_out, device=like.device, dtype=like.dtype)
    layer.add_module(name, linear)
    return linear
