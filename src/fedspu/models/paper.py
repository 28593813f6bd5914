"""The paper's networks for EMNIST, CIFAR-10 and speech, and a small one for digits."""

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


class CIFARNet(nn.Module):
    """A network for colour images of 32x32 pixels; 134,946 values travel at p = 1."""

    input_shape = (3, 32, 32)

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc1 = nn.Linear(16 * 8 * 8, 120, bias=False)
        self.fc2 = nn.Linear(120, 84, bias=False)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of a batch of images (n, 3, 32, 32)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        scores: Tensor = self.fc3(x)
        return scores


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
