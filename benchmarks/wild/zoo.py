"""Where the models are listed, and inputs for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, Any]
"""A model, and an example input for it."""

MODELS: dict[str, Callable[[], Built]] = {}
"""``family/name`` -> a function that makes the model. No weights are fetched."""


def images(size: int = 64, batch: int = 2, channels: int = 3) -> torch.Tensor:
    """Random images."""
    return torch.randn(batch, channels, size, size)


def words(vocabulary: int = 99, length: int = 12) -> torch.Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, vocabulary, (2, length))


def add(family: str, name: str, build: Callable[[], Built]) -> None:
    """List a model."""
    MODELS[f"{family}/{name}"] = build
