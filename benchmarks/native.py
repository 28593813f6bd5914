"""Small networks as compiled code, beside PyTorch alone and our own use of it.

    python benchmarks/native.py [MODEL ...] [--repetitions 30]

CPU time on one thread; all ways to train a model take turns, and each number is the
ratio of medians. *Epoch*: steps as in a run, with loss and SGD inside. *Own loop*: a
user's loop, with PyTorch's loss, autograd and SGD. *Judging*: as in a run, with 500
examples, beside the same by PyTorch. *Peak*: the most memory that a step of the own
loop holds, beside a dense step of PyTorch.
"""

import argparse
import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu import models
from fedspu.partial.chain.native.calls import Sgd
from fedspu.partial.chain.native.models import make_training
from fedspu.profile.peak_memory import step_bytes
from fedspu.tasks import find_task
from fedspu.training.evaluation import evaluate

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int


def lenet() -> nn.Module:
    """LeNet-5 for images of 28 x 28."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, 10),
    )


def built_in(name: str, classes: int) -> Callable[[], nn.Module]:
    """A model that ships with fedspu."""
    return lambda: models.build(name, classes)


CASES = {
    "cifar10": Case(built_in("cifar10", 10), (3, 32, 32), 10, 128),
    "emnist": Case(built_in("emnist", 62), (1, 28, 28), 62, 16),
    "speech": Case(built_in("speech", 35), (1, 32, 32), 35, 16),
    "lenet": Case(lenet, (1, 28, 28), 10, 32),
    "mlp": Case(built_in("mlp", 10), (1, 28, 28), 10, 32),
}
STEPS = 4


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--repetitions", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shares = " | ".join(f"p = {p}" for p in SHARES)
    print(f"| model | what | dense | {shares} |")
    print("|---" * (3 + len(SHARES)) + "|")
    for name in given.models:
        for line in rows(name, CASES[name], given.repetitions):
            print(line, flush=True)


def rows(name: str, case: Case, repetitions: int) -> list[str]:
    """The table's rows for one model."""
    torch.manual_seed(0)
    model = case.build().train()
    x = torch.randn(STEPS * case.batch, *case.shape)
    y = torch.randint(case.classes, (len(x),))
    batch = x[: case.batch], y[: case.batch]
    neurons = fedspu.map_neurons(model, x[:2])
    with ExitStack() as stack:
        dense = copy.deepcopy(model)
        ways: dict[str, Callable[[], Any]] = {
            "dense": loop(dense, list(dense.parameters()), x, y, case.batch)
        }
        peaks = {
            "dense": step_bytes(
                dense, dense.parameters(), x[: case.batch], y[: case.batch]
            ).peak
        }
        for p in SHARES:
            active = fedspu.choose_random(neurons, p, fedspu.stream(0, "neurons"))
            for kernels in ("native", "torch"):
                own = copy.deepcopy(model)
                context = fedspu.partial_training(own, neurons, active, kernels=kernels)
                trainable = stack.enter_context(context)
                ways[f"{kernels} {p}"] = loop(own, trainable, x, y, case.batch)
                peaks[f"{kernels} {p}"] = step_bytes(own, trainable, *batch).peak
            ways[f"epoch {p}"] = epoch(
                copy.deepcopy(model), neurons, active, x, y, case
            )
        times = measured(ways, repetitions)
    base = times["dense"]

    def row(what: str, first: str, values: list[str]) -> str:
        return f"| {name} | {what} | {first} | {' | '.join(values)} |"

    step = f"{1e3 * base / STEPS:.2f} ms"
    yours = [
        row(what, step, [f"{times[f'{way} {p}'] / base:.3f}" for p in SHARES])
        for what, way in (
            ("epoch", "epoch"),
            ("own loop", "native"),
            ("own loop by PyTorch", "torch"),
        )
    ]
    held = [f"{peaks[f'native {p}'] / peaks['dense']:.2f}" for p in SHARES]
    yours.append(row("peak", f"{peaks['dense'] / 1e6:.1f} MB", held))
    judged = judging(case, repetitions)
    return [*yours, row("judging", "", [*[""] * (len(SHARES) - 1), f"{judged:.3f}"])]


def loop(
    model: nn.Module, trainable: list[Tensor], x: Tensor, y: Tensor, batch: int
) -> Callable[[], None]:
    """Some steps of a loop in plain PyTorch."""
    optimizer = torch.optim.SGD(trainable, lr=0.01)

    def steps() -> None:
        for positions in torch.arange(len(x)).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[positions]), y[positions]).backward()
            optimizer.step()

    return steps


def epoch(
    model: nn.Module,
    neurons: fedspu.Neurons,
    active: fedspu.Active,
    x: Tensor,
    y: Tensor,
    case: Case,
) -> Callable[[], float]:
    """The same steps in one call."""
    training = make_training(model, neurons.blocks(active), x, y, Sgd(0.01), False)
    assert training is not None
    return lambda: training.epoch(iter(torch.arange(len(x)).split(case.batch)), 0)


def judging(case: Case, repetitions: int) -> float:
    """The time to judge a model, beside the same by PyTorch."""
    model, task = case.build(), find_task("classification")
    x = torch.randn(500, *case.shape)
    y = torch.randint(case.classes, (500,))
    ways = {
        kernels: lambda kernels=kernels: evaluate(model, x, y, task, kernels)
        for kernels in ("native", "torch")
    }
    times = measured(ways, repetitions)
    return times["native"] / times["torch"]


def measured(ways: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """The median CPU time of each, all in turns, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repetitions + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if i > 0:
                times[name].append(time.process_time() - start)
    return {name: median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
