"""What a partial training step costs, as a ratio to plain PyTorch's dense step.

    python benchmarks/partial_training.py [MODEL ...] [--repetitions 30]

All variants of a model take turns in this one process, one thread, and so share one
state of the allocator; time is CPU time, the median of the turns. Memory saved is of
what is held for a step: parameters, buffers, leaves that are copies, gradients, and
every tensor kept for the backward pass, each storage once; the batch itself is not
counted. Peak saved is of what a process that does nothing else takes at most in a step,
as the system sees it, the weights included.
"""

import argparse
import copy
import ctypes
import multiprocessing
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from models import (
    Transformer,
    bert,
    group_norm_resnet,
    llama,
    mlp,
    mobilenet,
    resnet18,
)
from torch import Tensor, nn

import fedspu
from fedspu.models.paper import CIFARNet, EMNISTNet, SpeechNet
from fedspu.partial.chain.native.models import why_not
from fedspu.profile.peak_memory import step_bytes

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
COLUMNS = ("dense", "channels_last", *(f"p = {p:g}" for p in SHARES))

EXACT, LEAN, TRUNCATED = "exact, fast", "exact, lean", "truncated, lean"


@dataclass(frozen=True)
class Case:
    """A model, the batch it trains on, and the settings to measure."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    settings: tuple[str, ...] = (EXACT, LEAN)
    num_tokens: int = 0  # examples are tokens, of so many kinds


CASES = {
    "emnist": Case(EMNISTNet, (16, 1, 28, 28), 62),
    "speech": Case(SpeechNet, (16, 1, 32, 32), 35),
    "cifar10": Case(CIFARNet, (128, 3, 32, 32), 10),
    "mlp": Case(mlp, (32, 1, 28, 28), 10, (EXACT,)),
    "resnet18": Case(resnet18, (32, 3, 32, 32), 10, (EXACT, LEAN, TRUNCATED)),
    "transformer": Case(Transformer, (16, 64, 64), 10),
    "mobilenet": Case(mobilenet, (16, 3, 32, 32), 10),
    "bert": Case(bert, (16, 64), 10, num_tokens=1000),
    "llama": Case(llama, (16, 64), 10, num_tokens=1000),
    "bert-wide": Case(partial(bert, is_wide=True), (16, 64), 10, num_tokens=1000),
    "llama-wide": Case(partial(llama, is_wide=True), (16, 64), 10, num_tokens=1000),
    "resnet-gn": Case(group_norm_resnet, (32, 3, 32, 32), 10),
}


class Variant:
    """One way to train, ready to take steps."""

    def __init__(
        self, model: nn.Module, trainable: list[Tensor], x: Tensor, y: Tensor
    ) -> None:
        self.model, self.trainable, self.x, self.y = model, trainable, x, y
        self.optimizer = torch.optim.SGD(trainable, lr=0.01)

    def step(self) -> None:
        """One step of SGD."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def timed(self, steps: int) -> float:
        """Seconds of a step, of several."""
        start = time.process_time()
        for _ in range(steps):
            self.step()
        return (time.process_time() - start) / steps

    def held(self) -> int:
        """Bytes that a step holds."""
        return step_bytes(self.model, self.trainable, self.x, self.y).total


