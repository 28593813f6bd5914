"""The user's own examples: arrays x and y, from an .npz file or from memory.

A third array, ``client``, may say who each example is from. Without y, a task may make
targets from x: in language modelling, the next tokens.
"""

import warnings
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedspu.data import FROM_MEMORY
from fedspu.data.dataset import NO_TARGETS, Dataset
from fedspu.data.files import reason, shown
from fedspu.data.formats.npz import read_npz
from fedspu.data.formats.zip import DAMAGED, is_zip
from fedspu.errors import DataError
from fedspu.ordinary_files import open_ordinary
from fedspu.tasks.task import IGNORED

WANTED = (
    "expected an .npz file with arrays x (examples) and y (targets), as "
    "np.savez('my.npz', x=x, y=y) writes it"
)
MOST_SHOWN = 10  # names of arrays in a message

PADDING = 0
"""What fills rows of tokens: a number that every embedding has."""
MADE_PADDING = -1
"""The same, where targets are made from the tokens: it is not to be predicted."""


def load(file: Path) -> Dataset:
    """The data set in an .npz file; nothing in the file is executed."""
    try:
        with open_ordinary(file) as opened:
            return decode(opened, shown(file))
    except OSError as error:
        raise DataError(f"{shown(file)}: {reason(error)}; {WANTED}") from None


def decode(opened: IO[bytes], name: str) -> Dataset:
    """The data set in an open .npz file called ``name``."""
    if not is_zip(opened):
        raise DataError(f"{name} is not an .npz file; {WANTED}")
    try:
        arrays, names = read_npz(opened, ("x", "y", "client"))
    except DAMAGED as error:
        raise DataError(f"{name} cannot be read ({reason(error)}); {WANTED}") from None
    if "x" not in arrays:
        found = shown(", ".join(names[:MOST_SHOWN])) or "nothing"
        raise DataError(f"{name} holds {found}; {WANTED}")
    y, owners = arrays.get("y"), arrays.get("client")
    try:
        return from_arrays(arrays["x"], y, name=name, owners=owners)
    except MemoryError:
        raise DataError(f"{name} does not fit into memory; {WANTED}") from None


def from_arrays(
    x: ArrayLike | Tensor,
    y: ArrayLike | Tensor | None,
    name: str = FROM_MEMORY,
    owners: ArrayLike | Tensor | None = None,
) -> Dataset:
    """A data set of arrays or tensors in memory, not yet checked against a task.

    In ``x``, uint8 means pixels, which ``Dataset.take`` divides by 255 (grey images get
    a channel axis); it is not copied, so it may be a memory-mapped file of any size.
    Other integers mean tokens, and floats are used as they are. Token sequences of
    unequal lengths, given as a list, are padded at their ends. ``y`` holds whole
    numbers, floats or names of classes, or is None. ``owners``, names or whole numbers,
    say who each example is from. Names are stored as 0, 1, … in sorted order.
    """
    padding = MADE_PADDING if y is None else PADDING
    examples = _examples(_array(rows := padded(x, padding, name, "x")), name)
    targets = NO_TARGETS
    classes: tuple[str, ...] = ()
    if y is not None:
        found = _array(padded(y, IGNORED, name, "y"))
        if found.dtype.kind in "US" and found.ndim == 1:
            found, classes = _numbered(found)
        targets = _targets(found, name)
    return Dataset(
        name=name,
        x=examples,
        y=targets,
        classes=classes,
        num_classes=len(classes),
        owners=None if owners is None else _owners(_array(owners), len(examples), name),
        padding=None if rows is x else padding,
    )


def padded(values: Any, padding: int, name: str, what: str) -> Any:
    """Token sequences padded to rows of one length; other values unchanged."""
    if not isinstance(values, list | tuple) or len(values) == 0:
        return values
    rows = [_array(value) for value in values]
    shapes = {row.shape for row in rows}
    if len(shapes) == 1:
        return values
    if any(row.ndim != 1 or not np.issubdtype(row.dtype, np.integer) for row in rows):
        found = ", ".join(map(str, sorted(shapes)))
        raise DataError(
            f"{name}: {what} has rows of unequal shapes, {found}; expected one shape, "
            "or token sequences of whole numbers"
        )
    longest = max(len(row) for row in rows)
    whole = np.full((len(rows), longest), padding, dtype=np.int64)
    for place, row in zip(whole, rows, strict=True):
        place[: len(row)] = row
    return whole


def _array(values: ArrayLike | Tensor) -> NDArray[np.generic]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        # NumPy has no bfloat16, and x becomes float32 anyway.
        values = values.float() if values.is_floating_point() else values
        return np.asarray(values.numpy())
    return np.asarray(values)


def _examples(x: NDArray[np.generic], name: str) -> Tensor:
    if x.dtype.kind in "USO":
        raise DataError(
            f"{name}: x holds {'text' if x.dtype.kind != 'O' else 'Python objects'}; "
            "expected numbers: make tokens of text first, as docs/text.md shows"
        )
    if x.ndim < 2:
        raise DataError(
            f"{name}: x has shape {x.shape}; expected one row per example, (n, ...); "
            "for one number per example, use x.reshape(-1, 1)"
        )
    if x.dtype == np.uint8:
        # Torch warns about read-only arrays, but nothing writes to this one.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            pixels = torch.from_numpy(x)
        return pixels.unsqueeze(1) if pixels.ndim == 3 else pixels
    if np.issubdtype(x.dtype, np.integer):
        return torch.from_numpy(x.astype(np.int64))
    if np.issubdtype(x.dtype, np.floating):
        with np.errstate(over="ignore"):  # with_targets refuses what overflowed
            return torch.from_numpy(x.astype(np.float32))
    raise DataError(
        f"{name}: x holds {x.dtype}; expected uint8 pixels, integer tokens or floats"
    )


def _numbered(
    y: NDArray[np.generic],
) -> tuple[NDArray[np.generic], tuple[str, ...]]:
    """Names of classes as 0, 1, … in sorted order, and the names."""
    names, codes = np.unique(y.astype(str), return_inverse=True)
    return codes.astype(np.int64), tuple(map(str, names))


def _targets(y: NDArray[np.generic], name: str) -> Tensor:
    if np.issubdtype(y.dtype, np.integer):
        return torch.from_numpy(y.astype(np.int64))
    if np.issubdtype(y.dtype, np.floating):
        # PyTorch has neither wider floats nor another order of bytes.
        kind = y.dtype.newbyteorder("=") if y.dtype.itemsize <= 8 else np.float64
        return torch.from_numpy(y.astype(kind, copy=False))
    raise DataError(
        f"{name}: y holds {y.dtype}; expected whole numbers (classes, tokens) or floats"
    )


def _owners(owners: NDArray[np.generic], number: int, name: str) -> Tensor:
    if owners.dtype.kind not in "iuUS":
        raise DataError(
            f"{name}: client holds {owners.dtype}; expected names or whole numbers"
        )
    if owners.shape != (number,):
        raise DataError(
            f"{name}: client has shape {owners.shape}; expected one for each of the "
            f"{number} examples, ({number},)"
        )
    _, codes = np.unique(owners, return_inverse=True)
    return torch.from_numpy(codes.astype(np.int64))
