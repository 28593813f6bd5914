"""A convolution and its batch norm, which larger networks are made of."""

from typing import Any

from torch import nn


def conv_norm(before: int, after: int, **given: Any) -> nn.Sequential:
    """A convolution without bias and a batch norm; the rest goes to ``nn.Conv2d``."""
    conv = nn.Conv2d(before, after, bias=False, **given)
    return nn.Sequential(conv, nn.BatchNorm2d(after))
