"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Called in a new process: it gets this signal when its parent ends.

    ``parent`` is the parent's pid, noted before: it may have ended meanwhile. Only
    Linux can do this; elsewhere nothing happens.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number)
        if os.getppid() != parent:
            os._exit(1)


@contextmanager
def starting_a_process() -> Iterator[None]:
    """Inside, a process may be forked: Ctrl-C waits until it can ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():  # Python 3.12 warns of threads at a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_interrupts_to_parent() -> None:
    """Called in a new process: Ctrl-C is for the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
