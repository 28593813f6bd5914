"""Tiny files in the exact formats of the official ones."""

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

MNIST_STEMS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
EMNIST_STEMS = (
    "emnist-byclass-train-images-idx3-ubyte",
    "emnist-byclass-train-labels-idx1-ubyte",
    "emnist-byclass-test-images-idx3-ubyte",
    "emnist-byclass-test-labels-idx1-ubyte",
)


def idx(array: NDArray[np.uint8]) -> bytes:
    """The idx file of an array."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def images(num: int, first: int = 0) -> NDArray[np.uint8]:
    """Images (num, 28, 28), each different from all others, and from its mirror."""
    pixels = np.arange(28 * 28, dtype=np.uint64).reshape(28, 28)
    numbers = np.arange(first, first + num, dtype=np.uint64)
    return (pixels + 7 * numbers[:, None, None]).astype(np.uint8)


def quartet(
    train: list[int], test: list[int], is_turned: bool = False
) -> list[NDArray[np.uint8]]:
    """Training images, their labels, test images, their labels."""
    both = [images(len(train)), images(len(test), first=len(train))]
    if is_turned:
        both = [part.transpose(0, 2, 1) for part in both]
    labels = [np.array(part, dtype=np.uint8) for part in (train, test)]
    return [both[0], labels[0], both[1], labels[1]]


def write_mnist(folder: Path, train: list[int], test: list[int]) -> list[Path]:
    """The four .gz files of MNIST."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{stem}.gz" for stem in MNIST_STEMS]
    for file, array in zip(files, quartet(train, test), strict=True):
        file.write_bytes(gzip.compress(idx(array)))
    return files


def write_emnist_zip(file: Path, train: list[int], test: list[int]) -> Path:
    """EMNIST's gzip.zip: .gz files in a folder, images with rows for columns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with ZipFile(file, "w") as archive:
        arrays = quartet(train, test, is_turned=True)
        for stem, array in zip(EMNIST_STEMS, arrays, strict=True):
            archive.writestr(f"gzip/{stem}.gz", gzip.compress(idx(array)))
        archive.writestr("gzip/emnist-byclass-mapping.txt", "0 48\n")
    return file


def records(labels: list[int], first: int = 0) -> NDArray[np.uint8]:
    """CIFAR-10's binary records (n, 3073): a label, then 3072 pixels."""
    planes = np.arange(3 * 32 * 32, dtype=np.uint64)
    numbers = np.arange(first, first + len(labels), dtype=np.uint64)[:, None]
    pixels = (planes + 11 * numbers).astype(np.uint8)
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1)


def python2_batch(labels: list[int], first: int = 0) -> bytes:
    """A batch as Python 2 and an old NumPy wrote it: byte strings, numpy.core."""
    pixels = records(labels, first)[:, 1:].tobytes()
    shape = b"(" + b"I%d\n" % len(labels) + b"I3072\n" + b"t"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
        + b"(I1\n"
        + shape
        + b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
        + b"I00\n"
        + b"T"
        + struct.pack("<i", len(pixels))
        + pixels
        + b"tb"
    )
    listed = b"(l" + b"".join(b"I%d\na" % label for label in labels)
    return (
        b"(dS'data'\n" + array + b"sS'labels'\n" + listed + b"sS'batch_label'\nS'x'\ns."
    )


def python3_batch(labels: list[int], first: int = 0) -> bytes:
    """A batch as Python 3 and this NumPy write it."""
    pixels = np.ascontiguousarray(records(labels, first)[:, 1:])
    return pickle.dumps({"labels": labels, "data": pixels}, protocol=2)


def cifar_batches(kind: str, labels: list[int]) -> dict[str, bytes]:
    """Five training batches and a test batch by file name, all with these labels."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    made: dict[str, bytes] = {}
    for place, name in enumerate(names):
        first = place * len(labels)
        if kind == "bin":
            made[f"{name}.bin"] = records(labels, first).tobytes()
        else:
            write = python2_batch if kind == "py2" else python3_batch
            made[name] = write(labels, first)
    return made


def write_cifar(folder: Path, kind: str, labels: list[int]) -> Path:
    """An unpacked folder of CIFAR-10."""
    place = folder / (
        "cifar-10-batches-bin" if kind == "bin" else "cifar-10-batches-py"
    )
    place.mkdir(parents=True)
    for name, content in cifar_batches(kind, labels).items():
        (place / name).write_bytes(content)
    return place


def write_cifar_archive(folder: Path, kind: str, labels: list[int]) -> Path:
    """An archive of CIFAR-10, its batches in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "binary" if kind == "bin" else "python"
    inside = "cifar-10-batches-bin" if kind == "bin" else "cifar-10-batches-py"
    file = folder / f"cifar-10-{suffix}.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for name, content in reversed(cifar_batches(kind, labels).items()):
            member: Any = tarfile.TarInfo(f"{inside}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file
