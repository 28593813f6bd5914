"""Examples that are given in Python: arrays x and y, or a data set of pairs."""

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from fedspu.errors import DataError

Data = tuple[Any, Any] | TorchDataset[Any]
"""Arrays or tensors (x, y); or a data set of PyTorch that has such pairs."""

WANTED = "expected arrays (x, y), or a torch Dataset whose items are pairs (x, y)"


def as_arrays(data: Any) -> tuple[Any, Any]:
    """Examples as arrays x and y; a data set is read once, item by item."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    if isinstance(data, TorchDataset):
        return _of_items(data)
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0], data[1]
    if isinstance(data, list) and data and isinstance(data[0], tuple):
        return _of_items(data)
    if isinstance(data, DataLoader):
        raise DataError(
            "data is a DataLoader; expected the data itself, as clients make their own "
            "batches: pass its data set, data=loader.dataset"
        )
    how = f" of {len(data):,}" if isinstance(data, Sized) else ""
    raise DataError(f"data is a {type(data).__name__}{how}; {WANTED}")


def _of_items(data: Any) -> tuple[Any, Any]:
    try:
        number = len(data)
    except TypeError:
        raise DataError(
            f"data is a {type(data).__name__} without a length; {WANTED}, and len()"
        ) from None
    xs, ys = [], []
    for i in range(number):
        item = data[i]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"item {i} of data is a {type(item).__name__}, no pair; {WANTED}"
            )
        xs.append(torch.as_tensor(item[0]) if _is_numeric(item[0]) else item[0])
        ys.append(item[1].tolist() if isinstance(item[1], Tensor) else item[1])
    if not xs:
        raise DataError(f"data has no items; {WANTED}")
    if all(isinstance(x, Tensor) and x.shape == xs[0].shape for x in xs):
        return torch.stack(xs), ys
    kinds = sorted({_described(x) for x in xs})
    raise DataError(
        f"examples of data are of several kinds or shapes ({', '.join(kinds[:3])}); "
        "expected tensors or arrays of one shape: add a transform to the data set"
    )


def _is_numeric(x: Any) -> bool:
    return isinstance(x, Tensor) or hasattr(x, "__array_interface__")


def _described(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return type(x).__name__ if shape is None else f"{tuple(shape)}"
