"""What a chain consists of, as the compiled code runs it.

A stage is one weighted layer, or none, and what follows it, in this order: norm, sum
with an earlier stage, activation, pool, dropout.
"""

from dataclasses import dataclass

from torch import nn

INPUT, NONE = -1, -2
Shape = tuple[int, int, int]
"""Channels, height and width; features of a linear layer are channels of one pixel."""

NORM, ADD, ACT, POOL, DROPOUT = range(1, 6)
"""The order of what follows a weighted layer in a stage."""

MOST_TAPS = 128 * 9
"""Products for one pixel of a convolution; with more, PyTorch is as fast or faster."""

Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm


class NotAChainError(Exception):
    """The model has something that the compiled code does not know; says what."""


@dataclass(frozen=True)
class Stage:
    """One weighted layer, or none, and what follows it."""

    source: int  # the stage it reads, or INPUT
    input: Shape
    middle: Shape  # after the layer
    layer: nn.Conv2d | nn.Linear | None = None
    norm: Norm | None = None
    adds: int = NONE  # the stage that is added
    act: str = "none"
    slope: float = 0.0
    pool: str = "none"
    window: tuple[int, int] = (1, 1)
    dropout: float = 0.0
    reached: int = 0  # how far in the order it is
    gives_maps: bool = True  # the last one: (n, channels, height, width) or features

    @property
    def output(self) -> Shape:
        """Channels, height and width of its output."""
        channels, height, width = self.middle
        return channels, height // self.window[0], width // self.window[1]


@dataclass(frozen=True)
class Value:
    """What a node of the graph gives: a stage's output, as maps or as features."""

    stage: int
    is_flat: bool


def padding_of(layer: nn.Conv2d) -> tuple[int, int]:
    """The padding of a convolution, as numbers."""
    if layer.padding == "valid":
        return 0, 0
    if not isinstance(layer.padding, str):
        return layer.padding[0], layer.padding[1]
    sides = zip(layer.dilation, layer.kernel_size, strict=True)
    height, width = (dilation * (kernel - 1) for dilation, kernel in sides)  # "same"
    if height % 2 or width % 2:
        raise NotAChainError("a convolution with uneven padding")
    return height // 2, width // 2
