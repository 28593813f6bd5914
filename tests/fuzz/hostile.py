"""Files that ask for gigabytes, played in a process with little memory to spare.

``python -m tests.fuzz.hostile`` prints how each was refused; it fails if one was not.
"""

import gzip
import io
import resource
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile

from tests.fuzz.targets import CORPUS, REFUSED, TARGETS

ROOM = 200 * 2**20  # bytes, besides what the libraries take
MEGABYTE = bytes(10**6)


def npz(kind: str, rows: int, megabytes: int = 0) -> bytes:
    """An array with so many rows of two; so much of it is there, as zeros."""
    shape = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({rows}, 2)}}"
    opened, head = io.BytesIO(), b"\x93NUMPY\1\0" + struct.pack("<H", len(shape))
    deflated = zipfile.ZIP_DEFLATED
    with (
        zipfile.ZipFile(opened, "w", deflated, compresslevel=1) as archive,
        archive.open("x.npy", "w") as x,
    ):
        x.write(head + shape.encode())
        for _ in range(megabytes):
            x.write(MEGABYTE)
    return opened.getvalue()


def tar(size: int, kind: bytes) -> bytes:
    member = tarfile.TarInfo("one.bin")
    member.size, member.type = size, kind
    return b"p" + gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + MEGABYTE * 4)


def wav(num_channels: int) -> bytes:
    opened = io.BytesIO()
    soundfile.write(opened, np.zeros((1, num_channels)), 999_999, format="WAV")
    return opened.getvalue()


def inputs() -> Iterator[tuple[str, str, bytes]]:
    """What is hostile about an input, its target, and the input."""
    yield "a bomb of 300 MB", "npz", npz("|u1", 15 * 10**7, 300)
    yield "bytes that become int64", "npz", npz("|i1", 2 * 10**7, 40)
    yield "a claim of 2 TB", "npz", npz("|u1", 10**12)
    yield "an item of 1 GB", "npz", npz("|S1000000000", 1)
    images = b"\0\0\x08\3" + struct.pack(">3I", 10**6, 64, 64)
    yield "images of 4 GB", "idx", b"3" + gzip.compress(images)
    memo = b"".join(b"Nr" + (2**n).to_bytes(4, "little") for n in range(20, 32))
    yield "a memo of 2 GB", "cifar_pickle", b"\x80\2" + memo + b"."
    large = (CORPUS / "exported" / "made-large-input").read_bytes()
    yield "a model for inputs of 40 GB", "exported", large
    yield "a text of 2 GB", "cifar_pickle", b"X" + struct.pack("<I", 2**31 - 1) + b"."
    yield "a member of 1.5 GB", "tar", tar(1_500_000_000, b"0")
    yield "a note of 8 GB", "tar", tar(2**33 - 1, b"x")
    yield "a folder of 8 GB", "tar", tar(2**33 - 1, b"5")
    yield "a thousand channels", "sound", wav(1000)


def main() -> None:
    played = list(inputs())
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for what, target, content in played:
        TARGETS[target](content)
        print(f"{what}: {REFUSED}")  # noqa: T201  # read by the test
        assert REFUSED, what


if __name__ == "__main__":
    main()
