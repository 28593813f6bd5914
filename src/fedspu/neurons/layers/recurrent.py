"""``nn.RNN``, ``nn.GRU``, ``nn.LSTM``: a hidden unit owns a row of every gate."""

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fedspu.neurons.layers.kind import (
    Cut,
    LayerKind,
    Place,
    Ports,
    register,
    traced_linear,
)


@register(nn.RNNBase)
class Recurrent(LayerKind):
    """Recurrent layers with any number of levels and directions, but no projections."""

    def stand_in(self, layer: nn.RNNBase) -> dict[nn.Module, Ports]:
        """A linear layer for each level and direction."""
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
                traced = f"traced_{tail}"
                linear = traced_linear(layer, traced, into.shape[1], hidden, into)
                known[linear] = _ports(layer, tail, into)
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
                time = 1 if self.batch_first and last.dim() == 3 else 0
                final, whole = last.select(time, -1), out
            final = final.expand(directions * self.num_layers, *final.shape)
            return whole, (final, final) if self.mode == "LSTM" else final

        layer.forward = MethodType(forward, layer)
        return known

    def incoming(self, layer: nn.RNNBase) -> Iterable[tuple[str, int]]:
        """All of its parameters."""
        for name, _ in layer.named_parameters(recurse=False):
            yield name, 0

    def resize(self, layer: nn.RNNBase, cut: Cut) -> None:
        """Update its two widths."""
        if layer.proj_size:
            return
        first, hidden = layer.all_weights[0][:2]
        layer.input_size, layer.hidden_size = first.shape[1], hidden.shape[1]
        layer._init_flat_weights()


def _ports(layer: nn.RNNBase, tail: str, into: Tensor) -> Ports:
    """Ports of one level and direction."""
    hidden = layer.hidden_size
    by_row = [into, getattr(layer, f"weight_hh_{tail}")]
    if layer.bias:
        by_row += [getattr(layer, f"bias_{kind}_{tail}") for kind in ("ih", "hh")]

    def outputs(o: int) -> list[Place]:
        rows = range(o, len(into), hidden)
        return [(by_row[1], 1, o), *((t, 0, row) for t in by_row for row in rows)]

    return Ports(lambda i: [(into, 1, i)], outputs)
