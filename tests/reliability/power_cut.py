"""What a power cut leaves of a folder, if a disk does only what it promises.

A write is safe after the fsync of its file, and a name after the fsync of its folder.
Everything else may be lost, kept or torn, each on its own and in any order.
"""

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.reliability.disk import Operation

NAMES = ("open", "replace", "unlink", "mkdir", "rmdir")
"""Operations that change names in a folder."""


@dataclass
class Disk:
    """What is on the disk: files by number, and names by folder."""

    content: dict[int, bytes] = field(default_factory=dict)
    names: dict[Path, int | None] = field(default_factory=dict)  # None: a folder

    @staticmethod
    def of(root: Path) -> "Disk":
        """A folder as it is now, all of it safe."""
        disk = Disk()
        for path in [root, *root.rglob("*")] if root.exists() else []:
            if path.is_dir():
                disk.names[path] = None
            else:
                inode = path.stat().st_ino
                disk.names[path] = inode
                disk.content[inode] = path.read_bytes()
        return disk

    def write_out(self, root: Path, to: Path) -> None:
        """Make a folder of it, for which everything begins anew."""
        shutil.rmtree(to, ignore_errors=True)
        for path in sorted(self.names):
            new = to / path.relative_to(root) if path != root else to
            parents = [p for p in path.parents if p == root or root in p.parents]
            if not all(p in self.names for p in parents):
                continue  # its folder was lost
            inode = self.names[path]
            if inode is None:
                new.mkdir(parents=True, exist_ok=True)
            elif new.parent.is_dir():
                new.write_bytes(self.content.get(inode, b""))


def after_a_cut(
    before: Disk, log: list[Operation], moment: int, rng: random.Random
) -> tuple[Disk, list[Any]]:
    """The disk if power fails after so many operations, and the notes until then."""
    log = log[:moment]
    disk = Disk(dict(before.content), dict(before.names))
    # One mood for the whole cut: everything unsafe is lost, kept, or it depends.
    chance = rng.choice([0.0, 1.0, 0.5, 0.9, 0.1])
    for number, done in enumerate(log):
        later = log[number + 1 :]
        if done.kind in NAMES:
            folder = done.path.parent
            is_safe = any(o.kind == "fsync" and o.path == folder for o in later)
            if is_safe or rng.random() < chance:
                _rename(disk, done)
        elif done.kind in ("write", "ftruncate"):
            is_safe = any(o.kind == "fsync" and o.inode == done.inode for o in later)
            if is_safe or rng.random() < chance:
                _write(disk, done, done.content)
            elif rng.random() < 0.7:
                _write(disk, done, _torn(done.content, rng))
    return disk, [done.note for done in log if done.kind == "note"]


def _rename(disk: Disk, done: Operation) -> None:
    if done.kind == "open":
        disk.names[done.path] = done.inode
        disk.content.setdefault(done.inode, b"")
    elif done.kind == "mkdir":
        disk.names[done.path] = None
    else:
        disk.names.pop(done.path, None)
        if done.target is not None:
            disk.names[done.target] = done.inode


def _write(disk: Disk, done: Operation, content: bytes) -> None:
    old = disk.content.get(done.inode, b"")
    if done.kind == "ftruncate":
        disk.content[done.inode] = old[: done.start].ljust(done.start, b"\0")
        return
    old = old[: done.start].ljust(done.start, b"\0")
    disk.content[done.inode] = old + content


def _torn(content: bytes, rng: random.Random) -> bytes:
    """A part of what was written: cut off, with holes, or of the right length only."""
    kind = rng.randrange(3)
    if kind == 0:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 1:
        return bytes(len(content))
    torn = bytearray(content)
    for start in range(0, len(torn), 512):
        if rng.random() < 0.5:
            torn[start : start + 512] = bytes(len(torn[start : start + 512]))
    return bytes(torn)
