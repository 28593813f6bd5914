"""The networks whose limits are known."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


def mlp(inputs: int, num_hidden: int) -> nn.Module:
    """Hidden layers of 1024."""
    layers: list[nn.Module] = []
    for before, after in pairwise((inputs, *[1024] * num_hidden)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def _conv(before: int, after: int, size: int, stride: int = 1) -> nn.Module:
    conv = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after))


class Block(nn.Module):
    """Two convolutions of 3x3 beside a shortcut."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = after // before
        self.first = _conv(before, after, 3, stride)
        self.second = _conv(after, after, 3)
        self.shortcut = nn.Identity() if stride == 1 else _conv(before, after, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32x32: no stride and no pool in front."""
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Block(before, after) for before, after in pairwise(widths)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(_conv(3, 64, 3), nn.ReLU(), *blocks, *head)
