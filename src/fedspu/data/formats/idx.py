"""The idx format of MNIST and similar data sets: a small big-endian header, then bytes.

A file has two zero bytes, a byte for the kind of number (8: unsigned bytes), a byte for
the number of axes, four bytes for the length of each axis, then the numbers. Files may
be compressed (.gz), and may be inside a zip archive.
"""

import gzip
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Protocol, TypeVar
from zipfile import Path as ZipPath

import numpy as np
from numpy.typing import NDArray

from fedspu.data import bounds
from fedspu.data.files import reason
from fedspu.data.formats.zip import DAMAGED, check_member
from fedspu.errors import DataError
from fedspu.ordinary_files import open_ordinary, size_of

File = Path | ZipPath
AnyFile = TypeVar("AnyFile", Path, ZipPath)
Bytes = NDArray[np.uint8]


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


UNSIGNED_BYTES = 8
CHUNK = 2**24


def find_all(folder: AnyFile, names: Sequence[str]) -> list[AnyFile]:
    """The files with these names, each compressed or not; empty if none exists."""
    found: list[AnyFile] = []
    missing: list[str] = []
    for name in names:
        both = (folder / f"{name}.gz", folder / name)
        here = [file for file in both if file.is_file()]
        found += here[:1]
        missing += [] if here else [name]
    if found and missing:
        raise DataError(
            f"{folder}: {missing[0]}.gz is missing, although {found[0].name} is there; "
            "put it there too"
        )
    return found


def read_pairs(
    files: Sequence[File], pixels: tuple[int, int], num_classes: int
) -> tuple[list[Bytes], NDArray[np.int64]]:
    """The images of each pair of files, and all labels; every count is checked.

    ``files`` are images, their labels, more images, their labels, and so on.
    """
    all_images, all_labels = [], []
    for image_file, label_file in zip(files[::2], files[1::2], strict=True):
        images, labels = read(image_file, 3, pixels), read(label_file, axes=1)
        if len(labels) != len(images):
            raise _unfit(
                label_file,
                f"{len(labels):,} labels",
                f"{len(images):,}, one for each image in {image_file.name}",
            )
        if labels.max() >= num_classes:
            found = f"the label {labels.max()}"
            raise _unfit(label_file, found, f"labels from 0 to {num_classes - 1}")
        all_images.append(images)
        all_labels.append(labels)
    return all_images, np.concatenate(all_labels).astype(np.int64)


def read(file: File, axes: int, pixels: tuple[int, ...] | None = None) -> Bytes:
    """The array of unsigned bytes in an idx file that must have this many axes.

    With ``pixels``, its examples must have this shape.
    """
    try:
        with _opened(file) as (opened, size):
            return decode(opened, size, file, axes, pixels)
    except DAMAGED as error:
        found = f"cannot be read ({reason(error)})"
        raise _unfit(file, found, "a whole idx file") from None


def decode(
    opened: IO[bytes],
    size: int,
    file: File,
    axes: int,
    pixels: tuple[int, ...] | None = None,
) -> Bytes:
    """The array in an open idx file of ``size`` bytes, compressed if its name says so.

    A damaged file raises a DataError, or one of zip.DAMAGED.
    """
    if not file.name.endswith(".gz"):
        return _read(opened, file, axes, pixels, size)
    with gzip.GzipFile(fileobj=opened) as plain:
        return _read(plain, file, axes, pixels, size * bounds.DEFLATE)


@contextmanager
def _opened(file: File) -> Iterator[tuple[IO[bytes], int]]:
    """A file and its size; it may be in an archive."""
    if isinstance(file, Path):
        with open_ordinary(file) as opened:
            yield opened, size_of(opened)
    else:
        member = file.root.getinfo(file.at)
        check_member(file.root, member)
        with file.root.open(member) as inside:
            yield inside, member.file_size


def _read(
    opened: _Readable,
    file: File,
    axes: int,
    pixels: tuple[int, ...] | None,
    most: int,
) -> Bytes:
    """The array in an open idx file that has at most ``most`` bytes, unpacked."""
    header = opened.read(4 + 4 * axes)
    magic = bytes([0, 0, UNSIGNED_BYTES, axes])
    if not header:
        raise _unfit(file, "is empty", f"an idx file, which begins with {magic.hex()}")
    if header[:4] != magic or len(header) < 4 + 4 * axes:
        raise _unfit(file, f"begins with {header[:4].hex()}", magic.hex())
    shape = struct.unpack(f">{axes}I", header[4:])
    if 0 in shape:
        raise _unfit(file, f"{_by(shape)} numbers", "at least one example")
    if pixels is not None and shape[1:] != pixels:
        raise _unfit(file, f"images of {_by(shape[1:])}", _by(pixels))
    if shape[0] > bounds.IDX_EXAMPLES:
        found = f"{shape[0]:,} examples"
        raise _unfit(file, found, f"at most {bounds.IDX_EXAMPLES:,}")
    room = max(0, most - len(header))
    if prod(shape) > room:
        raise _unfit(file, f"ends after at most {room:,} numbers", f"{prod(shape):,}")

    array = np.empty(shape, dtype=np.uint8)
    flat, filled = array.reshape(-1), 0
    while filled < flat.size and (chunk := opened.read(CHUNK)):
        if filled + len(chunk) > flat.size:
            break
        flat[filled : filled + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
        filled += len(chunk)
    if filled < flat.size and not chunk:
        raise _unfit(file, f"ends after {filled:,} numbers", f"{flat.size:,}")
    if filled < flat.size or opened.read(1):
        raise _unfit(file, f"more than {_by(shape)} numbers", f"{flat.size:,}")
    return array


def _by(shape: Sequence[int]) -> str:
    return " x ".join(f"{length:,}" for length in shape)


def _unfit(file: File, found: str, expected: str) -> DataError:
    return DataError(f"{file}: {found}; expected {expected}. Download the file again")