@dataclass(frozen=True)
class Ground:
    """What all variants of a case share."""

    model: nn.Module
    neurons: fedspu.Neurons
    x: Tensor
    y: Tensor
    kernels: Any

    @staticmethod
    def of(case: Case) -> "Ground":
        """A model and a batch, the same for everyone."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(*case.shape, generator=generator)
        if case.num_tokens:
            x = torch.randint(1, case.num_tokens, case.shape, generator=generator)
        y = torch.randint(case.classes, case.shape[:1], generator=generator)
        model = case.build().train()
        neurons = fedspu.map_neurons(model, x[:2])
        # native.py measures chains as compiled code.
        is_chain = not case.num_tokens and why_not(model, case.shape[1:]) is None
        return Ground(model, neurons, x, y, "torch" if is_chain else "auto")

    def variant(self, setting: str, column: str, stack: ExitStack) -> Variant:
        """One way to train; it lasts as long as the stack."""
        x, model = self.x, copy.deepcopy(self.model)
        if column == "channels_last":
            last: Any = torch.channels_last
            model = model.to(memory_format=last)
            x = x.contiguous(memory_format=last) if x.dim() == 4 else x
        if not column.startswith("p"):
            return Variant(model, list(model.parameters()), x, self.y)
        mode, saves = setting.split(", ")
        share = float(column.removeprefix("p = "))
        active = fedspu.choose_random(self.neurons, share, fedspu.stream(0, "neurons"))
        context = fedspu.partial_training(
            model,
            self.neurons,
            active,
            mode,  # type: ignore[arg-type]
            saves=saves,  # type: ignore[arg-type]
            kernels=self.kernels,
        )
        return Variant(model, stack.enter_context(context), x, self.y)


_MMAP_THRESHOLD = -3  # as malloc.h has it


def tell_peak(ground: Ground, setting: str, column: str, line: Connection) -> None:
    """In a process of its own: how much a step takes."""
    torch.set_num_threads(1)
    # Large blocks go back to the system when they are freed: no gaps are counted.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    with ExitStack() as stack:
        line.send(peak_bytes(ground.variant(setting, column, stack)))


def peak_bytes(variant: Variant) -> int:
    """The bytes that the process takes for the weights and, at most, for a step."""
    weights = sum(p.nbytes for p in variant.model.parameters())
    variant.step()
    variant.optimizer.zero_grad()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    before = _in_status("VmRSS")
    variant.step()
    return weights + _in_status("VmHWM") - before


def _in_status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise KeyError(name)


Key = tuple[str, str]  # setting and column


def peaks_of(ground: Ground, keys: list[Key]) -> dict[Key, int]:
    """The peak of each variant, each in a new process."""
    forking = multiprocessing.get_context("fork")
    found: dict[Key, int] = {}
    for key in keys:
        line, there = forking.Pipe()
        process = forking.Process(target=tell_peak, args=(ground, *key, there))
        process.start()
        found[key] = line.recv()
        process.join()
    return found


def seconds_of(variants: dict[Key, Variant], repetitions: int) -> dict[Key, float]:
    """The median seconds of a step of each variant."""
    for variant in variants.values():
        variant.step()
    steps = max(1, round(0.05 / next(iter(variants.values())).timed(1)))
    turns: dict[Key, list[float]] = {key: [] for key in variants}
    for _ in range(repetitions):
        for key, variant in variants.items():
            turns[key].append(variant.timed(steps))
    return {key: median(seconds) for key, seconds in turns.items()}


def measure(name: str, repetitions: int) -> None:
    """Print the rows of one model: time and memory of each setting."""
    case = CASES[name]
    ground, first = Ground.of(case), ("", "dense")
    keys = [first, ("", "channels_last")]
    keys += [(setting, c) for setting in case.settings for c in COLUMNS[2:]]
    peaks = peaks_of(ground, keys)
    with ExitStack() as stack:
        variants = {key: ground.variant(*key, stack) for key in keys}
        times = seconds_of(variants, repetitions)
        sizes = {key: variant.held() for key, variant in variants.items()}
    for setting in case.settings:
        row = [(setting, c) if c.startswith("p") else ("", c) for c in COLUMNS]
        ratios = [f"{times[key] / times[first]:.2f}" for key in row]
        _print_row(f"{name} ({1e3 * times[first]:.1f} ms)", setting, "time", *ratios)
        for what, found in (("memory saved", sizes), ("peak saved", peaks)):
            saved = [f"{100 * (1 - found[key] / found[first]):.0f} %" for key in row]
            _print_row(f"{name} ({found[first] / 1e6:.1f} MB)", setting, what, *saved)


def _print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure the models named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[[], *CASES], metavar="MODEL")
    parser.add_argument("--repetitions", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    _print_row("model", "setting", "what", *COLUMNS)
    _print_row(*["---"] * (3 + len(COLUMNS)))
    for name in given.models or CASES:
        measure(name, given.repetitions)


if __name__ == "__main__":
    main()
