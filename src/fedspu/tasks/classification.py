"""Classification: one class number for each example; accuracy."""

from inspect import Parameter, signature

import torch
import torch.nn.functional as F
from torch import Tensor

from fedspu.errors import DataError, SettingsError
from fedspu.tasks.task import (
    IGNORED,
    Loss,
    Metric,
    Task,
    dtype_of,
    ratio,
    refuse_large,
    refuse_negative,
    sums_of,
)


def _class_numbers(x: Tensor, y: Tensor) -> Tensor:
    if y.dim() == 2 and bool(((y == 1).sum(1) == 1).all() & (y.sum(1) == 1).all()):
        raise DataError(
            f"y has shape {tuple(y.shape)}, with a single 1 in each row; expected the "
            "class numbers: y.argmax(1)"
        )
    if y.is_floating_point():
        raise DataError(
            f"y holds {dtype_of(y)}; expected integers, the class numbers; for numbers "
            "to predict use --task regression"
        )
    if y.dim() != 1:
        raise DataError(
            f"y has shape {tuple(y.shape)}; expected a class number per example, (n,)"
        )
    refuse_negative(y)
    refuse_large(y)
    return y.long()


def largest_and_one(x: Tensor, y: Tensor) -> int:
    """One output for each class up to the largest label."""
    return int(y.max()) + 1


def _wants_scores(output: Tensor, y: Tensor, num_outputs: int) -> str | None:
    if output.dim() != 2 or len(output) != len(y):
        return (
            f"the model returned {tuple(output.shape)} for two examples; expected "
            f"(2, {num_outputs}): one score for each class"
        )
    if output.shape[1] < num_outputs:
        return (
            f"the model has scores for {output.shape[1]} classes, but the labels go up "
            f"to {num_outputs - 1}; give it {num_outputs} outputs, or number labels "
            "from 0 upwards: y = np.unique(y, return_inverse=True)[1]"
        )
    return None


def _themselves(y: Tensor) -> Tensor:
    return y


def _right(output: Tensor, y: Tensor) -> Tensor:
    return sums_of((output.argmax(1) == y).sum(), len(y))


def balanced(loss: Loss, y: Tensor) -> Loss:
    """A loss in which all classes in ``y`` have the same total weight.

    ``loss`` must take ``weight``, a number for each class, as PyTorch's own do.
    """
    if not _takes_weight(loss):
        raise SettingsError(
            "its loss takes no class weights; give it an argument weight, as "
            "F.cross_entropy has, or leave the setting out"
        )
    labels = y[y != IGNORED]
    counts = torch.bincount(labels)
    weights = torch.zeros(len(counts), device=y.device)
    present = counts > 0
    weights[present] = len(labels) / (int(present.sum()) * counts[present])

    def weighed(
        output: Tensor, target: Tensor, /, *, reduction: str = "mean"
    ) -> Tensor:
        padded = F.pad(weights, (0, output.shape[1] - len(weights))).to(output.dtype)
        return loss(output, target, weight=padded, reduction=reduction)  # type: ignore[call-arg]  # it takes weight

    return weighed


def _takes_weight(loss: Loss) -> bool:
    try:
        arguments = signature(loss).parameters
    except ValueError:  # some callables have no signature; then the call is the test
        return True
    takes_any = any(a.kind is Parameter.VAR_KEYWORD for a in arguments.values())
    return takes_any or "weight" in arguments


def log_shares(y: Tensor, num_classes: int) -> Tensor:
    """The logarithm of each class's share of ``y`` and of one more example of each.

    One more, so that no share is 0; this is Laplace's rule of succession.
    """
    counts = torch.bincount(y, minlength=num_classes).double() + 1
    return (counts / counts.sum()).log()


classification = Task(
    name="classification",
    loss=F.cross_entropy,
    metric=Metric("accuracy", _right, ratio, is_share=True),
    targets=_class_numbers,
    num_outputs=largest_and_one,
    check_output=_wants_scores,
    strata=_themselves,
    has_classes=True,
    weigh_classes=balanced,
    log_shares=log_shares,
)
