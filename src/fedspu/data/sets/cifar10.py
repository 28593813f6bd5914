"""CIFAR-10: 50,000 colour images of 32x32 pixels, in ten classes.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; the
paper's second data set. The paper counts 50,000 images: the five training batches. The
test batch is not used, as each client has a test part of its own. The checksum is the
one that TensorFlow Datasets publishes.

Pixels are scaled as in the paper's code: x / 255, then (x - 0.5) / 0.5.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePath

import numpy as np
import torch
from numpy.typing import NDArray

from fedspu.data import bounds
from fedspu.data.cache import Arrays, cache_place, cached
from fedspu.data.dataset import Dataset, Scaling
from fedspu.data.files import Download, not_here, opened, places, read, shown
from fedspu.data.formats import cifar_pickle, tar
from fedspu.errors import DataError

RECIPE = "training batches, 1"
IMAGE = (3, 32, 32)
VALUES = 3 * 32 * 32
BATCH = 10_000  # images in each file
NAMES = tuple(f"data_batch_{number}" for number in range(1, 6))
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py")
PLACES = (*FOLDERS, *(f"cifar10/{folder}" for folder in FOLDERS))

DOWNLOADS = (
    Download(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        170_052_171,
        "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
)

Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]


def find(folder: Path | None) -> list[Path]:
    """An archive, or the five unpacked batches; none if the data set is not here."""
    for place in places("cifar10", folder, PLACES):
        for archive in ARCHIVES:
            if (place / archive).is_file():
                return [place / archive]
        for ending in (".bin", ""):
            files = [place / f"{name}{ending}" for name in NAMES]
            missing = [file for file in files if not file.is_file()]
            if not missing:
                return files
            if len(missing) < len(files):
                raise DataError(f"{missing[0]} is missing; put it beside the others")
    return []


def load(folder: Path | None) -> Dataset:
    """The images as bytes, (50000, 3, 32, 32)."""
    files = find(folder)
    if not files:
        raise not_here("cifar10", folder, DOWNLOADS)
    arrays = cached("cifar10", RECIPE, files, partial(_decode, files))
    return Dataset(
        name="cifar10",
        x=torch.from_numpy(arrays["x"]),
        y=torch.from_numpy(arrays["y"]),
        num_classes=len(CLASSES),
        classes=CLASSES,
        scaling=Scaling(mean=(0.5, 0.5, 0.5), deviation=(0.5, 0.5, 0.5)),
        sources=tuple(files),
        cache=cache_place("cifar10", RECIPE, files),
    )


def _decode(files: list[Path]) -> Arrays:
    is_archive = len(files) == 1
    batches = dict(_in_archive(files[0]) if is_archive else _in_folder(files))
    missing = [name for name in NAMES if name not in batches]
    if missing:
        raise DataError(f"{files[0]} holds no {missing[0]}; download it again")
    pixels = np.concatenate([batches[name][0] for name in NAMES])
    labels = np.concatenate([batches[name][1] for name in NAMES])
    return {"x": pixels.reshape(-1, *IMAGE), "y": labels}


def _in_folder(files: list[Path]) -> Iterator[tuple[str, Batch]]:
    for file in files:
        yield file.stem, decode(read(file, _largest(file)), file, BATCH)


def _in_archive(archive: Path) -> Iterator[tuple[str, Batch]]:
    """Each training batch by its name; nothing is unpacked to disk."""
    seen = set()
    with opened(archive) as stream:
        members = tar.members(stream, shown(archive), bounds.CIFAR_ARCHIVE, _wanted)
        for path, content in members:
            if path.stem in seen:
                raise DataError(
                    f"{archive}: it holds {path.stem} twice; download it again"
                )
            seen.add(path.stem)
            yield path.stem, decode(content, archive / path, BATCH)


def _wanted(path: PurePath) -> int:
    return _largest(path) if path.stem in NAMES else 0


def _largest(file: PurePath) -> int:
    """The most bytes that a batch may have."""
    if file.suffix == ".bin":
        return BATCH * (1 + VALUES)
    return cifar_pickle.largest(BATCH)


def decode(content: bytes, file: PurePath, number: int) -> Batch:
    """The pixels and labels of a batch of ``number`` images, from its file's bytes."""
    pixels, labels = (
        _read_binary(content, file, number)
        if file.suffix == ".bin"
        else cifar_pickle.read_batch(content, file, number)
    )
    if pixels.shape != (number, VALUES) or labels.shape != (number,):
        found = f"pixels {pixels.shape} and labels {labels.shape}"
        raise _unfit(file, found, f"({number}, {VALUES}) and ({number},)")
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        wrong = labels[(labels < 0) | (labels >= len(CLASSES))][0]
        raise _unfit(file, f"the label {wrong}", f"labels from 0 to {len(CLASSES) - 1}")
    return pixels, labels


def _read_binary(content: bytes, file: PurePath, number: int) -> Batch:
    """Records of a label and the red, green and blue planes, a byte each."""
    record = 1 + VALUES
    if len(content) != number * record:
        found = f"{len(content):,} bytes"
        expected = f"{number * record:,}: {number:,} records of {record:,}"
        raise _unfit(file, found, expected)
    records = np.frombuffer(content, dtype=np.uint8).reshape(number, record)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _unfit(file: PurePath, found: str, expected: str) -> DataError:
    return DataError(f"{file}: {found}; expected {expected}. Download the file again")
