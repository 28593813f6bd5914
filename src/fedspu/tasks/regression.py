"""Regression: numbers to predict; mean absolute error."""

import torch.nn.functional as F
from torch import Tensor

from fedspu.errors import DataError
from fedspu.tasks.task import (
    Metric,
    Task,
    ratio,
    sums_of,
)

NUM_BINS = 10
"""How many equally full bins of numbers there are, to divide and stratify by."""


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
    return sums_of((output.view_as(y) - y).abs().sum(), y.numel())


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
    """The bin of each example by its first number; all bins are equally full."""
    first = y if y.dim() == 1 else y[:, 0]
    rank = first.argsort(stable=True).argsort(stable=True)
    return rank * NUM_BINS // len(rank)


regression = Task(
    name="regression",
    loss=_distances,
    metric=Metric("mae", _errors, ratio, is_higher_better=False),
    targets=_numbers,
    num_outputs=_numbers_each,
    check_output=_wants_numbers,
    strata=_bins,
    count=Tensor.numel,
)
