"""A task of your own: numbers to predict, with another loss than the usual one."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu.tasks.regression import regression

rng = np.random.default_rng(0)
x = rng.normal(size=(600, 8)).astype(np.float32)
y = (x[:, :3].sum(1) + 0.1 * rng.normal(size=600)).astype(np.float32)


def huber(output: Tensor, y: Tensor, /, *, reduction: str = "mean") -> Tensor:
    """Outliers pull less than with squared distances."""
    return F.huber_loss(output.view_as(y), y, reduction=reduction)


robust = replace(regression, name="robust", loss=huber)

settings = {
    "rounds": 10,
    "clients.number": 8,
    "clients.per_round": 4,
    "clients.capacities": [0.5, 1.0],
    "train.lr": 0.05,
}
run = fedspu.simulate(
    settings,
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
    data=(x, y),
    task=robust,
)
print(run)  # the mean absolute error: lower is better
print(run.personal_model(client=0)(torch.from_numpy(x[:2])).flatten().tolist())
