"""Play every method for three rounds, and print what came of it as JSON.

Run in a process of its own, with the settings of ``ENVIRONMENT``: they keep PyTorch to
instructions that most machines have, so that one file of hashes serves them all.

    python -m tests.golden.play > tests/golden/golden.json
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu.models.mlp import MLP
from fedspu.models.paper import DigitsNet

ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
}

METHODS: dict[str, dict[str, Any]] = {
    "fedspu": {},
    "fjord": {},
    "fjord@original": {"method.name": "fjord", "method.reading": "original"},
    "fjord@distilled": {
        "method.name": "fjord",
        "method.reading": "original",
        "method.distillation": True,
    },
    "hermes": {},
    "fedmp": {},
    "prunefl": {},
    "fedselect": {},
    "feddrop": {},
    "heterofl": {},
    "fedavg": {},
    "fedavg@finetune=1": {"method.name": "fedavg", "method.finetune": 1},
    "local": {},
    "small": {},
    "fedrolex": {},
    "ditto": {},
    "apfl": {},
    "fedper": {},
    "fedrep": {},
    "fedbn": {},
    "fedala": {},
}

SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "clients.number": 20,
    "clients.per_round": 3,
    "clients.capacities": [0.2, 0.4, 0.6, 0.8, 1.0],
    "train.epochs": 1,
    "train.kernels": "torch",
    "judge.every": 2,
    "judge.clients": 6,
    "seed": 5,
}


TWO_WORKERS = ("fedspu", "hermes", "feddrop", "ditto", "apfl")
"""Methods that are also played by two workers; engines have tests of their own."""


class WideNet(MLP):
    """More than 128 neurons, so that a random choice travels as its key."""

    def __init__(self) -> None:
        super().__init__(num_inputs=64, widths=(160, 40))


class DoubleNet(DigitsNet):
    """A network in float64: a last bit that differs hardly spreads in three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Class scores in float64."""
        return super().forward(x.double())


_TWO = (("two workers", DigitsNet, {"workers": 2}),)


def bits() -> dict[str, str]:
    """A hash of records and models for every method, by its label and circumstance."""
    early = {"early_stopping.on": True, "train.momentum": 0.5}
    return {
        f"{label}, {when}": _hash(_play(label, model, **given))
        for label in METHODS
        for when, model, given in (
            ("one worker", DigitsNet, {"workers": 1}),
            *(_TWO if label in TWO_WORKERS else ()),
            ("wide, early stopping", WideNet, {"workers": 1, **early}),
        )
    }


def values() -> dict[str, list[float]]:
    """Losses, scores and the size of weights in float64, for every method."""
    found = {}
    for label in METHODS:
        run = _play(label, DoubleNet, workers=1)
        lines = [
            value
            for line in run.rounds
            for value in (line["train_loss"], line["personal_accuracy"])
        ]
        state = run.last.federation.global_state
        size = sum(float(t.double().abs().sum()) for t in state.values())
        found[label] = [*lines, size]
    return found


def _play(label: str, model: type[nn.Module], **given: Any) -> fedspu.Run:
    named = METHODS[label] or {"method.name": label}
    return fedspu.simulate({**SETTINGS, **named, **given}, model=model)


def _hash(run: fedspu.Run) -> str:
    digest = hashlib.sha256()
    for line in run.rounds:
        digest.update(json.dumps(list(_numbers(line))).encode())
    for state in _states(run):
        for name, tensor in sorted(state.items()):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _numbers(line: Mapping[str, Any]) -> Iterator[Any]:
    """What a round's record says; under whatever names, in this order."""
    yield line["round"]
    yield line["clients"]
    yield line["train_loss"]
    for name in ("personal_accuracy", "participating_accuracy", "global_accuracy"):
        yield line[name]
    yield line["stopped_clients"]
    for name in ("bytes_initial", "bytes_down", "bytes_up", "index_bytes"):
        yield line[name]


def _states(run: fedspu.Run) -> Iterator[dict[str, Tensor]]:
    yield run.last.federation.global_state
    for client in sorted(run.last.federation.last):
        yield dict(run.personal_model(client).state_dict())


def machine() -> str:
    """A hash of plain PyTorch arithmetic: equal on machines that round alike."""
    rng = np.random.default_rng(0)

    def noise(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    x, weight, wide = noise(16, 3, 9, 9), noise(8, 3, 3, 3), noise(40, 8 * 81)
    weight.requires_grad_()
    wide.requires_grad_()
    y = F.relu(F.conv2d(x, weight, padding=1)).flatten(1)
    y = (y - y.mean(0)) / (y.var(0) + 1e-5).sqrt()
    loss = F.cross_entropy(F.linear(y, wide), torch.arange(16))
    loss.backward()
    digest = hashlib.sha256()
    for tensor in (loss, weight.grad, wide.grad):
        assert tensor is not None
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(
        {"machine": machine(), "bits": bits(), "values": values()},
        sys.stdout,
        indent=1,
    )
