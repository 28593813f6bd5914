import gzip
import os
import struct
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

import numpy as np
import pytest

from fedspu.data.formats import idx
from fedspu.errors import DataError
from tests.data import files as formats

ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
WHOLE = formats.idx(ARRAY)


def test_a_plain_file_gives_its_array(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(WHOLE)
    assert np.array_equal(idx.read(tmp_path / "a", axes=3), ARRAY)


def test_a_compressed_file_gives_its_array(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(WHOLE))
    assert np.array_equal(idx.read(tmp_path / "a.gz", axes=3), ARRAY)


def test_a_file_in_an_archive_gives_its_array(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("in/a.gz", gzip.compress(WHOLE))
        archive.writestr("in/b", WHOLE)
    with ZipFile(tmp_path / "z.zip") as archive:
        for name in ("a.gz", "b"):
            found = idx.read(ZipPath(archive, f"in/{name}"), axes=3)
            assert np.array_equal(found, ARRAY)


def test_lengths_are_big_endian(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\0\0\x08\x01\0\0\x01\x02" + bytes(258))
    assert idx.read(tmp_path / "a", axes=1).shape == (258,)


def test_a_file_longer_than_one_piece_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idx, "CHUNK", 5)
    (tmp_path / "a").write_bytes(WHOLE)
    assert np.array_equal(idx.read(tmp_path / "a", axes=3), ARRAY)


HUGE = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**31)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty; expected an idx file, which begins with 00000803"),
        (b"\0\0", "begins with 0000; expected 00000803"),
        (WHOLE[:9], "begins with 00000803; expected"),
        (b"<html>" + WHOLE, "begins with 3c68746d; expected 00000803"),
        (b"\0\0\x0d\x03" + WHOLE[4:], "begins with 00000d03; expected 00000803"),
        (b"\0\0\x08\x01" + WHOLE[4:], "begins with 00000801; expected 00000803"),
        (WHOLE[:-1], "ends after at most 23 numbers; expected 24"),
        (WHOLE[:16], "ends after at most 0 numbers; expected 24"),
        (WHOLE + b"x", "more than 2 x 3 x 4 numbers; expected 24"),
        (formats.idx(ARRAY[:0]), "0 x 3 x 4 numbers; expected at least one example"),
        (HUGE, "4,294,967,295 examples; expected at most 1,000,000"),
    ],
)
@pytest.mark.parametrize("chunk", [5, 2**24])
def test_a_damaged_file_is_told_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    says: str,
    chunk: int,
) -> None:
    monkeypatch.setattr(idx, "CHUNK", chunk)
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        idx.read(tmp_path / "a", axes=3)
    assert str(caught.value).startswith(f"{tmp_path}/a: ")
    assert "\n" not in str(caught.value)


PACKED = gzip.compress(WHOLE)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(PACKED[:-9], id="cut"),
        pytest.param(PACKED[:-8] + bytes(8), id="checksum"),
        pytest.param(WHOLE, id="not packed"),
        pytest.param(PACKED[:12] + b"\xff" * 8 + PACKED[20:], id="garbled"),
    ],
)
def test_damage_in_a_compressed_file_is_told_by_name(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(
        DataError, match=r"a\.gz: .*; expected .*Download the file again$"
    ):
        idx.read(tmp_path / "a.gz", axes=3)


def test_a_packed_file_cannot_ask_for_more_than_gzip_can_give(tmp_path: Path) -> None:
    asking = bytes([0, 0, 8, 3]) + struct.pack(">3I", 1_000_000, 28, 28)
    (tmp_path / "a.gz").write_bytes(gzip.compress(asking))
    with pytest.raises(DataError, match=r"ends after at most .*; expected 784,000,000"):
        idx.read(tmp_path / "a.gz", axes=3)


def test_images_of_another_size_are_refused_before_they_are_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").write_bytes(WHOLE[:16])
    with pytest.raises(DataError, match="images of 3 x 4; expected 28 x 28"):
        idx.read(tmp_path / "a", 3, (28, 28))


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(DataError, match="a pipe, not an ordinary file"):
        idx.read(tmp_path / "a", axes=3)


def test_a_missing_file_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a: cannot be read .*No such file"):
        idx.read(tmp_path / "a", axes=3)


def test_the_packed_file_is_preferred(tmp_path: Path) -> None:
    for name in ("a", "a.gz", "b"):
        (tmp_path / name).touch()
    found = idx.find_all(tmp_path, ["a", "b"])
    assert [file.name for file in found] == ["a.gz", "b"]


def test_nothing_there_is_nothing_found(tmp_path: Path) -> None:
    assert idx.find_all(tmp_path / "nowhere", ["a", "b"]) == []


def test_a_part_of_the_files_is_an_error_that_names_another(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(DataError, match=r"b\.gz is missing, although a is there"):
        idx.find_all(tmp_path, ["a", "b"])
