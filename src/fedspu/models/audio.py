"""A convolutional network on raw sound; it is not in the paper.

M5 of Dai, Dai, Qu, Li and Das, "Very Deep Convolutional Neural Networks for Raw
Waveforms", ICASSP 2017, with a quarter of its channels and a longer first stride.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class AudioNet(nn.Module):
    """A network for sounds of one second at 16 kHz; other lengths work too."""

    input_shape = (1, 16000)

    def __init__(self, num_classes: int = 35) -> None:
        super().__init__()
        # Stride and pooling: 16000 -> 996 -> 249 -> 247 -> 61 -> 59 -> 14 -> 12 -> 3.
        self.conv1 = nn.Conv1d(1, 32, kernel_size=80, stride=16)
        self.bn1 = nn.BatchNorm1d(32)
        self.conv2 = nn.Conv1d(32, 32, kernel_size=3)
        self.bn2 = nn.BatchNorm1d(32)
        self.conv3 = nn.Conv1d(32, 64, kernel_size=3)
        self.bn3 = nn.BatchNorm1d(64)
        self.conv4 = nn.Conv1d(64, 128, kernel_size=3)
        self.bn4 = nn.BatchNorm1d(128)
        self.fc = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of a batch of sounds (n, 1, samples)."""
        x = F.max_pool1d(F.relu(self.bn1(self.conv1(x))), 4)
        x = F.max_pool1d(F.relu(self.bn2(self.conv2(x))), 4)
        x = F.max_pool1d(F.relu(self.bn3(self.conv3(x))), 4)
        x = F.max_pool1d(F.relu(self.bn4(self.conv4(x))), 4)
        scores: Tensor = self.fc(x.mean(2))
        return scores
