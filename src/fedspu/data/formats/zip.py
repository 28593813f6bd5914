"""Zip archives: only ordinary ones, and their list of members is bounded."""

import lzma
import struct
import zlib
from itertools import pairwise
from typing import IO
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from fedspu.data import bounds

DAMAGED = (
    *(OSError, EOFError, ValueError, RuntimeError, NotImplementedError, MemoryError),
    *(struct.error, zlib.error, lzma.LZMAError, BadZipFile, IndexError, KeyError),
    OverflowError,
)
"""What reading a damaged archive may raise."""

END = struct.Struct("<4s4H2IH")  # the archive's end; its list's size is the sixth
LARGE_END = struct.Struct("<4sQ2H2I4Q")  # of large archives; the ninth
BETWEEN = 20  # bytes from the one to the other
TAIL = 2**16 + END.size + BETWEEN + LARGE_END.size  # with a comment after it
ENCRYPTED = 1


def open_zip(opened: IO[bytes]) -> ZipFile:
    """The archive; refuses a long list of members, and a name that comes twice."""
    size = _size_of_list(_tail(opened))
    if size > bounds.DIRECTORY:
        raise BadZipFile(f"its list of members has {size:,} bytes")
    archive = ZipFile(opened)
    names = sorted(archive.namelist())
    for name, following in pairwise(names):
        if name == following:
            raise BadZipFile(f"it holds {name} twice")
    return archive


def check_member(archive: ZipFile, member: ZipInfo) -> None:
    """Refuse what cannot be read, and what claims to unpack to more than it can."""
    name, packed = member.filename, member.compress_size
    if member.flag_bits & ENCRYPTED:
        raise BadZipFile(f"{name} is encrypted, password required")
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise BadZipFile(f"{name} is compressed by an unusual method")
    times = 1 if member.compress_type == ZIP_STORED else bounds.DEFLATE
    whole = archive.start_dir  # where the list begins, after all members
    if packed > whole or member.file_size > times * packed:
        raise BadZipFile(f"{name} claims {member.file_size:,} bytes in {packed:,}")


def is_zip(opened: IO[bytes]) -> bool:
    """Whether an open file has the end of a zip archive."""
    return _end(_tail(opened)) >= 0


def _size_of_list(tail: bytes) -> int:
    """How many bytes the list of members has; 0 if this is no archive."""
    place = _end(tail)
    if place < 0:
        return 0
    large = place - BETWEEN - LARGE_END.size
    if large >= 0 and tail[large : large + 4] == b"PK\6\6":
        return int(LARGE_END.unpack_from(tail, large)[8])
    return int(END.unpack_from(tail, place)[5])


def _end(tail: bytes) -> int:
    """Where the archive's end is, looked for as the standard library does; or -1."""
    last = len(tail) - END.size
    if last >= 0 and tail[last : last + 4] == b"PK\5\6" and tail[-2:] == b"\0\0":
        return last
    place = tail.rfind(b"PK\5\6", max(0, last - 2**16))
    return place if place <= last else -1


def _tail(opened: IO[bytes]) -> bytes:
    size = opened.seek(0, 2)
    opened.seek(max(0, size - TAIL))
    tail = opened.read(TAIL)
    opened.seek(0)
    return tail
