"""Who plays a comparison: one process at a time, which holds a lock in its folder."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedspu.errors import StorageError
from fedspu.federation.storage.own_files import LOCK
from fedspu.federation.storage.saved_index import SWEEP
from fedspu.files import is_locked, lock
from fedspu.sweeps.tuning import FOLDER


def is_comparison(path: Path) -> bool:
    """Whether a folder holds a comparison, if only its tuning."""
    return any((folder / SWEEP).is_file() for folder in (path, path / FOLDER))


def is_played(out: Path) -> bool:
    """Whether a process plays the comparison in this folder."""
    return is_locked(out / LOCK)


def refuse_played(out: Path) -> None:
    """Refuse to play a comparison that another process plays."""
    if is_played(out):
        raise _played(out)


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Inside, nobody else plays into this folder, which is made if there is none.

    The system ends the lock with the process, also if that is killed.
    """
    made = [path for path in (out, *out.absolute().parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Processes of a comparison that was killed hold it a little longer.
        held = lock(out / LOCK, seconds=1.0, private=False)
    except OSError as error:
        raise StorageError(f"{out}: cannot write ({error})") from error
    if held is None:
        raise _played(out)
    try:
        yield
    finally:
        with suppress(OSError):
            (out / LOCK).unlink()
        held.close()
        with suppress(OSError):  # there is something in it
            for folder in made:
                folder.rmdir()


def _played(out: Path) -> StorageError:
    return StorageError(
        f"{out} is being played by another process; "
        f"`fedspu report {out} --watch` follows it"
    )
