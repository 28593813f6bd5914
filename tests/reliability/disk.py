"""What a run does to the disk, seen operation by operation.

``Disk`` watches one folder. Before each operation it calls ``before`` with its number
and kind: there a test kills the process, or raises an error of the disk. All operations
are written down, so that ``power_cut.py`` can tell what a power cut would leave.
"""

import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

CHANGES = ("open", "write", "ftruncate", "fsync", "replace", "unlink", "mkdir", "rmdir")


@dataclass(frozen=True)
class Operation:
    """One change of the disk; a file has a number too, whatever its name is."""

    kind: str  # one of CHANGES; "open" only if it makes a file; or "note"
    path: Path
    inode: int = 0
    start: int = 0  # write: where; ftruncate: the new length
    content: bytes = b""
    target: Path | None = None  # replace
    note: Any = None


class Counter:
    """Counts in all processes together."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    def next(self) -> int:
        """The next number, from 0."""
        number = self.value
        self._memory[:8] = struct.pack("q", number + 1)
        return number

    @property
    def value(self) -> int:
        """How many have been counted."""
        return int(struct.unpack("q", self._memory[:8])[0])


class Disk:
    """All changes below one folder."""

    def __init__(
        self, root: Path, before: Callable[[int, str, Path], None] | None = None
    ) -> None:
        self.root, self.before = str(root), before
        self.log: list[Operation] = []
        self.counter = Counter()
        self._lock = threading.RLock()
        self._opened: dict[int, Path] = {}  # by descriptor
        self._real = {name: getattr(os, name) for name in (*CHANGES, "close")}

    def note(self, what: Any) -> None:
        """Write down something that is known at this moment."""
        self.log.append(Operation("note", Path(), note=what))

    @contextmanager
    def watching(self) -> Iterator["Disk"]:
        """Inside, every change is seen first."""
        with mock.patch.multiple(
            os, **{name: getattr(self, f"_{name}") for name in self._real}
        ):
            yield self

    def _tell(self, kind: str, path: Path) -> None:
        if self.before is not None:
            self.before(self.counter.next(), kind, path)
        else:
            self.counter.next()

    def _is_inside(self, path: Any) -> bool:
        return not isinstance(path, int) and str(path).startswith(self.root)

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not self._is_inside(path):
            found: int = self._real["open"](path, flags, *args, **kwargs)
            return found
        with self._lock:
            makes = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            if makes:
                self._tell("open", Path(path))
            opened: int = self._real["open"](path, flags, *args, **kwargs)
            self._opened[opened] = Path(path)
            if makes:
                inode = os.fstat(opened).st_ino
                self.log.append(Operation("open", Path(path), inode))
            return opened

    def _close(self, opened: int) -> None:
        self._opened.pop(opened, None)
        self._real["close"](opened)

    def _write(self, opened: int, content: Any) -> int:
        if opened not in self._opened:
            return int(self._real["write"](opened, content))
        with self._lock:
            self._tell("write", self._opened[opened])
            found = os.fstat(opened)
            written = int(self._real["write"](opened, content))
            self.log.append(
                Operation(
                    kind="write",
                    path=self._opened[opened],
                    inode=found.st_ino,
                    start=found.st_size,  # all our files grow at their end
                    content=bytes(content)[:written],
                )
            )
            return written

    def _ftruncate(self, opened: int, length: int) -> None:
        with self._lock:
            self._tell("ftruncate", self._opened[opened])
            self._real["ftruncate"](opened, length)
            inode = os.fstat(opened).st_ino
            self.log.append(Operation("ftruncate", self._opened[opened], inode, length))

    def _fsync(self, opened: int) -> None:
        path = self._opened.get(opened)
        if path is None:
            self._real["fsync"](opened)
            return
        with self._lock:
            self._tell("fsync", path)
            self._real["fsync"](opened)
            inode = 0 if path.is_dir() else os.fstat(opened).st_ino
            self.log.append(Operation("fsync", path, inode))

    def _replace(self, source: Any, target: Any) -> None:
        with self._lock:
            self._tell("replace", Path(source))
            inode = os.stat(source).st_ino
            self._real["replace"](source, target)
            operation = Operation("replace", Path(source), inode, target=Path(target))
            self.log.append(operation)

    def _simple(self, kind: str, path: Any, *args: Any, **kwargs: Any) -> None:
        if not self._is_inside(path):
            self._real[kind](path, *args, **kwargs)
            return
        with self._lock:
            self._tell(kind, Path(path))
            self._real[kind](path, *args, **kwargs)
            self.log.append(Operation(kind, Path(path)))

    def _unlink(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self._simple("unlink", path, *args, **kwargs)

    def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self._simple("mkdir", path, *args, **kwargs)

    def _rmdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self._simple("rmdir", path, *args, **kwargs)
