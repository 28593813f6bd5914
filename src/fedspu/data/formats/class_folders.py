"""A folder that has a folder for each class, with the files of that class in it."""

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedspu.data.files import shown
from fedspu.errors import DataError


@dataclass(frozen=True)
class Listing:
    """The files of every class, sorted by name whatever their order on disk.

    ``labels`` has the class of each file, ``notes`` say what was left out, and why.
    """

    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: NDArray[np.int64]
    notes: tuple[str, ...]


def list_classes(folder: Path, suffixes: Container[str], what: str) -> Listing:
    """The files with one of ``suffixes`` in each class folder of ``folder``.

    Hidden files and folders, and files with other suffixes, are left out. ``what``
    names the files in messages.
    """
    wanted = f"expected a folder per class, with its {what} in it"
    entries = _entries(folder, wanted)
    folders = [entry for entry in entries if entry.is_dir() and not _is_hidden(entry)]
    left_out = sorted(set(entries) - set(folders))
    if len(folders) < 2:
        found = ", ".join(shown(entry.name) for entry in folders) or "none"
        raise DataError(
            f"{shown(folder)}: class folders: {found}; {wanted}, at least two of them"
        )

    files: list[Path] = []
    sizes = []
    for class_folder in folders:
        inside = _entries(class_folder, wanted)
        own = [entry for entry in inside if _is_example(entry, suffixes)]
        left_out += sorted(set(inside) - set(own))
        if not own:
            raise DataError(
                f"{shown(class_folder)} holds no {what}; {wanted}; remove it or fill it"
            )
        files += own
        sizes.append(len(own))
    return Listing(
        classes=tuple(shown(entry.name) for entry in folders),
        files=tuple(files),
        labels=np.repeat(np.arange(len(folders)), sizes),
        notes=_notes(left_out, what),
    )


def _entries(folder: Path, wanted: str) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{shown(folder)}: {error.strerror}; {wanted}") from None


def _is_example(entry: Path, suffixes: Container[str]) -> bool:
    if _is_hidden(entry):
        return False
    if entry.is_dir():
        raise DataError(
            f"{shown(entry)} is a folder inside a class folder; expected only files; "
            "give the folder that holds the class folders"
        )
    if entry.suffix.lower() not in suffixes:
        return False
    if not entry.is_file():
        raise DataError(
            f"{shown(entry)} is a broken link, or not a regular file; expected a file; "
            "fix or remove it"
        )
    return True


def _is_hidden(entry: Path) -> bool:
    return entry.name.startswith(".")


def _notes(left_out: list[Path], what: str) -> tuple[str, ...]:
    hidden = [entry for entry in left_out if _is_hidden(entry)]
    others = [entry for entry in left_out if not _is_hidden(entry)]
    notes = []
    for entries, why in ((hidden, "hidden"), (others, f"not {what} by their names")):
        if entries:
            first = shown(entries[0])
            notes.append(f"left out, {why}: {len(entries)}, the first is {first}")
    return tuple(notes)
