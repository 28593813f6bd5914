"""Which files of a run folder are ours, and may be removed; no other ever is."""

import re
from contextlib import suppress
from pathlib import Path

from fedspu.federation.storage.saved_index import (
    FOLDER,
    OF_A_ROUND,
    OWN_FILES,
    PERSONAL,
    RECORDS,
    SUMMARY,
    extra_path,
    global_path,
    index_path,
    saved_rounds,
)

LOCK = ".lock"
_MEMORY = re.compile(r"client-[0-9]+-round-[0-9]+\.safetensors")


def is_own(path: Path, file: Path) -> bool:
    """Whether a file or folder in a run folder has a name that fedspu gives."""
    name = file.relative_to(path).as_posix().removesuffix(".part")
    if file.is_symlink():
        return False
    if file.is_dir():
        return name in (FOLDER, PERSONAL)
    if name in OWN_FILES or name in RECORDS or name == LOCK:
        return True
    folder, _, last = name.rpartition("/")
    if folder == PERSONAL:
        return is_memory(last)
    return folder == FOLDER and OF_A_ROUND.fullmatch(last) is not None


def is_memory(name: str) -> bool:
    """Whether a file is a client's memory, or a part of one."""
    return _MEMORY.fullmatch(name.removesuffix(".part")) is not None


def is_half_made(path: Path) -> bool:
    """Whether there is only what a run leaves that is killed before its first save."""
    if saved_rounds(path) or (path / SUMMARY).exists():
        return False
    return all(is_own(path, file) for file in path.rglob("*"))


def is_free(path: Path) -> bool:
    """Whether a new run may be written here."""
    try:
        is_empty = not any(path.iterdir())
    except FileNotFoundError:
        return not path.is_symlink()
    except OSError:  # it is a file
        return False
    has_begun = any((path / n).exists() for n in (LOCK, FOLDER, PERSONAL))
    return is_empty or (has_begun and is_half_made(path))


def remove_own(path: Path) -> None:
    """Remove all of a run except its lock, and nothing else."""
    for folder in (path / FOLDER, path / PERSONAL, path):
        if not folder.is_dir() or folder.is_symlink():
            continue
        for file in folder.iterdir():
            if is_own(path, file) and not file.is_dir() and file != path / LOCK:
                file.unlink()
        if folder != path:
            with suppress(OSError):  # there is something else in it
                folder.rmdir()


def remove_round(path: Path, t: int) -> None:
    """Remove the save after round t: its index first, then what only it needs."""
    for place in (index_path, global_path, extra_path):
        file = place(path, t)
        if not file.is_dir():
            file.unlink(missing_ok=True)


def remove_other_rounds(path: Path, wanted: set[int]) -> None:
    """Remove all saves except those after these rounds, and files half written."""
    for file in (path / FOLDER).iterdir():
        name = file.name.removesuffix(".part")
        found = OF_A_ROUND.fullmatch(name)
        if found is None or file.is_dir():
            continue
        if name != file.name or int(found[1] or found[2]) not in wanted:
            file.unlink()
    for file in (path / PERSONAL).glob("*.part"):
        if is_own(path, file) and not file.is_dir():
            file.unlink()
