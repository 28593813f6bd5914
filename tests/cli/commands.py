"""What the tests of commands share: how one is typed, and what to type about."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from fedspu.cli.console import LOADING
from fedspu.federation.client import Client

NETS = """
import time

from torch import nn


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, x):
        time.sleep(0.01)
        return self.net(x)


class Says(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.net, self.function = build(), function

    def forward(self, x):
        return self.function(self.net(x))


def fails(scores):
    raise RuntimeError("first line\\nsecond line")


def flat(): return Says(lambda scores: scores[:, 0])
def pair(): return Says(lambda scores: (scores, scores))
def failing(): return Says(fails)
def narrower(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
def few(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
def narrow(): return nn.Sequential(nn.Flatten(), nn.Linear(7, 3))
def number(): return 3
def nothing(): pass
def raising(): return {}['no such key']
def needs_more(width): return build()
constant = 3
"""

CONFIG = """
model = "NETS:build"
rounds = 3
workers = 1

[data]
name = "arrays:f.npz"
alpha = 1.0

[clients]
number = 6
per_round = 3
capacities = [0.3, 0.5, 1.0]

[train]
epochs = 1
batch_size = 8
lr = 0.1
"""


BEGINNINGS = (
    *(LOADING, "preparing: data, model", "run 1 of ", "building the model"),
    *("mapping its neurons", "measuring ", "finding the largest p", "writing the "),
    "reading the data",
)


@dataclass(frozen=True)
class Result:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> list[str]:
        """The lines beside the result, but for those that say what it does."""
        return [x for x in self.err.splitlines() if not x.startswith(BEGINNINGS)]

    @property
    def error(self) -> str:
        """The one line that says what is wrong."""
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(f"{lines[0]}\n")
        return lines[0].removeprefix("error: ")


Command = Callable[..., Result]


def in_process_of_its_own(*words: str, **kwargs: Any) -> subprocess.Popen[str]:
    # Whoever runs the tests in the background has Ctrl-C ignored.
    heeding = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen(
        [sys.executable, "-c", "from fedspu.cli import main; main()", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **{"stdout": subprocess.PIPE, **heeding, **kwargs},
    )


def finished(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=100)
    return Result(process.returncode, out, err.removeprefix(f"{LOADING}\n"))


def interrupt_at_turn(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C in that turn of the whole run; once."""
    original, turns = Client.take_turn, iter(range(10**6))

    def turn(*args: Any) -> Any:
        if next(turns) == number:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(Client, "take_turn", turn)
