"""Temporary folders for clients' models; what a killed run leaves, the next removes."""

import os
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import BinaryIO
from weakref import finalize

from fedspu.federation.client_memory import Shelf
from fedspu.federation.storage.own_files import LOCK, is_memory
from fedspu.files import lock

PREFIX = "fedspu-models-"


def temporary_shelf(cache: float) -> Shelf:
    """A shelf in a folder of its own, which is deleted together with the shelf."""
    remove_left_behind()
    while True:
        folder = Path(mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):  # another run took it for one left behind
            held = lock(folder / LOCK)
            if held is not None:
                break
    shelf = Shelf(folder, cache)
    finalize(shelf, _remove, folder, held)
    return shelf


def remove_left_behind() -> None:
    """Remove temporary folders of runs that were killed: nobody holds their locks."""
    for folder in Path(gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # whatever is wrong with it, it is not ours to mend
            is_ours = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if is_ours and (folder / LOCK).exists():
                held = lock(folder / LOCK)
                if held is not None:
                    _remove(folder, held)


def _remove(folder: Path, held: BinaryIO | None) -> None:
    with suppress(OSError):
        for file in folder.iterdir():
            if is_memory(file.name) or file.name == LOCK:
                file.unlink()
        folder.rmdir()
    if held is not None:
        held.close()
