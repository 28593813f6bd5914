"""The common form of all data sets."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fedspu.compiled.rows import scaled_rows
from fedspu.errors import DataError
from fedspu.tasks.task import Task


@dataclass(frozen=True)
class Scaling:
    """How bytes become floats: (byte / 255 - mean) / deviation, for each channel.

    Mean and deviation are fixed numbers, or come only from training examples.
    """

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    def apply(self, x: Tensor) -> Tensor:
        """Bytes (n, channels, ...) as scaled float32; everything else unchanged."""
        if x.dtype != torch.uint8:
            return x
        shape = (-1, *[1] * (x.dim() - 2))
        mean, deviation = torch.tensor(self.mean), torch.tensor(self.deviation)
        scaled = x.float().div_(255)
        return scaled.sub_(mean.view(shape)).div_(deviation.view(shape))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples and their targets.

    ``x`` is float32, int64 if the examples are tokens, or uint8 if they are bytes; only
    ``take`` scales these, so large data sets stay as small as their files. ``y`` is
    int64 or floats, or ``NO_TARGETS``. ``num_classes`` is the number of classes, 0 if
    not known; ``num_outputs`` is how many outputs a model needs, 0 until a task says
    so. ``classes`` are the names of the classes, and ``owners`` says who each example
    is from (a speaker, a writer), if known. ``sources`` are the files it came from,
    ``cache`` is the folder of its decoded arrays, ``padding`` the token that fills rows
    of unequal lengths, if that was done here, and ``notes`` say what was left out, and
    why.
    """

    name: str
    x: Tensor
    y: Tensor
    num_classes: int = 0
    num_outputs: int = 0
    classes: tuple[str, ...] = ()
    owners: Tensor | None = None
    scaling: Scaling = field(default_factory=lambda: Scaling())
    sources: tuple[Path, ...] = ()
    cache: Path | None = None
    padding: int | None = None
    notes: tuple[str, ...] = ()

    def take(self, positions: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The examples at ``positions``, scaled for a model, and their targets."""
        if isinstance(positions, slice):
            return self.scaling.apply(self.x[positions]), self.y[positions]
        mean, deviation = self.scaling.mean, self.scaling.deviation
        x = scaled_rows(self.x, positions, mean, deviation)
        if x is None:  # there is no compiled code, or these are no bytes
            x = self.scaling.apply(self.x.index_select(0, positions))
        return x, self.y[positions]


NO_TARGETS = torch.empty(0)
"""The ``y`` of data without targets."""


def with_targets(dataset: Dataset, task: Task) -> Dataset:
    """The data set with targets in the task's form; refuses what it cannot learn."""
    name, x, y = dataset.name, dataset.x, dataset.y
    if y is NO_TARGETS:
        if task.make_targets is None:
            raise DataError(
                f"{name}: has no targets (array y), but task {task.name} needs them"
            )
        y = task.make_targets(x)
        x = x.clamp(min=0)  # below 0: padding
    if y.dim() == 0:
        raise DataError(f"{name}: y has shape (); expected one per example, (n,)")
    if len(x) != len(y):
        raise DataError(
            f"{name}: {len(x)} examples in x but {len(y)} targets in y; expected one "
            "target for each example: look at how the two were made"
        )
    if len(y) == 0:
        raise DataError(f"{name}: no examples; expected at least one")
    _refuse_broken(x, name)
    if 0 < len(dataset.classes) == dataset.num_classes and not task.has_classes:
        raise DataError(
            f"{name}: y holds names of classes, like {dataset.classes[0]!r}; task "
            f"{task.name} needs numbers"
        )
    try:
        y = task.targets(x, y)
        needed = task.num_outputs(x, y)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    if task.has_classes:
        _refuse_outside(name, y, dataset.num_classes)
        needed = max(needed, dataset.num_classes)
    return replace(dataset, x=x, y=y, num_outputs=needed)


def _refuse_broken(x: Tensor, name: str) -> None:
    if not x.is_floating_point():
        return
    broken = (~x.isfinite()).flatten(1).any(1).nonzero().flatten()
    if len(broken) > 0:
        raise DataError(
            f"{name}: {len(broken)} of {len(x)} examples hold NaN or infinite values; "
            f"the first is x[{int(broken[0])}]; leave them out, or replace the values "
            "with x = np.nan_to_num(x)"
        )


def _refuse_outside(name: str, y: Tensor, num_classes: int) -> None:
    """Refuse labels beyond the classes that the data set is known to have."""
    outside = (y >= num_classes).nonzero() if num_classes else y[:0]
    if len(outside) > 0:
        first = tuple(outside[0].tolist())
        place = ", ".join(map(str, first))
        raise DataError(
            f"{name}: {len(outside)} of {y.numel()} labels lie outside "
            f"0..{num_classes - 1}; the first is y[{place}] = {int(y[first])}"
        )
