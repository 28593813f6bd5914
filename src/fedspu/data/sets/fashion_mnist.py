"""Fashion-MNIST: 70,000 grey images of clothing, 28x28 pixels, in MNIST's format.

H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST", arXiv:1708.07747. It is not in the
paper. Checksums are those that TensorFlow Datasets publishes.
"""

from dataclasses import replace
from pathlib import Path

from fedspu.data.dataset import Dataset
from fedspu.data.files import Download, not_here
from fedspu.data.sets.mnist import find_files, read_files

NAME = "fashion-mnist"
DEBIAN = "/usr/share/datasets/fashion-mnist"
"""Where Debian's package dataset-fashion-mnist puts the same images, repacked."""

PLACES = ("FashionMNIST/raw", "FashionMNIST", DEBIAN)
CLASSES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)

_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

DOWNLOADS = (
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
)


def find(folder: Path | None) -> list[Path]:
    """The four files; none if the data set is not here."""
    return find_files(NAME, folder, PLACES)


def load(folder: Path | None) -> Dataset:
    """The images as bytes, (70000, 1, 28, 28)."""
    files = find(folder)
    if not files:
        raise not_here(NAME, folder, DOWNLOADS)
    return replace(read_files(NAME, files), classes=CLASSES)
