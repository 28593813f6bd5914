"""The paper's network for Google Speech: two convolutions and one linear layer."""

import torch.nn.functional as F
from torch import Tensor, nn


class SpeechNet(nn.Module):
    """A network for spectrograms of 32x32 values; 26,485 values travel at p = 1."""

    input_shape = (1, 32, 32)

    def __init__(self, num_classes: int = 35) -> None:
        super().__init__()
        # Stride 2 and pooling: 32 -> 18 -> 9 -> 6 -> 3.
        self.conv1 = nn.Conv2d(1, 50, kernel_size=2, stride=2, padding=2)
        self.bn1 = nn.BatchNorm2d(50)
        self.conv2 = nn.Conv2d(50, 50, kernel_size=2, stride=2, padding=2)
        self.bn2 = nn.BatchNorm2d(50)
        self.fc = nn.Linear(50 * 3 * 3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of a batch of spectrograms (n, 1, 32, 32)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        scores: Tensor = self.fc(x.flatten(1))
        return scores
