"""What is learned: a loss, a metric, and what targets and outputs must look like.

A task is a record. Classification, regression, language modelling and segmentation are
here; one of your own is another ``Task``, named as ``package.module:task``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedspu.errors import DataError, ModelError, SettingsError
from fedspu.imports import find_object, is_place
from fedspu.units import shown, titled

IGNORED = -100
"""A target that is not scored (padding, unlabelled pixels), as in PyTorch's losses."""

NUM_BINS = 10
"""Equally full bins of numbers, for dividing and stratifying regression data."""


class Loss(Protocol):
    """A loss of outputs and targets: their mean, or their ``sum``."""

    def __call__(
        self, output: Tensor, target: Tensor, /, *, reduction: str = "mean"
    ) -> Tensor:
        """The loss."""


@dataclass(frozen=True)
class Metric:
    """How good outputs are: sums over examples, and their value in the end.

    ``measure`` gives a few sums for a batch; those of all batches are added, and
    ``value`` makes one number of them. The name is part of the names in records:
    ``personal_accuracy``.
    """

    name: str
    measure: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor], float]
    is_higher_better: bool = True
    is_share: bool = False  # from 0 to 1, shown in percent

    @property
    def title(self) -> str:
        """Its name for people."""
        return titled(self.name)

    def show(self, value: float | None) -> str:
        """A value as text; a dash if there is none."""
        return shown(value, self.is_share)


