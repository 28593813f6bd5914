"""The paper's network for EMNIST: two convolutions and one linear layer."""

import torch.nn.functional as F
from torch import Tensor, nn


class EMNISTNet(nn.Module):
    """A network for grey images of 28x28 pixels; 64,802 values travel at p = 1."""

    input_shape = (1, 28, 28)

    def __init__(self, num_classes: int = 62) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm2d(20)
        self.conv2 = nn.Conv2d(20, 20, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(20)
        self.fc = nn.Linear(20 * 7 * 7, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of a batch of images (n, 1, 28, 28)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        scores: Tensor = self.fc(x.flatten(1))
        return scores
