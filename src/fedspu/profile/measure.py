"""Time and memory of a training step by p: what ``fedspu profile`` prints."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu.errors import ModelError
from fedspu.neurons.calls import call, undisturbed
from fedspu.neurons.choose import choose_random
from fedspu.neurons.table import Active, Neurons
from fedspu.partial.chain.native.models import takes, why_not
from fedspu.partial.context import partial_training, paths
from fedspu.partial.weight import Mode, Saves
from fedspu.profile.flops import flop_limits
from fedspu.profile.paper import paper_bytes
from fedspu.profile.peak_memory import Loss, StepBytes, step_bytes
from fedspu.random_streams import stream

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)

TURN = 0.03
"""About how many seconds a setting takes steps before it is another one's turn."""

FEWEST = 3
"""At least this many repetitions are made, even if the patience has run out."""


FAR = 2.0
"""What costs so many times as much as it may will not fit at any other p either."""


@dataclass(frozen=True)
class StepSetting:
    """How much of a model trains, and how."""

    p: float
    mode: Mode
    saves: Saves

    @property
    def way(self) -> str:
        """How it trains, in words."""
        return f"{self.mode} {self.saves}"


@dataclass(frozen=True)
class Costs:
    """What a step costs, and what theory says about it.

    ``seconds`` is the median. ``flop_limit`` is a share of the dense step's products;
    None if these cannot be counted. ``paper_bytes`` is the paper's formula.
    """

    seconds: float
    held: StepBytes
    flop_limit: float | None
    paper_bytes: int


@dataclass(frozen=True)
class Row(Costs):
    """What a step costs in one setting.

    ``paths`` says how the gradient of each parameter was computed.
    """

    setting: StepSetting
    paths: dict[str, str]


@dataclass(frozen=True)
class Budget:
    """What a step may cost at most: bytes at its peak, and seconds."""

    num_bytes: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Choice:
    """The largest p that fits a budget, and what it costs.

    If ``fits`` is False, no p fits, and this is the smallest one that was tried.
    ``seconds`` is None if the budget does not limit time.
    """

    setting: StepSetting
    fits: bool
    peak: int
    seconds: float | None


@dataclass(frozen=True)
class Profile:
    """What steps of one model cost, and how that was measured.

    Settings took turns of ``steps`` steps, ``repetitions`` times; ``clock`` is ``cpu``
    time with one thread, ``wall`` time with more. ``why_not_native`` says why compiled
    code did not run the model; None if it did.
    """

    dense: Costs
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]
    steps: int
    repetitions: int
    clock: str
    why_not_native: str | None = None


def profile(
    model: nn.Module,
    neurons: Neurons,
    x: Any,
    y: Any,
    *,
    shares: Sequence[float] = SHARES,
    modes: Sequence[Mode] = ("exact",),
    saves: Sequence[Saves] = ("fast", "lean"),
    loss: Loss = F.cross_entropy,
    budget: Budget | None = None,
    repetitions: int = 15,
    threads: int = 1,
    patience: float = 60.0,
    watch: Callable[[str], None] = lambda text: None,
) -> Profile:
    """What steps of plain SGD on ``loss(model(x), y)`` cost in each setting.

    Works on a copy. All settings take turns in this one process. After ``patience``
    seconds no more repetitions start, unless there are still too few; ``watch`` is
    called with what is being done. With a budget, the largest p that fits is searched
    for each mode and each of ``saves``.
    """
    ways = [(mode, save) for mode in modes for save in saves]
    listed = sorted(set(shares))
    settings = [StepSetting(p, *way) for way in ways for p in listed]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "the model has no learnable parameter: none has requires_grad=True"
        )
    with undisturbed():
        torch.set_num_threads(threads)
        stepper = Stepper(model, neurons, x, y, loss)
        clock = time.process_time if threads == 1 else time.perf_counter
        stopwatch = Stopwatch(stepper, clock, repetitions, patience, watch)
        seconds = stopwatch.seconds([None, *settings])
        taken = stopwatch.taken
        watch("measuring memory, counting multiplications …")
        theory = {p: stepper.theory(p) for p in {1.0, *listed}}
        rows = {s: stepper.row(s, seconds[s], theory[s.p]) for s in settings}
        choices = []
        for way in ways if budget is not None else ():
            watch(f"finding the largest p that fits: {' '.join(way)} …")
            known = {p: rows[StepSetting(p, *way)] for p in listed}
            choices.append(_choice(stepper, stopwatch, budget or Budget(), way, known))
        return Profile(
            dense=Costs(seconds[None], stepper.held(None), *theory[1.0].of("exact")),
            rows=tuple(rows.values()),
            choices=tuple(choices),
            steps=stopwatch.steps,
            repetitions=taken,
            clock="cpu" if threads == 1 else "wall",
            why_not_native=_why_not_native(model, x),
        )


