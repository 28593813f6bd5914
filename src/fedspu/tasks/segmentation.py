"""Segmentation: a class number for each pixel; mean intersection over union."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedspu.errors import DataError
from fedspu.tasks.classification import balanced, largest_and_one
from fedspu.tasks.task import (
    IGNORED,
    Metric,
    Task,
    dtype_of,
    num_scored,
    refuse_large,
    refuse_negative,
    refuse_unscored,
)

MOST_CLASSES = 4_096  # the metric counts every pair of them
CELLS = 2**22  # examples times classes, counted at a time


def _pixel_classes(x: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point() or y.dim() < 3 or y.shape[1:] != x.shape[2:]:
        raise DataError(
            f"x has shape {tuple(x.shape)}, y {tuple(y.shape)} of {dtype_of(y)}; "
            "expected a class number for each pixel: (n, channels, height, width) and "
            "(n, height, width)"
        )
    y = y.long()
    refuse_negative(y, but=IGNORED)
    refuse_large(y, MOST_CLASSES)
    refuse_unscored(y)
    return y


def _confusion(output: Tensor, y: Tensor) -> Tensor:
    """The confusion matrix, flat: how often each class was predicted as each class."""
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
    """The most common class among the scored pixels of each example."""
    num_classes = int(y.max()) + 1
    found = []
    for pixels in y.flatten(1).split(max(1, CELLS // num_classes)):
        is_scored = pixels != IGNORED
        counts = torch.zeros(len(pixels), num_classes)
        counts.scatter_add_(1, pixels.clamp(min=0), is_scored.float())
        found.append(counts.argmax(1))
    return torch.cat(found)


segmentation = Task(
    name="segmentation",
    loss=F.cross_entropy,  # its ignore_index is IGNORED
    metric=Metric("iou", _confusion, _mean_iou, is_share=True),
    targets=_pixel_classes,
    num_outputs=largest_and_one,
    check_output=_wants_maps,
    strata=_commonest,
    count=num_scored,
    has_classes=True,
    weigh_classes=balanced,
    can_augment=False,
)
