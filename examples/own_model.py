"""Your own model and your own arrays: a run, and a client's model at the end."""

import numpy as np
import torch
from torch import nn

import fedspu

rng = np.random.default_rng(0)
centres = rng.normal(size=(4, 20)).astype(np.float32)
y = rng.integers(0, 4, size=800)
x = centres[y] + rng.normal(size=(800, 20)).astype(np.float32)


def build() -> nn.Module:
    """Any module that gives one score per class; new at each call."""
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))


settings = {
    "rounds": 10,
    "clients.number": 10,
    "clients.per_round": 5,
    "clients.capacities": [0.25, 0.5, 1.0],
    "data.alpha": 0.5,
    "train.lr": 0.05,
}
run = fedspu.simulate(settings, model=build, data=(x, y))
print(run)
for p, accuracy in run.summary["personal_accuracy_by_capacity"].items():
    print(f"clients with p = {p}: {accuracy:.1%}")

net = run.personal_model(client=3)  # a ready module, in eval mode
print("client 3 says:", net(torch.from_numpy(x[:5])).argmax(1).tolist())
