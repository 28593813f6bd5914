"""What the tests of local training share: a small net, examples, local epochs."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspu import Active, map_neurons
from fedspu.settings import TrainSettings
from fedspu.tasks.classification import classification
from fedspu.tasks.task import Task
from fedspu.training.epochs import LocalTraining
from tests.oracles.zoo import chain, noise


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def mlp() -> nn.Module:
    """A hidden layer of eight neurons, in float64."""
    return chain(fc1=nn.Linear(6, 8), relu=nn.ReLU(), fc2=nn.Linear(8, 3)).double()


def data(count: int) -> tuple[Tensor, Tensor]:
    """Noise, and labels of three classes."""
    return noise(count, 6).double(), torch.arange(count) % 3


def local(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    active: Active | None = None,
    seed: int = 3,
    task: Task = classification,
    **settings: Any,
) -> LocalTraining:
    """Local epochs of a model, of all its neurons or some; settings by name."""
    neurons = map_neurons(model, x)
    return LocalTraining(
        model=model,
        neurons=neurons,
        active=neurons.everything() if active is None else active,
        x=x,
        y=y,
        task=task,
        settings=TrainSettings.model_validate(settings),
        rng=rng(seed),
    )
