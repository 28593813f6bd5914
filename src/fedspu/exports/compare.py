"""Compare a model with its exported file, on real examples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from fedspu.errors import ModelError
from fedspu.imports import raised
from fedspu.tasks.task import Task, add_measured, value_of

BATCH = 64

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""By output type, the largest difference allowed, as a share of the largest output."""
USUAL_TOLERANCE = 1e-4

Outputs = Callable[[Tensor], Tensor]
"""Gives the outputs for a batch: a model, or a file in its own runtime."""


@dataclass(frozen=True)
class Checked:
    """What was compared, and how far apart the two were.

    ``tolerance`` is what ``largest_difference`` may be at most; 0 means bit for bit.
    ``values`` are the metric of the model and of the file, ``is_share`` says whether it
    is a share; ``changed_predictions`` is None for tasks without classes.
    """

    num_examples: int
    batch_sizes: tuple[int, ...]
    largest_difference: float
    tolerance: float
    metric: str
    is_share: bool
    values: tuple[float, float]
    changed_predictions: int | None


@torch.no_grad()
def compare(
    model: nn.Module, exported: Outputs, task: Task, x: Tensor, y: Tensor, exact: bool
) -> Checked:
    """Run both on all examples, and refuse outputs that differ too much.

    Examples go through in batches, and then one alone and three: the batch size must be
    free. Outputs must be equal if ``exact``, else within the tolerance.
    """
    _refuse_random(model, x)
    difference, largest, changed = 0.0, 0.0, 0
    sums = [torch.zeros(1, dtype=torch.float64)] * 2
    sizes = set()
    share = USUAL_TOLERANCE
    for positions, is_counted in _batches(len(x)):
        ours = _outputs(model, x[positions], "the model")
        theirs = _outputs(exported, x[positions], "the exported file")
        _check_form(ours, theirs, len(positions))
        sizes.add(len(positions))
        difference = max(difference, _difference(ours, theirs))
        largest = max(largest, _largest(ours))
        share = TOLERANCE.get(ours.dtype, USUAL_TOLERANCE)
        if is_counted:
            target = y[positions]
            sums = [
                add_measured(task, found, output, target)
                for found, output in zip(sums, (ours, theirs), strict=True)
            ]
            if task.has_classes:
                changed += int((ours.argmax(1) != theirs.argmax(1)).sum())
    allowed = 0.0 if exact else max(share * largest, 1e-6)
    if not difference <= allowed:
        wanted = "the same bits" if exact else f"at most {allowed:.2g}"
        raise ModelError(
            f"the exported file gives other outputs than the model: they differ by up "
            f"to {difference:.2g}, expected {wanted}; nothing was written"
        )
    return Checked(
        num_examples=len(x),
        batch_sizes=tuple(sorted(sizes)),
        largest_difference=difference,
        tolerance=allowed,
        metric=task.metric.title,
        is_share=task.metric.is_share,
        values=(value_of(task, sums[0]), value_of(task, sums[1])),
        changed_predictions=changed if task.has_classes else None,
    )


def _batches(count: int) -> Iterator[tuple[Tensor, bool]]:
    """Positions of all examples batch by batch, True; then of one and of three."""
    for positions in torch.arange(count).split(BATCH):
        yield positions, True
    for size in (1, 3):
        yield torch.arange(size) % count, False


def _outputs(run: Outputs, x: Tensor, what: str) -> Tensor:
    try:
        found = run(x)
    except Exception as error:  # the user's own code, or a runtime
        raise ModelError(
            f"{what} failed on {len(x)} examples: {raised(error)}"
        ) from error
    if not isinstance(found, Tensor):
        raise ModelError(f"{what} gave a {type(found).__name__}; expected a tensor")
    return found


def _refuse_random(model: nn.Module, x: Tensor) -> None:
    first = _outputs(model, x[:BATCH], "the model")
    again = _outputs(model, x[:BATCH], "the model")
    if _difference(first, again) != 0:
        raise ModelError(
            "the model's outputs change from one call to the next, also in eval mode, "
            "so no file can be checked against it; remove what is random in its "
            "forward, such as F.dropout without training=self.training"
        )


def _check_form(ours: Tensor, theirs: Tensor, count: int) -> None:
    forms = [(tuple(output.shape), output.dtype) for output in (ours, theirs)]
    if forms[0] != forms[1]:
        raise ModelError(
            f"for {count} examples the model gives {forms[0][0]} of {forms[0][1]} and "
            f"the exported file {forms[1][0]} of {forms[1][1]}; nothing was written"
        )


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; infinite if one has no number where the other has one."""
    apart = (ours.double() - theirs.double()).abs()
    apart[(ours == theirs) | (ours.isnan() & theirs.isnan())] = (
        0  # also equal infinities
    )
    value = float(apart.max()) if apart.numel() else 0.0
    return value if isfinite(value) else float("inf")


def _largest(output: Tensor) -> float:
    """The largest finite output, whatever its sign."""
    finite = output[output.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0
