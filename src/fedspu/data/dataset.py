"""The one shape that every data set takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fedspu.errors import DataError


@dataclass(frozen=True)
class Scaling:
    """How bytes become numbers: of 255, less the mean, by the deviation of a channel.

    Mean and deviation are fixed numbers, or come from training examples alone.
    """

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    def apply(self, x: Tensor) -> Tensor:
        """Bytes (n, channels, ...) as float32; everything else as it is."""
        if x.dtype != torch.uint8:
            return x
        shape = (-1, *[1] * (x.dim() - 2))
        mean, deviation = torch.tensor(self.mean), torch.tensor(self.deviation)
        return (x.float() / 255 - mean.view(shape)) / deviation.view(shape)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples, and the settings that suit them.

    ``x`` is float32, int64 where examples are tokens, or uint8 where they are bytes to
    be scaled when they are taken: large sets stay as small as their files. ``y`` is
    int64. ``classes`` are their names, ``owners`` who each example is from (a speaker,
    a writer), where that is known. ``defaults`` has dotted names of settings; what the
    user sets goes before them. ``sources`` are the files it came from, ``cache`` is the
    folder of its decoded arrays, ``notes`` say what was left out, and why.
    """

    name: str
    x: Tensor
    y: Tensor
    num_classes: int
    defaults: Mapping[str, object] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    owners: Tensor | None = None
    scaling: Scaling = field(default_factory=lambda: Scaling())
    sources: tuple[Path, ...] = ()
    cache: Path | None = None
    notes: tuple[str, ...] = ()

    def take(self, positions: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Some examples as a model takes them, and their labels."""
        return self.scaling.apply(self.x[positions]), self.y[positions]


def check(dataset: Dataset) -> None:
    """Raise a DataError if there is an example that no model could learn from."""
    x, y, name = dataset.x, dataset.y, dataset.name
    if len(x) != len(y):
        raise DataError(f"{name}: {len(x)} examples in x but {len(y)} labels in y")
    if len(y) == 0:
        raise DataError(f"{name}: no examples; expected at least one")

    outside = ((y < 0) | (y >= dataset.num_classes)).nonzero().flatten()
    if len(outside) > 0:
        first = int(outside[0])
        raise DataError(
            f"{name}: {len(outside)} of {len(y)} labels lie outside "
            f"0..{dataset.num_classes - 1}; the first is y[{first}] = {int(y[first])}"
        )

    if not x.is_floating_point():
        return
    broken = (~x.isfinite()).flatten(1).any(1).nonzero().flatten()
    if len(broken) > 0:
        raise DataError(
            f"{name}: {len(broken)} of {len(x)} examples hold NaN or infinite values; "
            f"the first is x[{int(broken[0])}]"
        )
