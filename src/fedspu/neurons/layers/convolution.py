"""Convolutions of all dimensions, transposed, grouped and depthwise."""

from collections.abc import Iterable, Sequence

from torch import nn

from fedspu.neurons.layers.kind import Cut, LayerKind, Place, Ports, places, register

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

    def ports(self, layer: Conv) -> Ports:
        """Weights are (out, in / groups, …), transposed ones (in, out / groups, …)."""
        weight, groups, transposed = layer.weight, layer.groups, layer.transposed
        ins, outs = layer.in_channels // groups, layer.out_channels // groups
        depthwise = is_depthwise(layer)
        bias = places((layer.bias, 0))

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
        # vector per axis cannot express. So the channels with the same local index in
        # all groups are one neuron. (Axis 1 has only the local index anyway.)
        rows = ins if transposed else outs
        is_grouped = groups > 1 and not depthwise
        ties = [
            [(weight, 0, row) for row in range(local, rows * groups, rows)]
            for local in range(rows if is_grouped else 0)
        ]
        return Ports(inputs, outputs, layer.out_channels, ties)

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
