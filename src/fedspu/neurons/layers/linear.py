"""Linear layers, embeddings, and custom layers that are linear."""

from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from fedspu.neurons.layers.kind import (
    Cut,
    LayerKind,
    Ports,
    places,
    register,
    traced_linear,
)


@register(nn.Linear)
class Linear(LayerKind):
    """``nn.Linear``: a neuron is a row of the weight, with its bias."""

    def incoming(self, layer: nn.Linear) -> Iterable[tuple[str, int]]:
        """Weight and bias."""
        return (("weight", 0), ("bias", 0))

    def resize(self, layer: nn.Linear, cut: Cut) -> None:
        """Update its two widths."""
        layer.out_features, layer.in_features = layer.weight.shape


@register(nn.Embedding)
class Embedding(LayerKind):
    """``nn.Embedding``: a neuron is a column of the weight."""

    def incoming(self, layer: nn.Embedding) -> Iterable[tuple[str, int]]:
        """The weight."""
        return (("weight", 1),)

    def resize(self, layer: nn.Embedding, cut: Cut) -> None:
        """Update its two widths."""
        layer.num_embeddings, layer.embedding_dim = layer.weight.shape


class LinearLike(LayerKind):
    """A custom layer that multiplies its input's last axis by a weight.

    ``outputs`` is the axis of the weight along which outputs lie. Register a subclass
    for a layer class whose weight is the transpose of an ``nn.Linear``'s::

        @register(Conv1D)  # the one in Hugging Face's transformers
        class TransposedLinear(LinearLike):
            outputs = 1
    """

    weight = "weight"
    bias = "bias"
    outputs = 0

    def stand_in(self, layer: Any) -> dict[nn.Module, Ports]:
        """One linear layer, which does the same as the layer."""
        weight: Tensor = getattr(layer, self.weight)
        bias: Tensor | None = getattr(layer, self.bias, None)
        inputs = 1 - self.outputs
        width_in, width_out = weight.shape[inputs], weight.shape[self.outputs]
        linear = traced_linear(layer, "traced", width_in, width_out, weight)
        layer.forward = MethodType(lambda self, x: linear(x), layer)
        return {
            linear: Ports(
                inputs=places((weight, inputs)),
                outputs=places((weight, self.outputs), (bias, 0)),
            )
        }

    def incoming(self, layer: Any) -> Iterable[tuple[str, int]]:
        """Weight and bias."""
        return ((self.weight, self.outputs), (self.bias, 0))
