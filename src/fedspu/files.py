"""Files that outlive a power cut, and files that are read without being trusted."""

import errno
import os
import stat
import time
from hashlib import file_digest, sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fedspu.errors import DamagedError, StorageError
from fedspu.ordinary_files import NO_FOLLOW, NO_WAIT, open_ordinary, size_of

try:
    import fcntl
except ImportError:  # this system has no such locks
    fcntl = None  # type: ignore[assignment]  # checked where it is used

LARGEST = 2**36
"""Bytes of the largest file that is read into memory."""


class Mark(NamedTuple):
    """What tells a file from any other: its length and its SHA-256."""

    length: int
    sha256: str

    @staticmethod
    def of(content: bytes) -> "Mark":
        """The mark of a file with this content."""
        return Mark(len(content), sha256(content).hexdigest())


# Writing: all of these raise OSError --------------------------------------------------


def write_whole(
    path: Path, content: bytes, *, durable: bool = False, private: bool = False
) -> Mark:
    """Write a file whole or not at all.

    If ``durable``, its content is on the disk, but its name only after ``sync_folder``.
    A ``private`` file can be read by its owner only.
    """
    part = path.with_name(path.name + ".part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW
    mode = 0o600 if private else 0o666
    try:
        opened = os.open(part, flags, mode)
    except FileExistsError:  # of a process that was killed
        part.unlink()
        opened = os.open(part, flags, mode)
    try:
        _write_and_close(opened, content, durable)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return Mark.of(content)


def append(
    path: Path, content: bytes, start: int, *, durable: bool, private: bool = False
) -> None:
    """Add to a file that is ``start`` bytes long; it is made if it does not exist."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW | NO_WAIT
    opened = os.open(path, flags, 0o600 if private else 0o666)
    try:
        size = _own_length(opened, path)
        if size != start:
            raise OSError(errno.EIO, f"{path} has {size} bytes instead of {start}")
    except OSError:
        os.close(opened)
        raise
    _write_and_close(opened, content, durable)


def cut(path: Path, length: int) -> None:
    """Cut a file back to the length it had before."""
    opened = os.open(path, os.O_RDWR | NO_FOLLOW | NO_WAIT)
    try:
        if _own_length(opened, path) != length:
            os.ftruncate(opened, length)
            os.fsync(opened)
    finally:
        os.close(opened)


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    _sync(path, os.O_RDONLY | NO_FOLLOW | NO_WAIT)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "posix":  # elsewhere, folders cannot be opened
        _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _write_and_close(opened: int, content: bytes, durable: bool) -> None:
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(opened, left) :]
        if durable:
            os.fsync(opened)
    finally:
        os.close(opened)


def _own_length(opened: int, path: Path) -> int:
    """The length of a file that may be changed: ordinary, and without other names."""
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"{path} is not an ordinary file")
    if found.st_nlink != 1:
        raise OSError(
            errno.EMLINK, f"{path} has other names (hard links): copy it instead"
        )
    return found.st_size


# Locks --------------------------------------------------------------------------------


def lock(path: Path, seconds: float = 0.0, *, private: bool = True) -> BinaryIO | None:
    """Lock a file until it is closed; None if another process has locked it.

    ``seconds``: how long to wait for that process, which may be about to end. Whether
    a ``private`` file is locked, no other user can see.
    """
    flags = os.O_RDWR | os.O_CREAT | NO_FOLLOW | NO_WAIT
    until = time.monotonic() + seconds
    while True:
        opened = os.open(path, flags, 0o600 if private else 0o666)
        file = open(opened, "r+b")  # noqa: SIM115  # callers close it
        if fcntl is None:
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
        except BlockingIOError:
            if time.monotonic() >= until:
                file.close()
                return None
        file.close()  # it is held, or was removed by the one who held it
        time.sleep(0.02)


def is_locked(path: Path) -> bool:
    """Whether a process has locked this file; nothing is changed."""
    if fcntl is None:
        return path.exists()
    try:
        with open_ordinary(path, follow=False) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except (OSError, StorageError):
        return False
    return False


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


# Reading: all of these raise StorageError ---------------------------------------------


def read_file(path: Path, limit: int = LARGEST) -> bytes:
    """The content of an ordinary file of at most ``limit`` bytes; no link is followed.

    Raises ``DamagedError`` if there is no such file.
    """
    try:
        with open_ordinary(path, follow=False) as file:
            size = size_of(file)
            if size > limit:
                raise DamagedError(f"{path} has {size} bytes; expected at most {limit}")
            return file.read(size)
    except MemoryError:
        raise StorageError(f"{path} has {size} bytes: not enough memory") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def read_marked(path: Path, mark: Mark) -> bytes:
    """The content of a file that must be what it was when it was marked."""
    content = read_file(path, min(mark.length, LARGEST))
    _check(path, Mark.of(content), mark)
    return content


def read_start(path: Path, mark: Mark) -> bytes:
    """The first bytes of a file, to which others may have been added since."""
    try:
        with open_ordinary(path, follow=False) as file:
            length = max(0, min(mark.length, LARGEST, size_of(file)))
            content = file.read(length)
    except MemoryError:
        raise StorageError(f"{path}: not enough memory to read it") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    _check(path, Mark.of(content), mark)
    return content


def check_marked(path: Path, mark: Mark) -> None:
    """Refuse a file that is not what it was when it was marked."""
    _check(path, mark_of(path), mark)


def _check(path: Path, found: Mark, mark: Mark) -> None:
    if found != mark:
        raise DamagedError(f"{path} is damaged: it is not what was saved")


def mark_of(path: Path) -> Mark:
    """The mark of a file, of which only a small part is in memory at a time."""
    try:
        with open_ordinary(path, follow=False) as file:
            found = file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it is a file
            return Mark(file.tell(), found)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def not_a_link(folder: Path) -> Path:
    """The same folder; refuses a link to one, and a file of this name."""
    if folder.is_symlink():
        raise _linked(folder)
    if folder.exists() and not folder.is_dir():
        raise DamagedError(f"{folder} is not a folder")
    return folder


def _linked(path: Path) -> StorageError:
    return DamagedError(f"{path} is a link; links are not followed in a run folder")


def _unreadable(path: Path, error: OSError | ValueError) -> StorageError:
    if isinstance(error, ValueError):  # the name itself cannot be: it has a NUL
        return DamagedError(f"{str(path)!r} is no name of a file")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return DamagedError(f"{path} is missing")
    if error.errno == errno.ELOOP:
        return _linked(path)
    if error.errno in (errno.EINVAL, errno.EISDIR, errno.ENXIO):
        return DamagedError(f"{path} is not an ordinary file")
    if error.errno == errno.EIO:
        return DamagedError(f"{path} cannot be read from the disk ({error.strerror})")
    return StorageError(f"{path} cannot be read ({error.strerror or error})")
