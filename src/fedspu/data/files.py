"""Where data files lie, and what the official ones are called.

The files of a data set lie in a folder of its name in the data folder, or in the places
where others put them. ``fetch`` (fetch.py) puts them there; so may the user.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedspu.errors import DataError


@dataclass(frozen=True)
class Download:
    """An official file: its address, its size in bytes, and its checksum.

    A checksum is written as kind:value, like sha256:0a1b…; it is empty where none is
    known for certain, and then the size alone is compared.
    """

    url: str
    size: int
    checksum: str = ""

    @property
    def name(self) -> str:
        """What the file is called."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        known = f"{self.size:,} bytes"
        return f"{self.name} ({known}, {self.checksum or 'checksum not known'})"


def data_folder(folder: Path | None = None) -> Path:
    """Where data lies: ``folder``, FEDSPU_DATA, or fedspu in the user's data folder."""
    if folder is not None:
        return folder.expanduser()
    own = os.environ.get("FEDSPU_DATA")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path.home() / ".local" / "share") / "fedspu"


def places(
    name: str, folder: Path | None, others: Iterable[str] = ()
) -> Iterator[Path]:
    """The folders in which the files of ``name`` may lie, likeliest first.

    ``others`` are further ones: in the data folder, or anywhere if absolute.
    """
    root = data_folder(folder)
    yield root / name
    for other in others:
        yield root / other
    if folder is not None:  # the user may point to the very folder
        yield root


def not_here(
    name: str, folder: Path | None, downloads: Iterable[Download]
) -> DataError:
    """The error that says which file to put where."""
    root = data_folder(folder)
    files = ", ".join(str(download) for download in downloads)
    return DataError(
        f"{name}: its files are not in {root}; get them with `fedspu data fetch {name}"
        f"{f' --data-dir {folder}' if folder else ''}`, or put {files} into "
        f"{root / name}"
    )
