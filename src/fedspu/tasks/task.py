"""What a task is: a loss, a metric, and what targets and outputs must look like."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from fedspu.errors import (
    DataError,
    FedSPUError,
    ModelError,
    SettingsError,
    TrainingError,
)
from fedspu.imports import raised
from fedspu.units import shown, titled

IGNORED = -100
"""A target that is not scored (padding, unlabelled pixels), as in PyTorch's losses."""


RESERVED = frozenset(
    {
        *("round", "client", "capacity", "num_examples", "train_loss", "val_loss"),
        "loss",  # its value on validation examples would be val_loss
        *("has_stopped", "bytes_initial", "bytes_down", "bytes_up", "index_bytes"),
        "clients",  # participating_clients
    }
)
"""Names that no metric may have: records use them for something else."""


class Loss(Protocol):
    """A loss of outputs and targets: the mean over the targets, or the ``sum``."""

    def __call__(
        self, output: Tensor, target: Tensor, /, *, reduction: str = "mean"
    ) -> Tensor:
        """The loss."""


@dataclass(frozen=True)
class Metric:
    """How good outputs are: sums over examples, made into one number at the end.

    ``measure`` gives a few sums for a batch; those of all batches are added up, and
    ``value`` makes one number of them. The name is part of names in records, as in
    ``personal_accuracy``.
    """

    name: str
    measure: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor], float]
    is_higher_better: bool = True
    is_share: bool = False  # from 0 to 1, shown in percent

    def __post_init__(self) -> None:
        """Refuse a record that lacks a function, or whose name records cannot use."""
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise SettingsError(
                f"metric {self.name!r}: expected a name of letters, digits and _, like "
                "error_rate; it is part of names in records"
            )
        if self.name in RESERVED:
            raise SettingsError(
                f"metric {self.name!r}: records use this name for something else; "
                f"choose another, like own_{self.name}"
            )
        for name in ("measure", "value"):
            _refuse_uncallable(f"metric {self.name!r}", name, getattr(self, name))

    @property
    def title(self) -> str:
        """Its name as people read it."""
        return titled(self.name)

    def show(self, value: float | None) -> str:
        """A value as text; a dash if there is none."""
        return shown(value, self.is_share)


@dataclass(frozen=True)
class Task:
    """What is learned.

    ``loss`` takes a model's output and the targets of a batch.
    ``targets`` gives targets in the form that the loss takes, and raises a DataError
    for those it cannot learn; it is given the inputs too.
    ``num_outputs`` says how many outputs a model needs, from all inputs and targets.
    ``check_output`` says what is wrong with an output for some targets, if anything; it
    is also given the number of outputs needed.
    ``count`` says how many targets of a batch are scored.
    ``has_classes``: targets are class numbers, from 0 upwards.
    ``strata`` gives each example a class, to divide and to stratify by; if it is None,
    examples are divided at random or by owner.
    ``make_targets`` makes targets from inputs, for data without targets.
    ``weigh_classes`` gives, for the task's loss, one in which all classes in some
    targets weigh equally; the loss then takes ``weight``, as PyTorch's own do.
    ``log_shares`` gives, for a client's targets and a number of classes, the logarithm
    of each class's share of them, to add to the class's score while training.
    ``can_augment``: targets stay right if training images are flipped or moved.
    """

    name: str
    loss: Loss
    metric: Metric
    targets: Callable[[Tensor, Tensor], Tensor]
    num_outputs: Callable[[Tensor, Tensor], int]
    check_output: Callable[[Tensor, Tensor, int], str | None]
    strata: Callable[[Tensor], Tensor] | None
    count: Callable[[Tensor], int] = len
    has_classes: bool = False
    make_targets: Callable[[Tensor], Tensor] | None = None
    weigh_classes: Callable[[Loss, Tensor], Loss] | None = None
    log_shares: Callable[[Tensor, int], Tensor] | None = None
    can_augment: bool = True

    def __post_init__(self) -> None:
        """Refuse a record that lacks an answer."""
        if not isinstance(self.name, str) or not self.name:
            raise SettingsError(f"a task's name is {self.name!r}; expected a text")
        for name in (*MUST_ANSWER, *MAY_ANSWER):
            value = getattr(self, name)
            if name in MUST_ANSWER or value is not None:
                _refuse_uncallable(f"task {self.name!r}", name, value)
        if not isinstance(self.metric, Metric):
            raise SettingsError(
                f"task {self.name!r}: its metric is {self.metric!r}; expected a "
                "fedspu.tasks.task.Metric; docs/tasks.md has an example"
            )


MUST_ANSWER = ("loss", "targets", "num_outputs", "check_output", "count")
MAY_ANSWER = ("strata", "make_targets", "weigh_classes", "log_shares")


def _refuse_uncallable(whose: str, name: str, value: Any) -> None:
    if not callable(value):
        raise SettingsError(
            f"{whose}: its {name} is {value!r}; expected a function; docs/tasks.md "
            "says which"
        )


# Outputs, losses and metrics in use ---------------------------------------------------


def check_output(task: Task, output: Any, y: Tensor, num_outputs: int) -> None:
    """Refuse a model whose output for these targets the task cannot use."""
    if not isinstance(output, Tensor):
        kind = type(output).__name__
        raise ModelError(
            f"the model returned a {kind}; expected a tensor{_how(output)}"
        )
    if problem := task.check_output(output, y, num_outputs):
        raise ModelError(problem)


