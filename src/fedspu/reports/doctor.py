"""What this machine has, which code runs the built-in models, and how fast."""

import time
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from fedspu import models
from fedspu.compiled.library import find
from fedspu.federation.environment import environment
from fedspu.neurons.calls import undisturbed
from fedspu.neurons.mapping import map_neurons
from fedspu.partial.chain.native.models import why_not
from fedspu.partial.context import partial_training

EXTRAS = {
    "plots": "matplotlib",
    "audio": "soundfile",
    "images": "PIL",
    "hf": "datasets",
    "flower": "flwr",
    "ray": "ray",
    "onnx": "onnx",
    "privacy": "dp_accounting",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
}
"""Optional parts, and a module that each of them needs."""

TIMED = ("digits", "emnist", "speech", "cifar10")
BATCH = 16


def look() -> dict[str, Any]:
    """All that ``fedspu doctor`` says; compiles the code for small networks first."""
    found = find()
    return {
        **environment(),
        "native": {
            "ready": found.library is not None,
            "how": found.how,
            "path": None if found.path is None else str(found.path),
        },
        "extras": {
            extra: find_spec(module) is not None for extra, module in EXTRAS.items()
        },
        "models": [_model(name) for name in TIMED],
    }


def _model(name: str) -> dict[str, Any]:
    with undisturbed():
        model = models.build(name).train()
        shape: Any = model.input_shape
        reason = why_not(model, tuple(shape))
        x, y = torch.randn(BATCH, *shape), torch.zeros(BATCH, dtype=torch.long)
        seconds = {"torch": _seconds(model, list(model.parameters()), x, y)}
        if reason is None:
            neurons = map_neurons(model, x[:2])
            everything = neurons.everything()
            with partial_training(model, neurons, everything, kernels="native") as all_:
                seconds["native"] = _seconds(model, all_, x, y)
    return {
        "model": name,
        "kernels": "native" if reason is None else "torch",
        "reason": reason,
        "seconds": seconds,
    }


def _seconds(model: nn.Module, trainable: list[Tensor], x: Tensor, y: Tensor) -> float:
    """The median CPU time of a step with a batch."""
    optimizer = torch.optim.SGD(trainable, lr=0.0)
    times = []
    for _ in range(12):
        start = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append(time.process_time() - start)
    return median(times[2:])


def machine_lines(found: dict[str, Any]) -> list[str]:
    """The machine, in a few lines."""
    native = found["native"]
    have = [extra for extra, there in found["extras"].items() if there]
    missing = [extra for extra, there in found["extras"].items() if not there]
    return [
        f"fedspu {found['fedspu']}, Python {found['python']}, PyTorch "
        f"{found['torch']}, {found['system']} {found['processor']}".strip(),
        f"native code for small networks: {native['how']}"
        + (f", in {native['path']}" if native["ready"] else "; PyTorch runs them"),
        f"extras: {', '.join(have) or 'none'}; not installed: "
        f"{', '.join(missing) or 'none'}",
    ]


def doctor_table(found: dict[str, Any]) -> Table:
    """Which code runs each model, and how long a step takes."""
    table = Table("model", "runs as", "a step", "by PyTorch")
    for row in found["models"]:
        times = {kind: f"{1e3 * s:.2f} ms" for kind, s in row["seconds"].items()}
        table.add_row(
            row["model"],
            row["kernels"] if row["reason"] is None else f"torch: {row['reason']}",
            times.get(row["kernels"], "-"),
            times["torch"],
        )
    table.caption = f"CPU time of a training step of {BATCH} examples, whole models."
    return table
