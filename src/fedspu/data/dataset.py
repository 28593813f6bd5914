"""The one shape that every data set takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedspu.errors import DataError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples ready for a model, and the settings that suit them.

    ``x`` is float32, or int64 where examples are tokens; ``y`` is int64. ``defaults``
    has dotted names of settings; what the user sets goes before them.
    """

    name: str
    x: Tensor
    y: Tensor
    num_classes: int
    defaults: Mapping[str, object] = field(default_factory=dict)


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

    broken = (~x.isfinite()).flatten(1).any(1).nonzero().flatten()
    if len(broken) > 0:
        raise DataError(
            f"{name}: {len(broken)} of {len(x)} examples hold NaN or infinite values; "
            f"the first is x[{int(broken[0])}]"
        )
