"""The user's own examples: arrays x and y, from an .npz file or from memory.

A third array, ``client``, may say whose each example is.
"""

import warnings
import zlib
from pathlib import Path
from zipfile import BadZipFile, is_zipfile

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedspu.data.dataset import Dataset, check
from fedspu.errors import DataError

WANTED = "expected an .npz file with arrays x (examples) and y (class numbers)"


def read(file: Path) -> Dataset:
    """The data set in an .npz file; nothing in the file is executed."""
    try:
        with file.open("rb") as opened:
            is_npz = is_zipfile(opened)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; {WANTED}") from None
    if not is_npz:
        raise DataError(f"{file} is not an .npz file; {WANTED}")

    try:
        with np.load(file, allow_pickle=False) as arrays:
            missing = {"x", "y"} - set(arrays.files)
            if missing:
                found = ", ".join(arrays.files) or "nothing"
                raise DataError(f"{file} holds {found}; {WANTED}")
            x, y = arrays["x"], arrays["y"]
            owners = arrays["client"] if "client" in arrays.files else None
    # Object arrays are a ValueError, damage is any of the others.
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise DataError(f"{file} cannot be read ({error}); {WANTED}") from None
    return from_arrays(x, y, name=str(file), owners=owners)


def from_arrays(
    x: ArrayLike | Tensor,
    y: ArrayLike | Tensor,
    name: str = "arrays",
    owners: ArrayLike | Tensor | None = None,
) -> Dataset:
    """The data set of arrays or tensors held in memory.

    In ``x``, uint8 is taken for pixels, to be divided by 255 when they are taken (grey
    images get a channel axis); it is not copied, so that it may be a memory-mapped file
    of any size. Other integers are taken for tokens, floats for ready inputs. The
    classes are 0 to the largest label. ``owners``, names or whole numbers, say whose
    each example is; they are kept as 0, 1, … in sorted order.
    """
    labels = _labels(_array(y), name)
    dataset = Dataset(
        name=name,
        x=_examples(_array(x), name),
        y=labels,
        num_classes=int(labels.max()) + 1 if len(labels) > 0 else 0,
        owners=None if owners is None else _owners(_array(owners), len(labels), name),
    )
    check(dataset)
    return dataset


def _array(values: ArrayLike | Tensor) -> NDArray[np.generic]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        # NumPy knows no bfloat16, and x ends as float32 anyway.
        values = values.float() if values.is_floating_point() else values
        return np.asarray(values.numpy())
    return np.asarray(values)


def _examples(x: NDArray[np.generic], name: str) -> Tensor:
    if x.ndim < 2:
        raise DataError(
            f"{name}: x has shape {x.shape}; expected one row per example, (n, ...)"
        )
    if x.dtype == np.uint8:
        with (
            warnings.catch_warnings()
        ):  # of arrays that must not be written to; none is
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            pixels = torch.from_numpy(x)
        return pixels.unsqueeze(1) if pixels.ndim == 3 else pixels
    if np.issubdtype(x.dtype, np.integer):
        return torch.from_numpy(x.astype(np.int64))
    if np.issubdtype(x.dtype, np.floating):
        with np.errstate(over="ignore"):  # what float32 cannot hold, check() reports
            return torch.from_numpy(x.astype(np.float32))
    raise DataError(
        f"{name}: x holds {x.dtype}; expected uint8 pixels, integer tokens or floats"
    )


def _labels(y: NDArray[np.generic], name: str) -> Tensor:
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(
            f"{name}: y holds {y.dtype}; expected integers, the class numbers"
        )
    if y.ndim != 1:
        raise DataError(
            f"{name}: y has shape {y.shape}; expected a class number per example, (n,)"
        )
    labels = torch.from_numpy(y.astype(np.int64))
    if len(labels) > 0 and labels.min() < 0:
        first = int((labels < 0).nonzero()[0])
        raise DataError(
            f"{name}: y[{first}] = {int(labels[first])}; "
            "expected class numbers from 0 upwards"
        )
    return labels


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
