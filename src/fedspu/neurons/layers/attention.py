"""``nn.MultiheadAttention``: whole heads are neurons, and so are its outputs."""

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fedspu.errors import ModelError
from fedspu.neurons.layers.kind import (
    Cut,
    LayerKind,
    Place,
    Ports,
    register,
    traced_linear,
)
from fedspu.neurons.multi_head import SlimAttention


@register(nn.MultiheadAttention)
class Attention(LayerKind):
    """Queries, keys and values of a head belong together."""

    is_slim_by_size = False  # a slim one also stores which heads it has

    def stand_in(self, layer: nn.MultiheadAttention) -> dict[nn.Module, Ports]:
        """Three linear layers, whose outputs meet channel by channel."""
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
            traced = f"traced_{name}"
            linear = traced_linear(layer, traced, weight.shape[1], width, weight)
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

    def incoming(self, layer: nn.MultiheadAttention) -> Iterable[tuple[str, int]]:
        """All of its own parameters."""
        for name, parameter in layer.named_parameters(recurse=False):
            yield name, parameter.dim() - 1 if name in ("bias_k", "bias_v") else 0

    def resize(self, layer: nn.MultiheadAttention, cut: Cut) -> None:
        """Turn it into a slim attention if any of its tensors was cut."""
        if not _is_whole(layer):
            SlimAttention.shrink(layer, _kept_heads(layer, cut))


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
        found: list[Place] = [(weight, 0, start + o)]
        if bias is not None:
            found.append((bias, 0, bias_start + o))
        if extra is not None:
            found.append((extra, 2, o))
        return found

    heads = [
        [(weight, 0, start + o) for o in range(first, first + head)]
        for first in range(0, width, head)
    ]
    return Ports(lambda i: [(weight, 1, i)], outputs, heads)


def _is_whole(layer: nn.MultiheadAttention) -> bool:
    width = layer.embed_dim
    if layer.in_proj_weight is not None:
        is_whole = layer.in_proj_weight.shape == (3 * width, width)
    else:
        is_whole = (
            layer.q_proj_weight.shape == (width, width)
            and layer.k_proj_weight.shape == (width, layer.kdim)
            and layer.v_proj_weight.shape == (width, layer.vdim)
        )
    return is_whole and layer.out_proj.weight.shape == (width, width)


def _kept_heads(layer: nn.MultiheadAttention, cut: Cut) -> Tensor:
    """The full layer's heads that are left."""
    name = f"{cut.path}.out_proj.weight".lstrip(".")
    for group, _ in cut.neurons.positions(name, 1):
        if len(cut.kept[group.name]) < group.size:
            if group.size != layer.num_heads:
                raise ModelError(
                    f"{group.name}: expected one neuron for each of {layer.num_heads} "
                    f"whole heads, got {group.size} neurons"
                )
            return cut.kept[group.name]
    return torch.arange(layer.num_heads)


@register(nn.TransformerEncoder)
class Encoder(LayerKind):
    """``nn.TransformerEncoder``, which has no tensors of its own."""

    def resize(self, layer: nn.TransformerEncoder, cut: Cut) -> None:
        """Keep its fused kernels for whole layers from bypassing slim attentions."""
        layer.use_nested_tensor = False