@dataclass(frozen=True)
class Task:
    """What is learned.

    ``loss`` takes a model's output and the targets of a batch.
    ``targets`` gives targets as the loss takes them, and refuses those it cannot learn
    with a DataError; it is given the inputs too.
    ``num_outputs`` says how many outputs a model needs, from all inputs and targets.
    ``check_output`` says what is wrong with an output for some targets, if anything; it
    is also given the number of outputs needed.
    ``count`` says how many targets of a batch are scored.
    ``has_classes``: targets are class numbers, from 0 upwards.
    ``strata`` gives each example a class, to divide and to stratify by; None if there
    is none: then examples are divided at random or by owner.
    ``make_targets`` makes targets of inputs, for data that has none.
    ``weigh_classes`` gives the loss in which the classes of some targets weigh equally.
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


def find_task(name: str) -> Task:
    """The task of this name, or at ``package.module:name``."""
    if is_place(name):
        found = find_object(name, "task")
        if not isinstance(found, Task):
            raise SettingsError(
                f"task = {name!r}: is a {type(found).__name__}; expected a "
                "fedspu.tasks.Task"
            )
        return found
    return TASKS[name]


def _ratio(sums: Tensor) -> float:
    return float(sums[0] / sums[1])


# Classification -----------------------------------------------------------------------


def _class_numbers(x: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point():
        raise DataError(
            f"y holds {_kind(y)}; expected integers, the class numbers; for numbers to "
            "predict use --task regression"
        )
    if y.dim() != 1:
        raise DataError(
            f"y has shape {tuple(y.shape)}; expected a class number per example, (n,)"
        )
    _refuse_negative(y)
    return y.long()


def _refuse_negative(y: Tensor, but: int | None = None) -> None:
    wrong = y < 0 if but is None else (y < 0) & (y != but)
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        place = ", ".join(map(str, first))
        besides = "" if but is None else f", or {but} where nothing is scored"
        raise DataError(
            f"y[{place}] = {int(y[first])}; expected class numbers from 0 "
            f"upwards{besides}"
        )


def _largest_and_one(x: Tensor, y: Tensor) -> int:
    return int(y.max()) + 1


def _wants_scores(output: Tensor, y: Tensor, num_outputs: int) -> str | None:
    if output.dim() != 2 or len(output) != len(y):
        return (
            f"the model returned {tuple(output.shape)} for two examples; expected "
            f"(2, {num_outputs}): one score for each class"
        )
    if output.shape[1] < num_outputs:
        return (
            f"the model has scores for {output.shape[1]} classes, and the labels go up "
            f"to {num_outputs - 1}; it needs {num_outputs} outputs"
        )
    return None


def _themselves(y: Tensor) -> Tensor:
    return y


def _right(output: Tensor, y: Tensor) -> Tensor:
    return _sums((output.argmax(1) == y).sum(), len(y))


def _balanced(y: Tensor) -> Loss:
    """Cross-entropy in which the classes that occur weigh equally in all."""
    labels = y[y != IGNORED]
    counts = torch.bincount(labels)
    weights = torch.zeros(len(counts), device=y.device)
    present = counts > 0
    weights[present] = len(labels) / (int(present.sum()) * counts[present])

    def loss(output: Tensor, target: Tensor, /, *, reduction: str = "mean") -> Tensor:
        padded = F.pad(weights, (0, output.shape[1] - len(weights))).to(output.dtype)
        return F.cross_entropy(output, target, padded, reduction=reduction)

    return loss


classification = Task(
    name="classification",
    loss=F.cross_entropy,
    metric=Metric("accuracy", _right, _ratio, is_share=True),
    targets=_class_numbers,
    num_outputs=_largest_and_one,
    check_output=_wants_scores,
    strata=_themselves,
    has_classes=True,
    weigh_classes=_balanced,
)


# Regression ---------------------------------------------------------------------------


def _numbers(x: Tensor, y: Tensor) -> Tensor:
    if y.dim() > 2:
        raise DataError(
            f"y has shape {tuple(y.shape)}; expected a number per example, (n,), or "
            "several, (n, k)"
        )
    y = y.float()
    if not bool(y.isfinite().all()):
        first = int((~y.isfinite()).view(len(y), -1).any(1).nonzero()[0])
        raise DataError(f"y[{first}] is not finite; expected numbers to predict")
    return y


def _distances(output: Tensor, y: Tensor, /, *, reduction: str = "mean") -> Tensor:
    return F.mse_loss(output.view_as(y), y.to(output.dtype), reduction=reduction)


def _errors(output: Tensor, y: Tensor) -> Tensor:
    return _sums((output.view_as(y) - y).abs().sum(), y.numel())


def _wants_numbers(output: Tensor, y: Tensor, num_outputs: int) -> str | None:
    if len(output) != len(y) or output.numel() != y.numel():
        return (
            f"the model returned {tuple(output.shape)} for two examples; expected "
            f"(2, {num_outputs}): the numbers to predict"
        )
    return None


def _numbers_each(x: Tensor, y: Tensor) -> int:
    return 1 if y.dim() == 1 else y.shape[1]


def _bins(y: Tensor) -> Tensor:
    """Equally full bins of the first number of each example."""
    first = y if y.dim() == 1 else y[:, 0]
    rank = first.argsort(stable=True).argsort(stable=True)
    return rank * NUM_BINS // len(rank)


regression = Task(
    name="regression",
    loss=_distances,
    metric=Metric("mae", _errors, _ratio, is_higher_better=False),
    targets=_numbers,
    num_outputs=_numbers_each,
    check_output=_wants_numbers,
    strata=_bins,
    count=Tensor.numel,
)


# Language modelling -------------------------------------------------------------------


def _next_tokens(x: Tensor) -> Tensor:
    """Each token's successor; nothing is scored at the end, and where it is padding.

    Padding are tokens below 0.
    """
    _refuse_pixels(x)
    after = torch.full_like(x, IGNORED)
    after[:, :-1] = torch.where(x[:, 1:] < 0, IGNORED, x[:, 1:])
    return after


def _refuse_pixels(x: Tensor) -> None:
    if x.dtype == torch.uint8:
        raise DataError(
            f"x is {tuple(x.shape)} of uint8, which is taken for pixels; expected "
            "token numbers as int64"
        )


def _tokens(x: Tensor, y: Tensor) -> Tensor:
    _refuse_pixels(x)
    if x.is_floating_point() or y.is_floating_point() or x.dim() != 2:
        raise DataError(
            f"x is {tuple(x.shape)} of {_kind(x)}, y {tuple(y.shape)} of {_kind(y)}; "
            "expected token numbers of each example, (n, length)"
        )
    if x.shape != y.shape:
        raise DataError(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}; expected one target "
            "for each token"
        )
    if bool((x < 0).any()):
        first = (x < 0).nonzero()[0].tolist()
        raise DataError(f"x{first} is below 0; expected token numbers from 0 upwards")
    _refuse_negative(y, but=IGNORED)
    _refuse_unscored(y)
    return y.long()


def _refuse_unscored(y: Tensor) -> None:
    is_scored = (y != IGNORED).flatten(1).any(1)
    if not bool(is_scored.all()):
        first = int((~is_scored).nonzero()[0])
        raise DataError(f"no target of example {first} is scored; remove it")


def _of_tokens(output: Tensor, y: Tensor, /, *, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(
        output.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def _vocabulary(x: Tensor, y: Tensor) -> int:
    return max(int(x.max()), int(y.max())) + 1


def _surprise(output: Tensor, y: Tensor) -> Tensor:
    return _sums(_of_tokens(output, y, reduction="sum"), _scored(y))


def _perplexity(sums: Tensor) -> float:
    try:
        return exp(float(sums[0] / sums[1]))
    except OverflowError:
        return float("inf")


def _scored(y: Tensor) -> int:
    return int((y != IGNORED).sum())


def _wants_tokens(output: Tensor, y: Tensor, num_outputs: int) -> str | None:
    if output.dim() != 3 or output.shape[:2] != y.shape:
        return (
            f"the model returned {tuple(output.shape)} for two examples of "
            f"{y.shape[1]} tokens; expected (2, {y.shape[1]}, {num_outputs}): a score "
            "for each token that may follow"
        )
    if output.shape[2] < num_outputs:
        return (
            f"the model has scores for {output.shape[2]} tokens, and the data has "
            f"tokens up to {num_outputs - 1}; it needs {num_outputs} outputs"
        )
    return None


language_model = Task(
    name="language-model",
    loss=_of_tokens,
    metric=Metric("perplexity", _surprise, _perplexity, is_higher_better=False),
    targets=_tokens,
    num_outputs=_vocabulary,
    check_output=_wants_tokens,
    strata=None,
    count=_scored,
    make_targets=_next_tokens,
)


# Segmentation -------------------------------------------------------------------------


def _pixel_classes(x: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point() or y.dim() < 3 or y.shape[1:] != x.shape[2:]:
        raise DataError(
            f"x has shape {tuple(x.shape)}, y {tuple(y.shape)} of {_kind(y)}; expected "
            "a class number for each pixel: (n, channels, height, width) and "
            "(n, height, width)"
        )
    y = y.long()
    _refuse_negative(y, but=IGNORED)
    _refuse_unscored(y)
    return y


def _confusion(output: Tensor, y: Tensor) -> Tensor:
    """How often each class was taken for each, flat."""
    classes = output.shape[1]
    is_scored = y != IGNORED
    pairs = y[is_scored] * classes + output.argmax(1)[is_scored]
    return torch.bincount(pairs, minlength=classes**2).double().cpu()


def _mean_iou(sums: Tensor) -> float:
    """Intersection over union, averaged over the classes that occur."""
    table = sums.view(round(len(sums) ** 0.5), -1)
    both = table.diagonal()
    either = table.sum(0) + table.sum(1) - both
    return float((both[either > 0] / either[either > 0]).mean())


def _wants_maps(output: Tensor, y: Tensor, num_outputs: int) -> str | None:
    is_map = output.dim() == y.dim() + 1 and output.shape[2:] == y.shape[1:]
    if not is_map or output.shape[1] < num_outputs:
        size = ", ".join(map(str, y.shape[1:]))
        return (
            f"the model returned {tuple(output.shape)} for two examples; expected "
            f"(2, {num_outputs}, {size}): a score for each class at each pixel"
        )
    return None


def _commonest(y: Tensor) -> Tensor:
    """The class that most scored pixels of an example have."""
    pixels = y.flatten(1)
    is_scored = pixels != IGNORED
    counts = torch.zeros(len(y), int(y.max()) + 1)
    counts.scatter_add_(1, pixels.clamp(min=0), is_scored.float())
    return counts.argmax(1)


segmentation = Task(
    name="segmentation",
    loss=F.cross_entropy,  # its ignore_index is IGNORED
    metric=Metric("iou", _confusion, _mean_iou, is_share=True),
    targets=_pixel_classes,
    num_outputs=_largest_and_one,
    check_output=_wants_maps,
    strata=_commonest,
    count=_scored,
    has_classes=True,
    weigh_classes=_balanced,
)


TASKS = {
    task.name: task
    for task in (classification, regression, language_model, segmentation)
}


def check_output(task: Task, output: Any, y: Tensor, num_outputs: int) -> None:
    """Refuse a model whose output for these targets the task cannot use."""
    if not isinstance(output, Tensor):
        raise ModelError(
            f"the model returned a {type(output).__name__}; expected a tensor"
        )
    if problem := task.check_output(output, y, num_outputs):
        raise ModelError(problem)


def _sums(*values: Any) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _kind(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")
