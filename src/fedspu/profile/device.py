"""What a turn costs on this device at each p, and the largest p that it can take."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from fedspu.neurons.calls import undisturbed
from fedspu.neurons.choose import choose_random
from fedspu.neurons.table import Neurons
from fedspu.partial.context import partial_training
from fedspu.profile.measure import FAR, largest_share
from fedspu.profile.peak_memory import step_bytes
from fedspu.random_streams import stream
from fedspu.settings import TrainSettings
from fedspu.tasks.task import Task
from fedspu.training.augmentation import make_augmentation
from fedspu.training.epochs import LocalTraining, cut, train

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Always measured, so that the table says how costs depend on p."""

STEP = 5
"""Between them, p is searched for in steps of this many hundredths."""

REPETITIONS = 7
"""Times are medians of this many."""

LONG_ENOUGH = 0.05
"""About how many seconds a repetition takes; at least one batch, at most an epoch."""

STATES = {"adam": 2, "adamw": 2}
"""How many numbers an optimizer keeps for each that trains; sgd: one with momentum."""


@dataclass(frozen=True)
class Limits:
    """What a turn may cost at most: bytes of a step, seconds; None: no limit."""

    num_bytes: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class TurnCosts:
    """What a turn costs at one p: bytes at the peak of a step, and seconds."""

    p: float
    num_bytes: int
    seconds: float

    def limited_by(self, limits: Limits, times: float = 1) -> tuple[str, ...]:
        """Which limits it does not keep, even if they were so many times as high."""
        found = []
        if limits.num_bytes is not None and self.num_bytes > times * limits.num_bytes:
            found.append("memory")
        if limits.seconds is not None and self.seconds > times * limits.seconds:
            found.append("time")
        return tuple(found)


@dataclass(frozen=True)
class Proposal:
    """All p that were measured, ascending, and the largest that keeps the limits.

    ``capacity`` is None if none does; ``num_steps`` are the steps of one turn.
    """

    capacity: float | None
    rows: tuple[TurnCosts, ...]
    num_steps: int
    num_examples: int

    @property
    def next_larger(self) -> TurnCosts | None:
        """The smallest p measured above the proposed one: what was too much."""
        above = [row for row in self.rows if row.p > (self.capacity or 0)]
        return above[0] if above else None


def propose(
    model: nn.Module,
    neurons: Neurons,
    x: Tensor,
    y: Tensor,
    task: Task,
    settings: TrainSettings,
    *,
    limits: Limits,
    shares: Sequence[float] | None = None,
    watch: Callable[[str], None] = lambda text: None,
) -> Proposal:
    """The largest p at which a turn on these training examples keeps the limits.

    Every p is measured by training a copy of the model as in a run. It is one of
    ``shares``; without any, it is searched for in steps of 0.05.
    """
    device = Device(model, neurons, x, y, task, settings)
    rows: dict[float, TurnCosts] = {}

    def measure(listed: Sequence[float]) -> None:
        watch(f"measuring p = {', '.join(f'{p:g}' for p in listed)}")
        rows.update((row.p, row) for row in device.costs(listed))

    def fits(p: float) -> bool:
        if p not in rows:
            measure([p])
        return not rows[p].limited_by(limits)

    def is_hopeless(p: float) -> bool:
        if p not in rows:
            measure([p])
        return bool(rows[p].limited_by(limits, FAR))

    with undisturbed():
        measure(shares or SHARES)
        steps = () if shares else (STEP,)
        found = largest_share(fits, shares or SHARES, steps, is_hopeless)
    listed = tuple(rows[p] for p in sorted(rows))
    return Proposal(found, listed, device.num_steps, len(x))


class Device:
    """A copy of a model and a client's examples, to measure turns with."""

    def __init__(
        self,
        model: nn.Module,
        neurons: Neurons,
        x: Tensor,
        y: Tensor,
        task: Task,
        settings: TrainSettings,
    ) -> None:
        self.model, self.neurons = copy.deepcopy(model), neurons
        self.x, self.y, self.task = x, y, task
        # A learning rate of zero costs the same, and leaves all values as they are.
        self.settings = settings.model_copy(update={"lr": 0.0, "epochs": 1})
        sizes = [len(batch) for batch in cut(torch.arange(len(x)), settings.batch_size)]
        self.num_batches = len(sizes)
        self.num_steps = settings.epochs * len(sizes)
        self.largest = max(sizes)

    def costs(self, listed: Sequence[float]) -> list[TurnCosts]:
        """What a turn costs at each p, measured by training; they take turns."""
        count = self._enough(max(listed))
        times: dict[tuple[float, int], list[float]] = {
            (p, n): [] for p in listed for n in (1, count)
        }
        for p, n in times:
            self._train(p, n)  # the first one also prepares things
        for _ in range(REPETITIONS):
            for (p, n), taken in times.items():
                taken.append(self._train(p, n))
        seconds = {of: median(taken) for of, taken in times.items()}
        return [
            TurnCosts(
                p, self._bytes(p), self._turn(seconds[p, 1], seconds[p, count], count)
            )
            for p in listed
        ]

    def _turn(self, one: float, many: float, count: int) -> float:
        """Seconds of a turn, from those of one batch and of ``count`` batches.

        One batch also has what a turn does only once, before its first step.
        """
        step = max(0.0, many - one) / (count - 1) if count > 1 else one
        return one + (self.num_steps - 1) * step

    def _bytes(self, p: float) -> int:
        """The peak of one step with the largest batch, and what the optimizer keeps."""
        train = self.settings
        x, y = self.x[: self.largest], self.y[: self.largest]
        loss = self._training(p, x, y).loss
        self.model.train()
        with partial_training(
            self.model,
            self.neurons,
            self._active(p),
            train.gradient,
            saves=train.saves,
            kernels=train.kernels,
        ) as trainable:
            peak = step_bytes(self.model, trainable, x, y, loss).peak
            states = STATES.get(train.optimizer, int(train.momentum > 0))
            return peak + states * sum(t.nbytes for t in trainable)

    def _enough(self, p: float) -> int:
        """How many batches make a repetition: more for a fast model."""
        self._train(p, 1)
        one = max(self._train(p, 1), 1e-6)
        return max(1, min(self.num_batches, round(LONG_ENOUGH / one)))

    def _train(self, p: float, num_batches: int) -> float:
        """CPU seconds of training this many batches, as in a run."""
        count = num_batches * self.settings.batch_size
        local = self._training(p, self.x[:count], self.y[:count])
        start = time.process_time()
        train(local)
        return time.process_time() - start

    def _training(self, p: float, x: Tensor, y: Tensor) -> LocalTraining:
        return LocalTraining(
            model=self.model,
            neurons=self.neurons,
            active=self._active(p),
            x=x,
            y=y,
            task=self.task,
            settings=self.settings,
            rng=stream(0, "batches"),
            augmentation=make_augmentation(self.settings, stream(0, "augmentation")),
        )

    def _active(self, p: float) -> dict[str, Tensor]:
        return choose_random(self.neurons, p, stream(0, "neurons"))