def _why_not_native(model: nn.Module, x: Any) -> str | None:
    if not takes(x):
        return "its input is not a batch of float32 images or vectors"
    return why_not(model, tuple(x.shape[1:]))


@dataclass(frozen=True)
class Theory:
    """What needs no measurement: it depends only on the share and the mode."""

    flop_limits: dict[Mode, float]
    paper_bytes: int

    def of(self, mode: Mode) -> tuple[float | None, int]:
        """The FLOP limit and the paper's formula."""
        return self.flop_limits.get(mode), self.paper_bytes


class Stepper:
    """A copy of a model and a batch, to take steps with: in any setting, or in none."""

    def __init__(
        self, model: nn.Module, neurons: Neurons, x: Any, y: Any, loss: Loss
    ) -> None:
        self.model = copy.deepcopy(model).train()
        self.neurons, self.x, self.y, self.loss = neurons, x, y, loss

    @contextmanager
    def training(self, setting: StepSetting | None) -> Iterator[list[Tensor]]:
        """Yield what trains; without a setting, the whole model as in plain PyTorch."""
        if setting is None:
            yield [p for p in self.model.parameters() if p.requires_grad]
            return
        with partial_training(
            self.model,
            self.neurons,
            self.active(setting.p),
            mode=setting.mode,
            saves=setting.saves,
        ) as trainable:
            yield trainable

    def active(self, p: float) -> Active:
        """Random neurons, the same in every call."""
        return choose_random(self.neurons, p, stream(0, "neurons"))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of training."""
        optimizer.zero_grad()
        self.loss(call(self.model, self.x), self.y).backward()
        optimizer.step()

    def held(self, setting: StepSetting | None) -> StepBytes:
        """The bytes of a step."""
        with self.training(setting) as trainable:
            return step_bytes(self.model, trainable, self.x, self.y, self.loss)

    def row(self, setting: StepSetting, seconds: float, theory: Theory) -> Row:
        """All that a step costs, given its seconds and its theory."""
        with self.training(setting) as trainable:
            held = step_bytes(self.model, trainable, self.x, self.y, self.loss)
            taken = paths(self.model)
        return Row(seconds, held, *theory.of(setting.mode), setting, taken)

    def theory(self, p: float) -> Theory:
        """What theory says about a p; FLOP limits do not depend on the batch size."""
        active = self.active(p)
        few = self.x[:2] if isinstance(self.x, Tensor) else self.x
        return Theory(
            flop_limits=flop_limits(self.model, self.neurons, active, few) or {},
            paper_bytes=paper_bytes(self.model, self.neurons, active, self.x),
        )


class Stopwatch:
    """Times steps: settings in turn, the median of the repetitions."""

    def __init__(
        self,
        stepper: Stepper,
        clock: Callable[[], float],
        repetitions: int,
        patience: float,
        watch: Callable[[str], None],
    ) -> None:
        self.stepper, self.clock, self.watch = stepper, clock, watch
        self.repetitions, self.patience = repetitions, patience
        self.taken = 0

    @cached_property
    def steps(self) -> int:
        """How many steps make a turn: more for a fast model."""
        return max(1, min(100, round(TURN / self.turn(None, 1))))

    def turn(self, setting: StepSetting | None, steps: int) -> float:
        """Seconds per step, after a first one that is not counted."""
        with self.stepper.training(setting) as trainable:
            # A learning rate of zero costs the same, and leaves all values as they are.
            optimizer = torch.optim.SGD(trainable, lr=0.0)
            self.stepper.step(optimizer)
            start = self.clock()
            for _ in range(steps):
                self.stepper.step(optimizer)
            return (self.clock() - start) / steps

    def seconds(
        self, settings: Iterable[StepSetting | None]
    ) -> dict[StepSetting | None, float]:
        """The median seconds of a step in each setting."""
        times: dict[StepSetting | None, list[float]] = {s: [] for s in settings}
        start = time.monotonic()
        for i in range(1, self.repetitions + 1):
            self.watch(f"measuring time: repetition {i} of {self.repetitions}")
            for setting, listed in times.items():
                listed.append(self.turn(setting, self.steps))
            self.taken = i
            is_late = time.monotonic() - start > self.patience
            if is_late and i >= FEWEST:
                break
        return {setting: median(listed) for setting, listed in times.items()}


# The largest p that fits --------------------------------------------------------------


def largest_share(
    fits: Callable[[float], bool],
    shares: Iterable[float],
    steps: Iterable[int],
    is_hopeless: Callable[[float], bool],
) -> float | None:
    """The largest p that fits: among ``shares`` first, then above it on finer grids.

    ``steps`` are the steps of these grids, in hundredths. Costs need not rise with p,
    so every grid is tried from the top down. But if even the smallest p of all costs
    far too much (``is_hopeless``), no other is tried.
    """
    low, high = 0.0, 1.01
    grids = [list(shares), *([k / 100 for k in range(n, 101, n)] for n in steps)]
    if is_hopeless(min(p for grid in grids for p in grid)):
        return None
    for grid in grids:
        for p in sorted((p for p in grid if low < p < high), reverse=True):
            if fits(p):
                low = p
                break
            high = p
    return low or None


def choose(
    budget: Budget,
    shares: Sequence[float],
    peak: Callable[[float], int],
    seconds: Callable[[float], float],
) -> tuple[float, bool]:
    """The largest p within the budget and True; else the smallest tried and False.

    A step is timed only if the budget limits time, and only if its memory fits.
    """
    tried = []

    def within(p: float, times: float) -> bool:
        tried.append(p)
        if budget.num_bytes is not None and peak(p) > times * budget.num_bytes:
            return False
        return budget.seconds is None or seconds(p) <= times * budget.seconds

    def fits(p: float) -> bool:
        return within(p, 1)

    # Times are too noisy for steps of a hundredth.
    steps = (5, 1) if budget.seconds is None else (5,)
    found = largest_share(fits, shares, steps, lambda p: not within(p, FAR))
    return (min(tried), False) if found is None else (found, True)


def _choice(
    stepper: Stepper,
    stopwatch: Stopwatch,
    budget: Budget,
    way: tuple[Mode, Saves],
    known: Mapping[float, Row],
) -> Choice:
    """The largest p that fits in one ``way``; ``known`` has the rows measured."""

    @cache
    def peak(p: float) -> int:
        row = known.get(p)
        return row.held.peak if row else stepper.held(StepSetting(p, *way)).peak

    @cache
    def seconds(p: float) -> float:
        setting = StepSetting(p, *way)
        row = known.get(p)
        return row.seconds if row else stopwatch.seconds([setting])[setting]

    p, fits = choose(budget, list(known), peak, seconds)
    is_timed = budget.seconds is not None
    return Choice(StepSetting(p, *way), fits, peak(p), seconds(p) if is_timed else None)
