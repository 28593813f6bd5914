"""What a task is: a loss, a metric, and what targets and outputs must look like."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedspu.errors import DataError, ModelError
from fedspu.units import shown, titled

IGNORED = -100
"""A target that is not scored (padding, unlabelled pixels), as in PyTorch's losses."""


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
    ``weigh_classes`` gives a loss in which all classes in some targets weigh equally.
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
    weigh_classes: Callable[[Tensor], Loss] | None = None


def ratio(sums: Tensor) -> float:
    """The first sum over the second."""
    return float(sums[0] / sums[1])


def check_output(task: Task, output: Any, y: Tensor, num_outputs: int) -> None:
    """Refuse a model whose output for these targets the task cannot use."""
    if not isinstance(output, Tensor):
        raise ModelError(
            f"the model returned a {type(output).__name__}; expected a tensor"
        )
    if problem := task.check_output(output, y, num_outputs):
        raise ModelError(problem)


def sums_of(*values: Any) -> Tensor:
    """Sums in the form in which metrics are added up, float64."""
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def dtype_of(values: Tensor) -> str:
    """The dtype of values, in one word."""
    return str(values.dtype).removeprefix("torch.")


# For several tasks --------------------------------------------------------------------


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


def refuse_unscored(y: Tensor) -> None:
    """Refuse an example without any scored target."""
    is_scored = (y != IGNORED).flatten(1).any(1)
    if not bool(is_scored.all()):
        first = int((~is_scored).nonzero()[0])
        raise DataError(f"no target of example {first} is scored; remove it")


def num_scored(y: Tensor) -> int:
    """How many targets are scored."""
    return int((y != IGNORED).sum())
