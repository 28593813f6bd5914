import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspu.data import bounds
from fedspu.data.formats import zip as zips
from fedspu.data.formats.npz import read_npz
from fedspu.data.own import arrays
from fedspu.errors import DataError

X = np.arange(12, dtype=np.uint8).reshape(4, 3)


def npy(array: Any, header: bytes | None = None) -> bytes:
    opened = io.BytesIO()
    np.save(opened, array)
    return opened.getvalue() if header is None else header + array.tobytes()


def header(text: str) -> bytes:
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode()


def packed(how: int = zipfile.ZIP_STORED, /, **members: bytes) -> bytes:
    opened = io.BytesIO()
    with zipfile.ZipFile(opened, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return opened.getvalue()


def refusal(content: bytes) -> str:
    with pytest.raises(DataError) as caught:
        arrays.decode(io.BytesIO(content), "a.npz")
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    "x",
    [
        X,
        np.asfortranarray(X),
        X.astype(">f4"),
        X.astype("<i2"),
        X[:0],
        np.array(3.5),
        np.array(["ada", "bob"]),
    ],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_those_that_numpy_reads(x: Any, save: Any) -> None:
    opened = io.BytesIO()
    save(opened, x=x, other=X)
    found, names = read_npz(opened, ("x",))
    assert names == ["x", "other"]
    assert list(found) == ["x"]
    assert found["x"].dtype == x.dtype
    assert np.array_equal(found["x"], x)


def test_an_encrypted_file_is_refused() -> None:
    content = bytearray(packed(x=npy(X)))
    for sign, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.find(sign) + place] |= 1
    assert "x.npy is encrypted" in refusal(bytes(content))


@pytest.mark.parametrize("how", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_unusual_compression_is_refused(how: int) -> None:
    assert "compressed by an unusual method" in refusal(packed(how, x=npy(X)))


def test_a_name_that_comes_twice_is_refused() -> None:
    opened = io.BytesIO()
    with zipfile.ZipFile(opened, "w") as archive:
        archive.writestr("x.npy", npy(X))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("x.npy", npy(X + 1))
    assert "it holds x.npy twice" in refusal(opened.getvalue())
    opened = io.BytesIO()
    with zipfile.ZipFile(opened, "w") as archive:
        archive.writestr("x", npy(X))
        archive.writestr("x.npy", npy(X + 1))
    assert "it holds array x twice" in refusal(opened.getvalue())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (10**6,)}", "array x: "),
        (
            "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,)}",
            "has 12 bytes, expected 1,000,000,000,000",
        ),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (4, 3)}", "Object arrays"),
        ("{'descr': '|V0', 'fortran_order': False, 'shape': (4, 3)}", "expected num"),
        ("{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (12,)}", "numb"),
        ("{'descr': '<M8[s]', 'fortran_order': False, 'shape': (1,)}", "expected num"),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (-4, -3)}", "has shape"),
        ("[" * 5000, "array x: "),
        (" " * 20_000, "array x: "),
    ],
)
def test_a_strange_header_is_refused(text: str, says: str) -> None:
    assert says in refusal(packed(x=npy(X, header(text))))


def test_a_member_that_claims_more_than_deflate_can_give_is_refused() -> None:
    content = bytearray(packed(zipfile.ZIP_DEFLATED, x=npy(X)))
    place = content.find(b"PK\1\2") + 24
    content[place : place + 4] = struct.pack("<I", 2**31)
    assert "claims 2,147,483,648 bytes in " in refusal(bytes(content))


def test_arrays_take_at_most_half_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "half_of_memory", lambda: 2**20)
    bomb = packed(zipfile.ZIP_DEFLATED, x=npy(np.zeros(2**20 + 1, np.uint8)))
    assert "half of this machine's memory" in refusal(bomb)
    both = {name: npy(np.zeros((2**19, 2), np.uint8)) for name in ("x", "y")}
    assert "array y takes 1,048,576 bytes, expected at most 0" in refusal(
        packed(**both)
    )
    # Read, and copied as int64: nine bytes for each.
    copied = packed(x=npy(np.zeros((2**17, 1), np.int8)))
    assert "array x takes 1,179,648 bytes" in refusal(copied)


def test_a_long_list_of_members_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = packed(x=npy(X), **{f"a{n}": b"" for n in range(50)})
    monkeypatch.setattr(bounds, "DIRECTORY", 500)
    monkeypatch.setattr(zips, "ZipFile", lambda opened: pytest.fail("it was read"))
    assert "its list of members has " in refusal(whole)
    # A comment may hold what looks like an end; the standard library takes that one.
    assert "its list of members has " in refusal(whole + whole[-22:])


def test_targets_may_be_floats_of_any_kind() -> None:
    for kind in (">f8", "<f4", np.longdouble):
        y = np.array([0.5, 1, 2, 3], dtype=kind)
        made = arrays.decode(io.BytesIO(packed(x=npy(X), y=npy(y))), "a.npz")
        assert made.y.tolist() == [0.5, 1, 2, 3]


def test_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "zero.npz").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(DataError, match=r"not an ordinary file; expected an \.npz"):
            arrays.load(tmp_path / f"{name}.npz")
