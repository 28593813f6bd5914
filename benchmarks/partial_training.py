"""What a partial training step costs, as a ratio to plain PyTorch's dense step.

    python benchmarks/partial_training.py [MODEL ...] [--mode exact|truncated]

All variants of a model run interleaved in this one process, one thread, CPU time,
median of the repetitions. Memory is what is held for a step: parameters, leaves that
are copies, gradients of the leaves, and every tensor saved for backward, each storage
once; the batch itself is not counted.
"""

import argparse
import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from models import Transformer, mlp, mobilenet, resnet18
from torch import Tensor, nn

import fedspu
from fedspu.core.weight import Mode, Saves
from fedspu.models import CIFARNet, EMNISTNet, SpeechNet

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Case:
    """A model and the batch it trains on."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int


CASES = {
    "emnist": Case(EMNISTNet, (16, 1, 28, 28), 62),
    "speech": Case(SpeechNet, (16, 1, 32, 32), 35),
    "cifar10": Case(CIFARNet, (128, 3, 32, 32), 10),
    "mlp": Case(mlp, (32, 1, 28, 28), 10),
    "resnet18": Case(resnet18, (32, 3, 32, 32), 10),
    "transformer": Case(Transformer, (16, 64, 64), 10),
    "mobilenet": Case(mobilenet, (16, 3, 32, 32), 10),
}


class Variant:
    """One way to train, ready to take steps."""

    def __init__(self, model: nn.Module, trainable: list[Tensor], x: Tensor, y: Tensor):
        self.model, self.trainable, self.x, self.y = model, trainable, x, y
        self.optimizer = torch.optim.SGD(trainable, lr=0.01)
        self.seconds: list[float] = []

    def step(self) -> None:
        """One step of SGD."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def timed(self, steps: int) -> None:
        """Several steps, on the clock."""
        start = time.process_time()
        for _ in range(steps):
            self.step()
        self.seconds.append((time.process_time() - start) / steps)

    def median(self) -> float:
        """The middle one of the times taken."""
        return sorted(self.seconds)[len(self.seconds) // 2]

    def held(self, own: list[Tensor]) -> int:
        """Bytes of weights, gradients and saved tensors; each storage once."""
        self.optimizer.zero_grad()
        storages: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        count(self.x)
        given = dict(storages)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        for tensor in (*own, *self.trainable):
            count(tensor.detach())
        gradients = sum(t.grad.nbytes for t in self.trainable if t.grad is not None)
        return sum(storages.values()) - sum(given.values()) + gradients


def variants(
    case: Case, mode: Mode, saves: Saves, stack: ExitStack
) -> dict[str, Variant]:
    """Dense, dense in channels_last, and partial at each p."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*case.shape, generator=generator)
    y = torch.randint(case.classes, case.shape[:1], generator=generator)
    model = case.build().train()
    neurons = fedspu.map_neurons(model, x[:2])
    dense = copy.deepcopy(model)
    found = {"dense": Variant(dense, list(dense.parameters()), x, y)}
    last: Any = torch.channels_last
    there: Any = copy.deepcopy(model)
    there = there.to(memory_format=last)
    x_there = x.contiguous(memory_format=last) if x.dim() == 4 else x
    found["channels_last"] = Variant(there, list(there.parameters()), x_there, y)
    for p in SHARES:
        active = fedspu.choose_random(neurons, p, fedspu.stream(0, "neurons"))
        own = copy.deepcopy(model)
        context = fedspu.partial_training(own, neurons, active, mode, saves=saves)
        found[f"p = {p:g}"] = Variant(own, stack.enter_context(context), x, y)
    return found


def measure(name: str, mode: Mode, saves: Saves, repetitions: int) -> None:
    """Print one model's row of time, and one of memory."""
    with ExitStack() as stack:
        found = variants(CASES[name], mode, saves, stack)
        owns = {
            key: [t.full if hasattr(t, "full") else t for t in v.model.parameters()]
            for key, v in found.items()
        }
        for variant in found.values():
            variant.timed(1)
        steps = max(1, round(0.05 / found["dense"].seconds.pop()))
        for _ in range(repetitions):
            for variant in found.values():
                variant.timed(steps)
        memory = {key: v.held(owns[key]) for key, v in found.items()}
        dense = found["dense"].median()
        times = [f"{v.median() / dense:.2f}" for v in found.values()]
        saved = [f"{100 * (1 - m / memory['dense']):.0f} %" for m in memory.values()]
    print(f"| {name} ({1e3 * dense:.1f} ms) | time | {' | '.join(times)} |")
    size = memory["dense"] / 1e6
    print(f"| {name} ({size:.1f} MB) | memory saved | {' | '.join(saved)} |")


def main() -> None:
    """Measure the models named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[[], *CASES], metavar="MODEL")
    parser.add_argument("--mode", default="exact", choices=["exact", "truncated"])
    parser.add_argument("--saves", default="fast", choices=["fast", "lean"])
    parser.add_argument("--repetitions", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["dense", "channels_last", *(f"p = {p:g}" for p in SHARES)]
    print(f"| model | {given.mode}, {given.saves} | {' | '.join(columns)} |")
    print("|" + "---|" * (len(columns) + 2))
    for name in given.models or CASES:
        measure(name, given.mode, given.saves, given.repetitions)


if __name__ == "__main__":
    main()
