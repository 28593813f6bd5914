"""MNIST and Fashion-MNIST: 70,000 grey images of 28x28 pixels, in ten classes each.

Y. LeCun, C. Cortes and C. Burges, "The MNIST database of handwritten digits"; H. Xiao,
K. Rasul and R. Vollgraf, "Fashion-MNIST", arXiv:1708.07747. Neither is in the paper.
The 60,000 training and 10,000 test images are joined: each client has a test part of
its own. Checksums are those that TensorFlow Datasets publishes.
"""

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

_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

DOWNLOADS = {
    "mnist": (
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
    ),
    "fashion-mnist": (
        Download(
            f"{_FASHION}/train-images-idx3-ubyte.gz",
            26_421_880,
            "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        Download(
            f"{_FASHION}/train-labels-idx1-ubyte.gz",
            29_515,
            "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        Download(
            f"{_FASHION}/t10k-images-idx3-ubyte.gz",
            4_422_102,
            "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        Download(
            f"{_FASHION}/t10k-labels-idx1-ubyte.gz",
            5_148,
            "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
}

DEBIAN = "/usr/share/datasets/fashion-mnist"
"""Where Debian's package dataset-fashion-mnist puts the same images, packed anew."""

PLACES = {
    "mnist": ("MNIST/raw", "MNIST"),
    "fashion-mnist": ("FashionMNIST/raw", "FashionMNIST", DEBIAN),
}

CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        "T-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ),
}


def find(name: str, folder: Path | None) -> list[Path]:
    """The four files, in the order of FILES; none if the data set is not here."""
    for place in places(name, folder, PLACES[name]):
        if files := idx.find_all(place, FILES):
            return files
    return []


def load(name: str, folder: Path | None) -> Dataset:
    """The images as bytes, (70000, 1, 28, 28).

    They are scaled to 0 to 1 as they are taken, like EMNIST's.
    """
    files = find(name, folder)
    if not files:
        raise not_here(name, folder, DOWNLOADS[name])

    arrays = cached(name, RECIPE, files, partial(_decode, files))
    return Dataset(
        name=name,
        x=torch.from_numpy(arrays["x"]),
        y=torch.from_numpy(arrays["y"]),
        num_classes=10,
        classes=CLASSES[name],
        # The paper's network for such images; the rate is ours.
        defaults={"model": "emnist", "train.lr": 0.02, "train.batch_size": 16},
        sources=tuple(files),
        cache=cache_place(name, RECIPE, files),
    )


def _decode(files: list[Path]) -> Arrays:
    images, labels = idx.read_pairs(files, PIXELS, num_classes=10)
    return {"x": np.concatenate(images)[:, None], "y": labels}
