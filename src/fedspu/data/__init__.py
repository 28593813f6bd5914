"""Data sets by name, and who gets which of their examples."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedspu.data import arrays, digits
from fedspu.data.arrays import from_arrays
from fedspu.data.dataset import Dataset, check
from fedspu.data.partition import PARTITIONS, partition
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
    "from_arrays",
    "load",
    "partition",
    "split",
]


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    ``load`` is given what follows the colon in ``name:FILE``, if anything, and the
    folder of the user's data, if there is one.
    """

    about: str
    load: Callable[[str, Path | None], Dataset]
    file: str = ""


DATASETS = {
    "digits": Source(
        "1,797 handwritten digits, 8x8 pixels, 10 classes; ships with fedspu",
        lambda file, folder: digits.load(),
    ),
    "arrays": Source(
        "your own examples: an .npz file with arrays x and y",
        lambda file, folder: arrays.read((folder or Path()) / Path(file).expanduser()),
        file="FILE.npz",
    ),
}


def load(name: str, folder: Path | None = None) -> Dataset:
    """The data set called ``name``, checked; a relative FILE lies in ``folder``."""
    kind, _, file = name.partition(":")
    if kind not in DATASETS:
        known = ", ".join(_usage(known) for known in sorted(DATASETS))
        raise SettingsError(
            f"data.name = {name!r}: expected one of {known}"
            f"{nearest(kind, list(DATASETS))}"
        )
    source = DATASETS[kind]
    if bool(file) != bool(source.file):
        raise SettingsError(f"data.name = {name!r}: expected {_usage(kind)}")

    dataset = source.load(file, folder)
    check(dataset)
    return dataset


def _usage(kind: str) -> str:
    file = DATASETS[kind].file
    return f"{kind}:{file}" if file else kind
