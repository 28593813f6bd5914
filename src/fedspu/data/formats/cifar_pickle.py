"""CIFAR-10's python batches, read without running any code in them.

A pickle is a program: it may name any function and have it called. This reader knows
only the names that NumPy uses to write an array, and replaces them with plain records
of its own; any other name is refused.
"""

import pickle
from pathlib import PurePath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedspu.errors import DataError


class _Array:
    """Stands for an array: holds only its state, a tuple that NumPy wrote."""

    def __init__(self, *how: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _Kind:
    """Stands for a dtype: holds only its code."""

    def __init__(self, code: str | bytes, *how: object) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        pass  # byte order and the like: bytes have none


class _Encoded(bytes):
    """How Python 3 writes bytes for Python 2: as latin1 text to be encoded."""

    def __new__(cls, text: str = "", encoding: str = "latin1") -> "_Encoded":
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("bytes have no state")


KNOWN = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Kind,
    "_codecs.encode": _Encoded,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        """One of our records; nothing is imported."""
        if f"{module}.{name}" not in KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return KNOWN[f"{module}.{name}"]


def read_batch(
    opened: IO[bytes], file: PurePath
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The pixels (n, 3072) and the labels (n,) of one batch."""
    expected = f"{file}: expected a batch of CIFAR-10, a pickle of data and labels"
    try:
        found = _Reader(opened, encoding="bytes").load()
        values = {_text(key): value for key, value in found.items()}
        _, shape, kind, is_fortran, content = values["data"].state
        if kind.code != "u1" or is_fortran:
            raise ValueError(f"data of kind {kind.code}")
        pixels = np.frombuffer(content, dtype=np.uint8).reshape(shape)
        labels = np.array(values["labels"], dtype=np.int64)
    # A damaged or hostile pickle may fail in any way at all.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else "cut short"
        raise DataError(f"{expected}; {reason}. Download the file again") from None
    return pixels, labels


def _text(key: str | bytes) -> str:
    return key.decode() if isinstance(key, bytes) else key
