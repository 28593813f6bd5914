"""Opening files that others may have put there: ordinary ones only.

A pipe may never have a byte, and a device like /dev/zero has no end; neither is a file
of data, settings or a run.
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


NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has neither
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # or opening a pipe waits for its other end


def open_ordinary(path: Path, follow: bool = True) -> BinaryIO:
    """Open a file to read; an OSError if it is anything but an ordinary file.

    Links are followed, unless ``follow`` is False.
    """
    more = NO_WAIT if follow else NO_WAIT | NO_FOLLOW
    # The caller closes it.
    return open(path, "rb", opener=lambda path, flags: _open(path, flags | more))


def _open(path: str, flags: int) -> int:
    descriptor = os.open(path, flags)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind in (stat.S_IFREG, stat.S_IFDIR):  # open refuses folders in its own words
        return descriptor
    os.close(descriptor)
    found = KINDS.get(kind, "something else")
    raise OSError(errno.EINVAL, f"{found}, not an ordinary file", path)


def size_of(opened: BinaryIO) -> int:
    """The size of an open file, in bytes."""
    return os.fstat(opened.fileno()).st_size
