"""Small models of several kinds, and made-up examples, to try a method on."""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

CLASSES = 3

Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]


@cache
def made_examples(count: int = 64) -> Arrays:
    """Grey 4x4 images of noise, with labels that have nothing to do with them.

    So the validation loss soon rises, and with early stopping, clients do stop.
    """
    rng = np.random.default_rng(11)
    x = rng.normal(size=(count, 1, 4, 4)).astype(np.float32)
    return x, np.arange(count, dtype=np.int64) % CLASSES


class ConvNet(nn.Module):
    """Two convolutions with batch norms; a linear layer reads their flattened map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6 * 2 * 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        scores: Tensor = self.fc(x.flatten(1))
        return scores


def mlp() -> nn.Module:
    """Two hidden layers, no norms, no buffers.

    The first is so wide that a random choice of its neurons is sent as a key.
    """
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(16, 136), nn.ReLU(), nn.Linear(136, 5), nn.ReLU()),
        nn.Linear(5, CLASSES),
    )


class Residual(nn.Module):
    """A residual block, in which two layers share one group of neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(4)
        self.conv1 = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = F.relu(self.bn0(self.stem(x)))
        inner = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(x + self.bn2(self.conv2(inner)))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


class Attention(nn.Module):
    """A Transformer layer over the rows of an image, with heads and layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(4, 8)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 4, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        tokens = self.rows(x.squeeze(1)) + self.positions
        scores: Tensor = self.head(self.encoder(tokens).mean(1))
        return scores


class Recurrent(nn.Module):
    """A GRU over the rows of an image, with three gates for each neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        _, last = self.gru(x.squeeze(1))
        scores: Tensor = self.head(last[0])
        return scores


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convnet": ConvNet,
    "mlp": mlp,
    "residual": Residual,
    "attention": Attention,
    "recurrent": Recurrent,
}
"""The models that a method is tried on, by name."""


def holding_still(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model with norm momentum 0, so its norm statistics never change."""

    def still() -> nn.Module:
        model = build()
        for layer in model.modules():
            if isinstance(layer, nn.modules.batchnorm._NormBase):
                layer.momentum = 0.0
        return model

    return still
