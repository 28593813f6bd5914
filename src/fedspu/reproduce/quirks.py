"""Faults of the authors' released code, one at a time, to see what each explains.

They are methods and settings like any other; nothing else in fedspu knows about them.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fedspu.methods.fedspu import fedspu
from fedspu.methods.method import Trained, Turn, local_epochs
from fedspu.neurons.blocks import state_of
from fedspu.reproduce.printed import METHODS, Dataset
from fedspu.training.epochs import LocalTraining
from fedspu.training.last_layer import last_layers

HERE = "fedspu.reproduce.quirks"


def train_and_leak(turn: Turn, local: LocalTraining) -> Trained:
    """The usual epochs; then the validation examples pass through in train mode.

    So the running statistics of batch norms take them in. With ``data.split = "paper"``
    these are the test examples.
    """
    trained = local_epochs(turn, local)
    x, _ = turn.validation()
    local.model.train()
    with torch.no_grad(), local.dropout():
        for start in range(0, len(x), local.settings.batch_size):
            batch = x[start : start + local.settings.batch_size]
            if len(batch) > 1:
                local.model(batch)
    state = state_of(local.model)
    return Trained(trained.loss, sent=state, own=state)


leaking = replace(
    fedspu,
    name=f"{HERE}:leaking",
    in_words=(
        fedspu.in_words[0],
        f"{fedspu.in_words[1]}; then norms take in the validation examples",
        *fedspu.in_words[2:],
    ),
    train=train_and_leak,
)
"""FedSPU that validates in train mode, as the released code does."""

local_head = replace(
    fedspu,
    name=f"{HERE}:local_head",
    in_words=(f"{fedspu.in_words[0]}, but not of the last", *fedspu.in_words[1:]),
    stays=partial(last_layers, number=1),
)
"""FedSPU whose last layer stays with the client: in the released code hardly any of its
entries come back from the server."""


@dataclass(frozen=True)
class Quirk:
    """A fault: which methods show it, beside which that do not."""

    title: str
    why: str
    with_it: tuple[str, ...]
    without_it: tuple[str, ...]
    settings: dict[str, Any]


RATES: dict[Dataset, dict[str, float]] = {
    "emnist": {
        "fedspu": 5e-4,
        "hermes": 1e-3,
        "fjord": 1e-3,
        "fedmp": 2e-4,
        "prunefl": 2e-4,
    },
    "speech": {
        "fedspu": 1e-3,
        "hermes": 1e-3,
        "fjord": 1e-3,
        "fedmp": 2e-4,
        "prunefl": 2e-4,
    },
    "cifar10": {
        "fedspu": 0.005,
        "hermes": 0.005,
        "fjord": 0.005,
        "fedmp": 0.005,
        "prunefl": 0.005,
    },
}
"""Learning rates of the released code; by the paper all methods have the same."""

NAMES = ("leak", "head", "rates")


def quirk(name: str, dataset: Dataset) -> Quirk:
    """A fault of the released code, for one data set."""
    if name == "leak":
        return Quirk(
            "norms learn from test examples",
            "FedSPU alone validates in train mode, on the test examples",
            (f"{HERE}:leaking",),
            ("fedspu",),
            {"data.split": "paper"},
        )
    if name == "head":
        return Quirk(
            "the last layer stays local",
            "merging and averaging touch a few entries of the last layer only",
            (f"{HERE}:local_head",),
            ("fedspu",),
            {},
        )
    rates = RATES[dataset]
    return Quirk(
        "methods have different learning rates",
        "the released scripts set others than the paper",
        tuple(f"{m}@train.lr={rates[m]:g}" for m in METHODS if m in rates),
        tuple(m for m in METHODS if m in rates),
        {},
    )
