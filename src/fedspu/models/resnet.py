"""ResNet-18 for small images; it is not in the paper.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.
"""

from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(before, after, kernel_size=3, padding=1, stride=stride)
        self.second = conv_norm(after, after, kernel_size=3, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = conv_norm(before, after, kernel_size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps in, feature maps out."""
        y = self.second(F.relu(self.first(x)))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Sequential):
    """ResNet-18 for colour images of 32x32 pixels, with no stride or pool in front."""

    input_shape = (3, 32, 32)

    def __init__(self, num_classes: int = 10) -> None:
        layers: list[nn.Module] = [
            conv_norm(3, 64, kernel_size=3, padding=1),
            nn.ReLU(),
        ]
        for i, (before, after) in enumerate(pairwise((64, 64, 128, 256, 512))):
            stride = 1 if i == 0 else 2
            layers += [BasicBlock(before, after, stride), BasicBlock(after, after, 1)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes)]
        super().__init__(*layers, *head)


def conv_norm(before: int, after: int, **given: Any) -> nn.Sequential:
    """A convolution without bias, then a batch norm; ``given`` is for ``nn.Conv2d``."""
    conv = nn.Conv2d(before, after, bias=False, **given)
    return nn.Sequential(conv, nn.BatchNorm2d(after))
