"""Tar archives, compressed by gzip, read from start to end; nothing goes to disk.

A member is a header of 512 bytes, then its content, filled up to whole blocks of 512.
This reader gives ordinary files only: links, devices and folders are passed over, and
so are the notes by which other programs give a member a longer name.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import IO, Protocol

from fedspu.data import bounds
from fedspu.data.files import reason
from fedspu.errors import DataError

BLOCK = 512
CHUNK = 2**18
FILES = (b"0", b"\0")
NOTES = (b"x", b"g", b"X", b"L", b"K")

Wanted = Callable[[PurePosixPath], int]
"""A member's path -> the most bytes it may have; 0 if it is not wanted."""


class DamagedError(Exception):
    """The archive is not what it should be."""


def members(
    opened: IO[bytes], name: str, most: int, wanted: Wanted, is_packed: bool = True
) -> Iterator[tuple[PurePosixPath, bytes]]:
    """The path and the content of each member that is wanted.

    ``most`` is the largest size of the whole archive, unpacked. ``name`` is the
    archive's, for messages; ``is_packed`` says whether gzip compressed it. A path that
    comes twice is refused.
    """
    try:
        plain = gzip.GzipFile(fileobj=opened) if is_packed else opened
        with plain:
            yield from _members(_Stream(plain, most), wanted)
    except (DamagedError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{name}: damaged ({reason(error)}); expected a whole archive. Download "
            "the file again"
        ) from None


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Stream:
    """What is left of an archive, and how much of it may be read."""

    def __init__(self, plain: _Readable, most: int) -> None:
        self.plain, self.left, self.most = plain, most, most

    def take(self, size: int) -> bytes:
        """Exactly so many bytes."""
        self.left -= size
        if self.left < 0:
            raise DamagedError(f"more than {self.most:,} bytes unpacked")
        content = self.plain.read(size)
        if len(content) < size:
            raise DamagedError("it ends inside a member")
        return content

    def skip(self, size: int) -> None:
        """Pass over so many bytes."""
        for start in range(0, size, CHUNK):
            self.take(min(CHUNK, size - start))

    def finish(self) -> None:
        """Read to the end, where gzip verifies its checksum."""
        while content := self.plain.read(CHUNK):
            self.left -= len(content)
            if self.left < 0:
                raise DamagedError(f"more than {self.most:,} bytes unpacked")


def _members(stream: _Stream, wanted: Wanted) -> Iterator[tuple[PurePosixPath, bytes]]:
    seen: set[PurePosixPath] = set()
    for _ in range(bounds.MEMBERS):
        header = stream.take(BLOCK)
        if header == bytes(BLOCK):  # the end of the archive
            stream.finish()
            return
        path, kind, size = _header(header)
        if kind in NOTES and size > bounds.EXTENSION:
            raise DamagedError(f"a note of {size:,} bytes about a member")
        most = wanted(path) if kind in FILES else 0
        if most == 0:
            stream.skip(_blocks(size))
            continue
        if path in seen:
            raise DamagedError(f"it holds {path} twice")
        seen.add(path)
        if size > most:
            raise DamagedError(f"{path} has {size:,} bytes, expected at most {most:,}")
        yield path, stream.take(_blocks(size))[:size]
    raise DamagedError(f"more than {bounds.MEMBERS:,} members")


def _header(block: bytes) -> tuple[PurePosixPath, bytes, int]:
    """A member's path, its kind and its size."""
    plain = block[:148] + b" " * 8 + block[156:]
    if _octal(block[148:156]) != sum(plain):
        raise DamagedError("a wrong checksum, or no tar archive")
    name, prefix = _text(block[:100]), ""
    if block[257:263] == b"ustar\0":
        prefix = _text(block[345:500])
    path = PurePosixPath(prefix, name) if prefix else PurePosixPath(name)
    return path, block[156:157], _octal(block[124:136])


def _octal(field: bytes) -> int:
    digits = field.strip(b" \0")
    if not all(byte in b"01234567" for byte in digits):
        raise DamagedError("a number that is not octal")
    return int(digits or b"0", 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
