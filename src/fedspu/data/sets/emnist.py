"""EMNIST by class: 814,255 handwritten digits and letters, 62 classes, 28x28 pixels.

G. Cohen, S. Afshar, J. Tapson and A. van Schaik, "EMNIST: an extension of MNIST to
handwritten letters", arXiv:1702.05373; the paper's first data set. Its 697,932 training
and 116,323 test images are joined, as the paper counts them: each client has a test
part of its own. The checksum is the one that TensorFlow Datasets publishes.

Pixels are scaled to 0 to 1. The released code of the paper takes the numbers in its own
files as they are and does not say how they were made; a batch norm follows the first
convolution, so their scale hardly matters.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from zipfile import Path as ZipPath

import numpy as np
import torch

from fedspu.data.cache import Arrays, cache_place, cached
from fedspu.data.dataset import Dataset
from fedspu.data.files import Download, not_here, places, reason
from fedspu.data.formats import idx
from fedspu.data.formats.zip import DAMAGED, open_zip
from fedspu.errors import DataError
from fedspu.ordinary_files import open_ordinary

RECIPE = "byclass, training then test, upright, 1"
PIXELS = (28, 28)
FILES = (
    "emnist-byclass-train-images-idx3-ubyte",
    "emnist-byclass-train-labels-idx1-ubyte",
    "emnist-byclass-test-images-idx3-ubyte",
    "emnist-byclass-test-labels-idx1-ubyte",
)
ARCHIVES = ("gzip.zip", "emnist.zip")  # its own name, and torchvision's
PLACES = ("EMNIST/raw", "EMNIST", "emnist/gzip", "gzip")
CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")

DOWNLOADS = (
    Download(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        561_753_746,
        "sha256:fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
    ),
)


def find(folder: Path | None) -> list[Path]:
    """The archive, or its four unpacked files; none if the data set is not here."""
    for place in places("emnist", folder, PLACES):
        for archive in ARCHIVES:
            if (place / archive).is_file():
                return [place / archive]
        if files := idx.find_all(place, FILES):
            return files
    return []


def load(folder: Path | None) -> Dataset:
    """The images as bytes, upright, (814255, 1, 28, 28)."""
    files = find(folder)
    if not files:
        raise not_here("emnist", folder, DOWNLOADS)
    arrays = cached("emnist", RECIPE, files, partial(_decode, files))
    return Dataset(
        name="emnist",
        x=torch.from_numpy(arrays["x"]),
        y=torch.from_numpy(arrays["y"]),
        num_classes=len(CLASSES),
        classes=CLASSES,
        sources=tuple(files),
        cache=cache_place("emnist", RECIPE, files),
    )


def _decode(files: list[Path]) -> Arrays:
    if len(files) == len(FILES):
        return _arrays(files)
    archive = files[0]
    try:
        with open_ordinary(archive) as opened, open_zip(opened) as inside:
            root = ZipPath(inside)
            folder = root / "gzip" if (root / "gzip").is_dir() else root
            members = idx.find_all(folder, FILES)
            if not members:
                raise DataError(f"{archive} holds no {FILES[0]}.gz; download it again")
            return _arrays(members)
    except DAMAGED as error:
        raise DataError(
            f"{archive}: damaged ({reason(error)}); expected {DOWNLOADS[0]}. Download "
            "the file again"
        ) from None


def _arrays(files: Sequence[idx.File]) -> Arrays:
    images, labels = idx.read_pairs(files, PIXELS, len(CLASSES))
    # The files hold each image transposed, with rows and columns swapped.
    upright = np.empty((len(labels), 1, *PIXELS), dtype=np.uint8)
    np.concatenate([part.transpose(0, 2, 1) for part in images], out=upright[:, 0])
    return {"x": upright, "y": labels}
