"""Data sets by name, and who gets which of their examples."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedspu.data.dataset import Dataset, check
from fedspu.data.division import PARTITIONS, partition
from fedspu.data.files import Download
from fedspu.data.own import arrays, folders, hf
from fedspu.data.own.arrays import from_arrays
from fedspu.data.sets import cifar10, digits, emnist, mnist, speech
from fedspu.data.splits import SPLITS, Split, split
from fedspu.errors import SettingsError
from fedspu.settings import nearest

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "SPLITS",
    "Dataset",
    "Source",
    "Split",
    "check",
    "find_source",
    "from_arrays",
    "load",
    "partition",
    "split",
    "usage",
]


@dataclass(frozen=True)
class Source:
    """What a data set is, where its files come from, and how they become arrays.

    ``load`` is given what follows the colon in ``name:FILE``, if anything, and the
    folder of the user's data, if there is one. ``find`` says which of its files are in
    that folder; without it, there is nothing to find or to fetch. The numbers are those
    of the official files.
    """

    about: str
    load: Callable[[str, Path | None], Dataset]
    file: str = ""
    num_examples: int | None = None
    num_classes: int | None = None
    downloads: tuple[Download, ...] = ()
    find: Callable[[Path | None], list[Path]] | None = None


DATASETS = {
    "digits": Source(
        "handwritten digits, 8x8 pixels; ships with fedspu",
        lambda file, folder: digits.load(),
        num_examples=1_797,
        num_classes=10,
    ),
    "emnist": Source(
        "handwritten digits and letters (by class), 28x28 pixels; in the paper",
        lambda file, folder: emnist.load(folder),
        num_examples=814_255,
        num_classes=62,
        downloads=emnist.DOWNLOADS,
        find=emnist.find,
    ),
    "cifar10": Source(
        "colour photographs, 32x32 pixels; in the paper",
        lambda file, folder: cifar10.load(folder),
        num_examples=50_000,
        num_classes=10,
        downloads=cifar10.DOWNLOADS,
        find=cifar10.find,
    ),
    "speech": Source(
        "spoken words (Google Speech Commands 2), 32x32 log-mel; in the paper",
        lambda file, folder: speech.load(folder),
        num_examples=105_829,
        num_classes=35,
        downloads=speech.DOWNLOADS,
        find=speech.find,
    ),
    "mnist": Source(
        "handwritten digits, 28x28 pixels",
        lambda file, folder: mnist.load("mnist", folder),
        num_examples=70_000,
        num_classes=10,
        downloads=mnist.DOWNLOADS["mnist"],
        find=partial(mnist.find, "mnist"),
    ),
    "fashion-mnist": Source(
        "pieces of clothing, 28x28 pixels",
        lambda file, folder: mnist.load("fashion-mnist", folder),
        num_examples=70_000,
        num_classes=10,
        downloads=mnist.DOWNLOADS["fashion-mnist"],
        find=partial(mnist.find, "fashion-mnist"),
    ),
    "arrays": Source(
        "your own examples: an .npz file with arrays x and y",
        lambda file, folder: arrays.read(_own(file, folder)),
        file="FILE.npz",
    ),
    "images": Source(
        "your own images: a folder per class (extra: images)",
        lambda file, folder: folders.load_images(_own(file, folder)),
        file="FOLDER",
    ),
    "sounds": Source(
        "your own WAV or FLAC files: a folder per class (extra: audio)",
        lambda file, folder: folders.load_sounds(_own(file, folder)),
        file="FOLDER",
    ),
    "hf": Source(
        "your own: what Hugging Face datasets saved to disk (extra: hf)",
        lambda file, folder: hf.load(_own(file, folder)),
        file="FOLDER",
    ),
}


def load(name: str, folder: Path | None = None) -> Dataset:
    """The data set called ``name``, checked; a relative FILE lies in ``folder``."""
    source, file = find_source(name)
    dataset = source.load(file, folder)
    check(dataset)
    return dataset


def find_source(name: str) -> tuple[Source, str]:
    """What a data set is loaded by, and what follows the colon in its name."""
    kind, _, file = name.partition(":")
    if kind not in DATASETS:
        known = ", ".join(usage(known) for known in sorted(DATASETS))
        raise SettingsError(
            f"data.name = {name!r}: expected one of {known}"
            f"{nearest(kind, list(DATASETS))}"
        )
    source = DATASETS[kind]
    if bool(file) != bool(source.file):
        raise SettingsError(f"data.name = {name!r}: expected {usage(kind)}")
    return source, file


def _own(file: str, folder: Path | None) -> Path:
    return (folder or Path()) / Path(file).expanduser()


def usage(kind: str) -> str:
    """A data set's name as the user types it."""
    file = DATASETS[kind].file
    return f"{kind}:{file}" if file else kind
