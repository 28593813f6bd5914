"""MNIST: 70,000 grey images of handwritten digits, 28x28 pixels.

Y. LeCun, C. Cortes and C. Burges, "The MNIST database of handwritten digits". It is not
in the paper. The 60,000 training and 10,000 test images are joined: each client has a
test part of its own. Checksums are those that TensorFlow Datasets publishes.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedspu.data.cache import Arrays, cache_place, cached
from fedspu.data.dataset import Dataset
from fedspu.data.files import Download, not_here, places
from fedspu.data.formats import idx

RECIPE = "idx, training then test, 1"
PIXELS = (28, 28)
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
PLACES = ("MNIST/raw", "MNIST")
CLASSES = tuple("0123456789")

_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"

DOWNLOADS = (
    Download(
        f"{_MNIST}/train-images-idx3-ubyte.gz",
        9_912_422,
        "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    Download(
        f"{_MNIST}/train-labels-idx1-ubyte.gz",
        28_881,
        "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    Download(
        f"{_MNIST}/t10k-images-idx3-ubyte.gz",
        1_648_877,
        "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    Download(
        f"{_MNIST}/t10k-labels-idx1-ubyte.gz",
        4_542,
        "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
)


def find(folder: Path | None) -> list[Path]:
    """The four files, in the order of FILES; none if the data set is not here."""
    return find_files("mnist", folder, PLACES)


def load(folder: Path | None) -> Dataset:
    """The images as bytes, (70000, 1, 28, 28)."""
    files = find(folder)
    if not files:
        raise not_here("mnist", folder, DOWNLOADS)
    return replace(read_files("mnist", files), classes=CLASSES)


def find_files(name: str, folder: Path | None, others: Iterable[str]) -> list[Path]:
    """The four files of a data set in MNIST's format; none if it is not here."""
    for place in places(name, folder, others):
        if files := idx.find_all(place, FILES):
            return files
    return []


def read_files(name: str, files: list[Path]) -> Dataset:
    """The images as bytes, which ``Dataset.take`` scales to 0 to 1, like EMNIST's."""
    arrays = cached(name, RECIPE, files, partial(_decode, files))
    return Dataset(
        name=name,
        x=torch.from_numpy(arrays["x"]),
        y=torch.from_numpy(arrays["y"]),
        num_classes=10,
        sources=tuple(files),
        cache=cache_place(name, RECIPE, files),
    )


def _decode(files: list[Path]) -> Arrays:
    images, labels = idx.read_pairs(files, PIXELS, num_classes=10)
    return {"x": np.concatenate(images)[:, None], "y": labels}
