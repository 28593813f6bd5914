"""Opening files that others may have put there: ordinary ones only.

A pipe may never have a byte, and a device like /dev/zero has no end; neither is a file
of data or settings. Links are followed.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_ordinary(path: Path) -> BinaryIO:
    """Open a file to read; an OSError if it is anything but an ordinary file."""
    return open(path, "rb", opener=_open)  # the caller closes it


def _open(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe waits for its other end.
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind in (stat.S_IFREG, stat.S_IFDIR):  # open refuses folders in its own words
        return descriptor
    os.close(descriptor)
    found = KINDS.get(kind, "something else")
    raise OSError(errno.EINVAL, f"{found}, not an ordinary file", path)


def size_of(opened: BinaryIO) -> int:
    """The size of an open file, in bytes."""
    return os.fstat(opened.fileno()).st_size