def check_metric(task: Task, output: Tensor, y: Tensor) -> None:
    """Refuse a metric that measures means, as sums over examples are added up.

    ``output`` is for two examples.
    """
    tried = [y]
    if task.has_classes and output.dim() == 2:
        tried.append(output.argmax(1))  # where all is right, a sum is not 0
    for targets in tried:
        parts = (slice(0, 2), slice(0, 1), slice(1, 2))
        try:
            whole, first, second = (
                task.metric.measure(output[part], targets[part]).double()
                for part in parts
            )
            is_sum = torch.allclose(first + second, whole, rtol=1e-3, equal_nan=True)
        except Exception:  # judging says what is wrong
            return
        if not is_sum:
            raise SettingsError(
                f"task {task.name!r}: its metric measured {whole.tolist()} for two "
                f"examples, but {first.tolist()} and {second.tolist()} for each alone; "
                "expected sums over examples, which are added up: let measure sum and "
                "value divide, as in docs/tasks.md"
            )


def _how(output: Any) -> str:
    """How a model's forward can return the tensor that is in its output."""
    if isinstance(output, tuple | list):
        output = dict(enumerate(output))
    inside = output if isinstance(output, dict) else {}
    for place, value in inside.items():
        if isinstance(value, Tensor):
            return (
                f": let forward return one of its parts alone, like output[{place!r}]"
            )
    return ": let forward return the scores alone"


def checked_loss(task: Task, loss: Loss) -> Loss:
    """A loss of a task that says in one line what is wrong if it fails."""

    def checked(
        output: Tensor, target: Tensor, /, *, reduction: str = "mean"
    ) -> Tensor:
        value: Any = _asked(task, "loss", loss, output, target, reduction=reduction)
        if not isinstance(value, Tensor) or value.numel() != 1:
            how = (
                ": the mean over the targets or, with reduction='sum', their sum; pass "
                "reduction on to PyTorch's loss"
            )
            raise _no_number(task, "loss", value, how)
        return value

    return checked


def add_measured(task: Task, sums: Tensor, output: Tensor, y: Tensor) -> Tensor:
    """The metric's sums with those of a batch added."""
    found = _asked(task, "metric", task.metric.measure, output, y)
    if not isinstance(found, Tensor):
        raise TrainingError(
            f"task {task.name!r}: its metric measured {_in_short(found)}; expected a "
            "tensor of sums"
        )
    total: Tensor = _asked(task, "metric", torch.add, sums, found)
    return total


def value_of(task: Task, sums: Tensor) -> float:
    """The value of a task's metric; refuses what is no number."""
    value = _asked(task, "metric", task.metric.value, sums)
    is_number = isinstance(value, Real)
    if not is_number and not (isinstance(value, Tensor) and value.numel() == 1):
        raise _no_number(task, "metric", value)
    return float(value)


def _asked(
    task: Task, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """What a function of a task returns; an exception of it becomes one clear line."""
    try:
        return function(*args, **kwargs)
    except FedSPUError:
        raise
    except Exception as error:  # the user's own code
        raise TrainingError(
            f"task {task.name!r}: its {name} raised {raised(error)}; docs/tasks.md "
            "says what it is given and must return"
        ) from error


def _no_number(task: Task, name: str, value: Any, how: str = "") -> TrainingError:
    return TrainingError(
        f"task {task.name!r}: its {name} returned {_in_short(value)}; expected one "
        f"number{how}"
    )


def _in_short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


# For several tasks --------------------------------------------------------------------


def ratio(sums: Tensor) -> float:
    """The first sum over the second."""
    return float(sums[0] / sums[1])


def sums_of(*values: Any) -> Tensor:
    """Sums in the form in which metrics are added up, float64."""
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def dtype_of(values: Tensor) -> str:
    """The dtype of values, in one word."""
    return str(values.dtype).removeprefix("torch.")


def refuse_negative(y: Tensor, but: int | None = None) -> None:
    """Refuse numbers below 0, except ``but``, which marks what is not scored."""
    wrong = y < 0 if but is None else (y < 0) & (y != but)
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        place = ", ".join(map(str, first))
        besides = "" if but is None else f", or {but} where nothing is scored"
        raise DataError(
            f"y[{place}] = {int(y[first])}; expected class numbers from 0 "
            f"upwards{besides}"
        )


MOST_CLASSES = 100_000
"""A model has an output for each class, up to the largest label."""


def refuse_large(y: Tensor, most: int = MOST_CLASSES, what: str = "class") -> None:
    """Refuse numbers from ``most`` upwards: each takes memory for all below it."""
    if y.numel() > 0 and int(y.max()) >= most:
        first = tuple((y >= most).nonzero()[0].tolist())
        place = ", ".join(map(str, first))
        raise DataError(
            f"y[{place}] = {int(y[first])}; expected {what} numbers below {most:,}; "
            "number them from 0 upwards"
        )


def refuse_unscored(y: Tensor) -> None:
    """Refuse an example without any scored target."""
    is_scored = (y != IGNORED).flatten(1).any(1)
    if not bool(is_scored.all()):
        first = int((~is_scored).nonzero()[0])
        raise DataError(f"no target of example {first} is scored; remove it")


def num_scored(y: Tensor) -> int:
    """How many targets are scored."""
    return int((y != IGNORED).sum())
