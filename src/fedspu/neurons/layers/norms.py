"""Normalisation layers, and PReLU: layers with a few values for each channel."""

from typing import Any

from torch import Tensor, nn

from fedspu.neurons.layers.kind import Cut, LayerKind, register


@register(nn.modules.batchnorm._NormBase)
class BatchNorm(LayerKind):
    """Batch and instance norms of all dimensions."""

    is_norm = True

    def resize(self, layer: nn.modules.batchnorm._NormBase, cut: Cut) -> None:
        """Update its number of channels."""
        tensor = layer.weight if layer.weight is not None else layer.running_mean
        if tensor is not None:
            layer.num_features = len(tensor)
        else:  # no tensor tells its width, but it would warn about a new one
            layer.register_forward_pre_hook(_follow_width)


def _follow_width(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
    dims = {"1d": 1, "2d": 2, "3d": 3}[type(layer).__name__[-2:]]
    vars(layer)["num_features"] = args[0].shape[-dims - 1]


@register(nn.GroupNorm)
class GroupNorm(LayerKind):
    """``nn.GroupNorm``."""

    is_norm = True

    def resize(self, layer: nn.GroupNorm, cut: Cut) -> None:
        """Update its number of channels."""
        if layer.weight is not None:
            layer.num_channels = len(layer.weight)


@register(nn.LayerNorm)
class LayerNorm(LayerKind):
    """``nn.LayerNorm``."""

    is_norm = True

    def resize(self, layer: Any, cut: Cut) -> None:
        """Update its shape."""
        if layer.weight is not None:
            layer.normalized_shape = tuple(layer.weight.shape)
        else:  # no tensor tells its shape
            layer.register_forward_pre_hook(_follow_shape)


def _follow_shape(layer: Any, args: tuple[Tensor, ...]) -> None:
    layer.normalized_shape = tuple(args[0].shape[-len(layer.normalized_shape) :])


@register(nn.RMSNorm)
class RMSNorm(LayerNorm):
    """``nn.RMSNorm``."""


@register(nn.PReLU)
class PReLU(LayerKind):
    """``nn.PReLU``: a slope for each channel, or one for all."""

    def resize(self, layer: nn.PReLU, cut: Cut) -> None:
        """Update its number of slopes."""
        layer.num_parameters = len(layer.weight)
