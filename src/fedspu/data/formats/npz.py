"""Arrays of an .npz file: numbers and texts, of a size that is known beforehand.

An .npz file is a zip archive of .npy files: a header with the kind and the shape of an
array, then its values. Nothing in it is executed; arrays of Python objects, which would
be pickles, are refused.
"""

import warnings
from collections.abc import Container
from math import prod
from typing import IO, Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from fedspu.data import bounds
from fedspu.data.formats.zip import check_member, open_zip

CHUNK = 2**20
VERSIONS = ((1, 0), (2, 0))
KINDS = "biufcSUV"  # V: without meaning here, but named in the message


class UnfitError(ValueError):
    """An array is not what it should be."""


def read_npz(
    opened: IO[bytes], wanted: Container[str]
) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """The arrays with the ``wanted`` names, and the names of all.

    A damaged file raises one of zip.DAMAGED.
    """
    arrays: dict[str, NDArray[Any]] = {}
    left = bounds.half_of_memory()
    with open_zip(opened) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        for name, member in zip(names, archive.namelist(), strict=True):
            if name in arrays:
                raise UnfitError(f"it holds array {name} twice")
            if name in wanted:
                arrays[name] = _read(archive, member, name, left)
                left -= _taken(arrays[name].size, arrays[name].dtype)
    return arrays, names


def _read(archive: ZipFile, member: str, name: str, most: int) -> NDArray[Any]:
    info = archive.getinfo(member)
    check_member(archive, info)
    with archive.open(info) as opened:
        shape, is_fortran, kind = _header(opened, name)
        size = prod(shape) * kind.itemsize
        rest = info.file_size - opened.tell()
        if size != rest:
            raise UnfitError(
                f"array {name} of {_by(shape)} {kind} has {rest:,} bytes, expected "
                f"{size:,}"
            )
        taken = _taken(prod(shape), kind)
        if taken > most:
            raise UnfitError(
                f"array {name} takes {taken:,} bytes, expected at most {most:,}: half "
                "of this machine's memory"
            )
        flat = np.empty(size, dtype=np.uint8)
        filled = 0
        while content := opened.read(CHUNK):
            flat[filled : filled + len(content)] = np.frombuffer(content, np.uint8)
            filled += len(content)
        if filled < size:
            raise UnfitError(f"array {name} ends after {filled:,} of {size:,} bytes")
    array = flat.view(kind) if size else np.empty(0, kind)
    return array.reshape(shape, order="F" if is_fortran else "C")


def _header(opened: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, Any]:
    """The shape of an array, whether its first axis runs fastest, and its dtype."""
    readers = (
        np.lib.format.read_array_header_1_0,
        np.lib.format.read_array_header_2_0,
    )
    try:
        version = np.lib.format.read_magic(opened)
        if version not in VERSIONS:
            raise UnfitError(f"version {version} of the format, which has object names")
        reader = readers[VERSIONS.index(version)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about files of Python 2
            shape, is_fortran, kind = reader(opened, max_header_size=bounds.HEADER)
    # NumPy evaluates a literal of Python: damage leads to errors of many kinds.
    except Exception as error:
        text = str(error) or type(error).__name__
        raise UnfitError(f"array {name}: {text}") from None
    if kind.hasobject:
        raise UnfitError(
            f"array {name}: Object arrays cannot be loaded; they would be pickles"
        )
    if kind.kind not in KINDS or kind.names or kind.subdtype or kind.itemsize == 0:
        raise UnfitError(f"array {name} holds {kind}, expected numbers or texts")
    if any(length < 0 for length in shape):
        raise UnfitError(f"array {name} has shape {shape}")
    return shape, is_fortran, kind


def _taken(number: int, kind: Any) -> int:
    """The bytes that so many values take, with the copy as int64 or float32."""
    copied = {"u": 8, "i": 8, "f": 4}.get(kind.kind, 0) if kind != np.uint8 else 0
    return int(number) * (int(kind.itemsize) + copied)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{length:,}" for length in shape) or "one"
