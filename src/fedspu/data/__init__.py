"""Data sets by name: what each is, its default settings, and which module reads it.

Only ``load`` opens their files; everything else here needs no files and no PyTorch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedspu.errors import SettingsError
from fedspu.imports import is_place
from fedspu.settings_text import nearest

if TYPE_CHECKING:
    from fedspu.data.dataset import Dataset
    from fedspu.tasks.task import Task

FROM_MEMORY = "arrays"
"""The name of data that was given as arrays in Python."""


@dataclass(frozen=True)
class Source:
    """A data set's description, its numbers, and its module in ``data/`` (``place``).

    The module reads it with ``load``, or with the function named after a colon. For
    published files it also has ``find`` and ``DOWNLOADS``. ``file`` is what follows the
    colon in the name of a user's own data. ``defaults`` are settings by dotted name;
    what the user sets overrides them. The numbers are those of the official files.
    """

    about: str
    place: str
    file: str = ""
    num_examples: int | None = None
    num_classes: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> ModuleType:
        """The module that reads it."""
        return import_module(f"fedspu.data.{self.place.partition(':')[0]}")

    @property
    def downloads(self) -> tuple[Any, ...]:
        """Its official files; empty if there is nothing to fetch."""
        found: tuple[Any, ...] = getattr(self.module, "DOWNLOADS", ())
        return found

    def find(self, folder: Path | None) -> list[Path] | None:
        """Its files on this machine; None if it has no published files."""
        finder = getattr(self.module, "find", None)
        return None if finder is None else finder(folder)


SPEECH = {"model": "speech", "train.lr": 5e-4, "train.batch_size": 16}

DATASETS = {
    "digits": Source(
        "handwritten digits, 8x8 pixels; ships with fedspu",
        "sets.digits",
        num_examples=1_797,
        num_classes=10,
        # A hundred clients (the default) would have twelve training examples each.
        defaults={
            "model": "digits",
            "clients.number": 30,
            "data.alpha": 0.5,
            "rounds": 20,
            "train.lr": 0.02,
            "train.batch_size": 16,
        },
    ),
    "emnist": Source(
        "handwritten digits and letters (by class), 28x28 pixels; in the paper",
        "sets.emnist",
        num_examples=814_255,
        num_classes=62,
        defaults={"model": "emnist", "train.lr": 2e-4, "train.batch_size": 16},
    ),
    "cifar10": Source(
        "colour photographs, 32x32 pixels; in the paper",
        "sets.cifar10",
        num_examples=50_000,
        num_classes=10,
        defaults={"model": "cifar10", "train.lr": 0.1, "train.batch_size": 128},
    ),
    "speech": Source(
        "spoken words (Google Speech Commands 2), 32x32 log-mel; in the paper",
        "sets.speech",
        num_examples=105_829,
        num_classes=35,
        defaults=SPEECH,
    ),
    "mnist": Source(
        "handwritten digits, 28x28 pixels",
        "sets.mnist",
        num_examples=70_000,
        num_classes=10,
        # The paper's network for images like these; the learning rate is ours.
        defaults={"model": "emnist", "train.lr": 0.02, "train.batch_size": 16},
    ),
    "fashion-mnist": Source(
        "pieces of clothing, 28x28 pixels",
        "sets.fashion_mnist",
        num_examples=70_000,
        num_classes=10,
        defaults={"model": "emnist", "train.lr": 0.02, "train.batch_size": 16},
    ),
    "arrays": Source(
        "your own examples: an .npz file with arrays x and y",
        "own.arrays",
        file="FILE.npz",
    ),
    "images": Source(
        "your own images: a folder per class (extra: images)",
        "own.folders:load_images",
        file="FOLDER",
    ),
    "sounds": Source(
        "your own WAV or FLAC files: a folder per class (extra: audio)",
        "own.folders:load_sounds",
        file="FOLDER",
        defaults=SPEECH,
    ),
    "hf": Source(
        "your own data, saved to disk by Hugging Face datasets (extra: hf)",
        "own.hf",
        file="FOLDER",
    ),
}


FROM_PYTHON = Source(
    "your own examples: a Python function that returns arrays x and y",
    "own.python",
    file="package.module:load",
)


def load(
    name: str, folder: Path | None = None, task: "Task | None" = None
) -> "Dataset":
    """The data set called ``name``, with targets for ``task`` (else classification).

    A relative FILE of the user's own data is looked up in ``folder``.
    """
    from fedspu.data.dataset import with_targets
    from fedspu.tasks.classification import classification

    source, file = find_source(name)
    if source is FROM_PYTHON:
        return with_targets(source.module.load(name), task or classification)
    place = (folder or Path()) / Path(file).expanduser() if file else folder
    function = source.place.partition(":")[2] or "load"
    dataset = getattr(source.module, function)(place)
    return with_targets(dataset, task or classification)


def find_source(name: str) -> tuple[Source, str]:
    """What a data set is, and what follows the colon in its name."""
    kind, _, file = name.partition(":")
    if names_code(name):
        return FROM_PYTHON, name
    if kind not in DATASETS:
        known = ", ".join(usage(known) for known in sorted(DATASETS))
        known = f"{known}, {FROM_PYTHON.file}"
        raise SettingsError(
            f"data.name = {name!r}: expected one of {known}"
            f"{_meant(name) or nearest(kind, list(DATASETS))}"
        )
    source = DATASETS[kind]
    if bool(file) != bool(source.file):
        raise SettingsError(f"data.name = {name!r}: expected {usage(kind)}")
    return source, file


TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx", ".txt", ".npy", ".pt")
"""Files that people have data in, and that are not read."""


def _meant(name: str) -> str:
    """What a path without its kind probably is."""
    if (kind := Path(name).suffix.lower()) in TABLES:
        return (
            f"; {kind} files are not read: make an .npz of it with NumPy, as in "
            "np.savez('my.npz', x=x, y=y), and use arrays:my.npz"
        )
    if name.lower().endswith(".npz"):
        return f" (did you mean arrays:{name}?)"
    if Path(name).is_dir():
        return f" (did you mean images:{name} or sounds:{name}?)"
    return ""


def names_code(name: str) -> bool:
    """Whether the data called ``name`` comes from a user's Python function."""
    return is_place(name) and name.partition(":")[0] not in DATASETS


def usage(kind: str) -> str:
    """A data set's name as the user types it."""
    file = DATASETS[kind].file
    return f"{kind}:{file}" if file else kind
