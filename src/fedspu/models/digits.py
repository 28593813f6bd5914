"""A small network for the digits that ship with fedspu; it is not in the paper."""

import torch.nn.functional as F
from torch import Tensor, nn


class DigitsNet(nn.Module):
    """A network for grey images of 8x8 pixels, shaped like the paper's for EMNIST."""

    input_shape = (1, 8, 8)

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * 2 * 2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of a batch of images (n, 1, 8, 8)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        scores: Tensor = self.fc(x.flatten(1))
        return scores
