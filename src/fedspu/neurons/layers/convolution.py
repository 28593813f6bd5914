"""Convolutions of all dimensions, transposed, grouped and depthwise."""

from collections.abc import Iterable

from torch import nn

from fedspu.neurons.layers.kind import Cut, LayerKind, register

Conv = nn.modules.conv._ConvNd

DEPTHWISE = "fedspu_is_depthwise"
"""An attribute of the convolutions in slim models."""


def is_depthwise(layer: Conv) -> bool:
    """Whether each input channel has output channels of its own.

    A grouped layer that was slimmed to one channel per group looks the same, so a slim
    layer stores which of the two it is.
    """
    looks_so = layer.groups == layer.in_channels > 1
    return bool(vars(layer).get(DEPTHWISE, looks_so))


@register(Conv)
class Convolution(LayerKind):
    """A neuron is an output channel, with its bias."""

    def incoming(self, layer: Conv) -> Iterable[tuple[str, int]]:
        """Weight and bias."""
        rows = 1 if layer.transposed and not is_depthwise(layer) else 0
        return (("weight", rows), ("bias", 0))

    def resize(self, layer: Conv, cut: Cut) -> None:
        """Update its numbers of channels, and of groups if it is depthwise."""
        vars(layer)[DEPTHWISE] = is_depthwise(layer)
        rows, per_group = layer.weight.shape[:2]
        if is_depthwise(layer):
            multiple = layer.out_channels // layer.in_channels
            layer.groups = rows if layer.transposed else rows // multiple
            layer.in_channels = layer.groups
            layer.out_channels = layer.groups * multiple
        elif layer.transposed:
            layer.in_channels, layer.out_channels = rows, per_group * layer.groups
        else:
            layer.in_channels, layer.out_channels = per_group * layer.groups, rows
