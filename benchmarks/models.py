"""The networks that are measured, besides the paper's own."""

from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def mlp() -> nn.Module:
    """Four hidden layers of 1024."""
    widths = (784, 1024, 1024, 1024, 1024)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def _conv_norm(before: int, after: int, **given: Any) -> nn.Sequential:
    conv = nn.Conv2d(before, after, bias=False, **given)
    return nn.Sequential(conv, nn.BatchNorm2d(after))


class BasicBlock(nn.Module):
    """Two convolutions of 3x3 beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = _conv_norm(before, after, kernel_size=3, padding=1, stride=stride)
        self.second = _conv_norm(after, after, kernel_size=3, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = _conv_norm(before, after, kernel_size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Maps in, maps out."""
        y = self.second(F.relu(self.first(x)))
        return F.relu(y + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32x32: no stride and no pool in front."""
    stem = _conv_norm(3, 64, kernel_size=3, padding=1)
    layers: list[nn.Module] = [stem, nn.ReLU()]
    for i, (before, after) in enumerate(pairwise((64, 64, 128, 256, 512))):
        layers += [
            BasicBlock(before, after, min(i, 1) + 1),
            BasicBlock(after, after, 1),
        ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers, *head)


class InvertedResidual(nn.Module):
    """Widen by 1x1, filter each channel by 3x3, narrow by 1x1."""

    def __init__(self, before: int, after: int, stride: int, factor: int) -> None:
        super().__init__()
        wide = before * factor
        filters = {"kernel_size": 3, "stride": stride, "padding": 1, "groups": wide}
        widen = [_conv_norm(before, wide, kernel_size=1), nn.ReLU6()]
        self.body = nn.Sequential(
            *(widen if factor > 1 else []),
            _conv_norm(wide, wide, **filters),
            nn.ReLU6(),
            _conv_norm(wide, after, kernel_size=1),
        )
        self.is_residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        """Maps in, maps out."""
        y: Tensor = self.body(x)
        return x + y if self.is_residual else y


def mobilenet() -> nn.Module:
    """MobileNetV2 for images of 32x32: the strides of its first layers left out."""
    layers: list[nn.Module] = [_conv_norm(3, 32, kernel_size=3, padding=1), nn.ReLU6()]
    width = 32
    plan = [(1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1)]
    for factor, after, number, stride in [*plan, (6, 160, 3, 2), (6, 320, 1, 1)]:
        for i in range(number):
            first_stride = stride if i == 0 else 1
            layers.append(InvertedResidual(width, after, first_stride, factor))
            width = after
    layers += [_conv_norm(width, 1280, kernel_size=1), nn.ReLU6()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 10)]
    return nn.Sequential(*layers, *head)


class Transformer(nn.Module):
    """An encoder of four layers, 256 wide, over the vectors of 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of sequences (n, 64, 64)."""
        scores: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return scores
