"""Decoded arrays, kept on disk: decoded once, then memory-mapped by every process.

A cache is a folder of .npy files. Its name holds a hash of the recipe and of the files
the arrays came from, so a change to either makes another cache. A cache is written
under a temporary name and renamed when it is complete, so there is never half of one.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspu.data import bounds
from fedspu.data.files import read
from fedspu.errors import DataError

Arrays = dict[str, NDArray[Any]]

CONTENTS = "contents.json"
UNFINISHED = ".unfinished-"
A_DAY = 24 * 60 * 60


def cached(
    name: str,
    recipe: str,
    sources: Iterable[Path],
    build: Callable[[], Mapping[str, NDArray[Any]]],
    folder: Path | None = None,
) -> Arrays:
    """The arrays that ``build`` makes of the files ``sources``, built only once.

    ``recipe`` is a few words that change whenever ``build`` does. The arrays are
    memory-mapped; writing to one does not change its file. A build that fails or is
    interrupted leaves nothing behind, and a damaged cache is built again. If two
    processes build the same cache, one wins and both use the result.
    """
    sources = list(sources)
    place = cache_place(name, recipe, sources, folder)
    for _ in range(3):  # another process may replace a damaged cache as we open it
        arrays = _open(place)
        if arrays is not None:
            return arrays
        built = build()
        _refuse_empty(built, name)
        if cache_place(name, recipe, sources, folder) != place:
            raise DataError(
                f"{name}: its files changed while they were read; try again"
            )
        _write(built, place)
    raise DataError(f"{place}: this cache was rebuilt but is still damaged; remove it")


def cache_place(
    name: str, recipe: str, sources: Iterable[Path], folder: Path | None = None
) -> Path:
    """The folder in which ``cached`` keeps these arrays, whether it exists or not."""
    found = [recipe]
    for source in sources:
        try:
            now = source.stat()
        except OSError as error:
            raise DataError(f"{source}: {error.strerror}") from None
        found.append(f"{source.absolute()} {now.st_size} {now.st_mtime_ns}")
    digest = sha256("\n".join(found).encode(errors="surrogateescape")).hexdigest()
    return (folder or cache_folder()) / f"{name}-{digest[:16]}"


def cache_folder() -> Path:
    """The folder of all caches: FEDSPU_CACHE, or fedspu in the user's cache folder."""
    own = os.environ.get("FEDSPU_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "fedspu"


def _open(place: Path) -> Arrays | None:
    """The arrays of a complete cache; None if it is missing or was changed."""
    try:
        contents = json.loads(read(place / CONTENTS, bounds.CACHE_CONTENTS))
        arrays: Arrays = {}
        for name, written in contents.items():
            file = place / f"{name}.npy"
            if _seen(file) != written:
                return None
            # Copy on write: changes to an array do not reach the file. (Torch would
            # warn about read-only arrays.)
            arrays[name] = np.load(file, mmap_mode="c", allow_pickle=False)
    except Exception:  # missing, or damaged in any way: it is built again
        return None
    return arrays


def _seen(file: Path) -> list[int]:
    """Size and time of change: they show if a program changes the file later."""
    now = file.stat()
    return [now.st_size, now.st_mtime_ns]


def _refuse_empty(arrays: Mapping[str, NDArray[Any]], name: str) -> None:
    for part, array in arrays.items():
        if array.size == 0:
            raise DataError(f"{name}: {part} is empty; expected at least one example")


def _write(arrays: Mapping[str, NDArray[Any]], place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_old_leftovers(place.parent)
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=place.parent))
        try:
            for name, array in arrays.items():
                np.save(unfinished / f"{name}.npy", array, allow_pickle=False)
            contents = {name: _seen(unfinished / f"{name}.npy") for name in arrays}
            text = json.dumps(contents)
            (unfinished / CONTENTS).write_text(text, encoding="utf-8")
            unfinished.chmod(0o755)  # mkdtemp lets only the owner read
            _put(unfinished, place)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{place.parent}: the decoded data cannot be stored there "
            f"({error.strerror}); set FEDSPU_CACHE to a folder with enough space"
        ) from None


def _put(unfinished: Path, place: Path) -> None:
    """Rename a finished cache to its place, unless a complete one exists by now."""
    if place.exists() and _open(place) is None:
        damaged = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=place.parent))
        try:
            place.replace(damaged / "damaged")
        except FileNotFoundError:
            pass  # another process has moved it away
        finally:
            shutil.rmtree(damaged, ignore_errors=True)
    try:
        unfinished.rename(place)
    except OSError:
        if _open(place) is None:  # otherwise another process won
            raise


def _remove_old_leftovers(folder: Path) -> None:
    """Remove what killed processes have left behind."""
    for left in folder.glob(f"{UNFINISHED}*"):
        try:
            is_old = time.time() - left.stat().st_mtime > A_DAY
        except OSError:
            continue  # its process has just finished
        if is_old:
            shutil.rmtree(left, ignore_errors=True)
