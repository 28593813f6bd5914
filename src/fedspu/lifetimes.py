"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal
from contextlib import suppress


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Called in a new process: it gets this signal when its parent ends.

    ``parent`` is the parent's pid, noted before: it may have ended meanwhile. Only
    Linux can do this; elsewhere nothing happens.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number)
        if os.getppid() != parent:
            os._exit(1)
