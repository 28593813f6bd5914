import gzip
import io
import tarfile
from pathlib import PurePosixPath
from typing import Any

import pytest

from fedspu.data import bounds
from fedspu.data.formats import tar
from fedspu.errors import DataError

CONTENT = bytes(range(100))


def archive(*names: str, form: int = tarfile.USTAR_FORMAT, **fields: Any) -> bytes:
    opened = io.BytesIO()
    with tarfile.open(fileobj=opened, mode="w:gz", format=form) as made:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(CONTENT)
            for field, value in fields.items():
                setattr(member, field, value)
            made.addfile(member, io.BytesIO(CONTENT))
    return opened.getvalue()


def read(content: bytes, most: int = 2**20) -> dict[str, bytes]:
    def wanted(path: PurePosixPath) -> int:
        return 200 if path.suffix == ".bin" else 0

    found = tar.members(io.BytesIO(content), "a.tar.gz", most, wanted)
    return {str(path): inside for path, inside in found}


FORMS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


@pytest.mark.parametrize("form", FORMS)
def test_wanted_members_are_read_and_others_passed_over(form: int) -> None:
    names = ("a/one.bin", "a/readme", f"{'long/' * 25}two.bin", "three.bin")
    found = read(archive(*names, form=form))
    assert set(found.values()) == {CONTENT}
    assert {"a/one.bin", "three.bin"} <= found.keys() <= set(names)


def test_a_long_name_is_whole_in_the_plain_format() -> None:
    name = f"{'long/' * 25}two.bin"
    assert read(archive(name)) == {name: CONTENT}


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_links_and_devices_are_passed_over(kind: bytes) -> None:
    made = archive("one.bin", type=kind, size=0, linkname="/etc/passwd")
    assert read(made) == {}


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(DataError, match=r"damaged \(it holds a/one.bin twice\)"):
        read(archive("a/one.bin", "b/one.bin", "a/one.bin"))


def header(**fields: Any) -> bytes:
    member = tarfile.TarInfo("one.bin")
    for field, value in fields.items():
        setattr(member, field, value)
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        (header(size=1_500_000_000), "one.bin has 1,500,000,000 bytes, expected at mo"),
        (header(size=2**40), "a number that is not octal"),
        (header(size=2**33 - 1, type=b"x"), "a note of 8,589,934,591 bytes about"),
        (header(size=70_000, type=b"L"), "a note of 70,000 bytes about a member"),
        (header(size=100), "it ends inside a member"),
        (b"", "it ends inside a member"),
        (b"x" * 1024, "a number that is not octal"),
        (b"\0" + b"x" + bytes(510), "a wrong checksum"),
    ],
)
def test_a_bad_archive_is_refused_before_memory_is_taken(
    plain: bytes, says: str
) -> None:
    with pytest.raises(DataError, match=r"^a.tar.gz: damaged \(") as caught:
        read(gzip.compress(plain))
    assert says in str(caught.value)


def test_what_unpacks_to_more_than_expected_is_refused() -> None:
    bomb = gzip.compress(header(size=2**30, type=b"5") + bytes(2**22))
    with pytest.raises(DataError, match="more than 1,048,576 bytes unpacked"):
        read(bomb)
    after = gzip.compress(bytes(2**22))  # an end of the archive, and no end
    with pytest.raises(DataError, match="more than 1,048,576 bytes unpacked"):
        read(after)


def test_too_many_members_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MEMBERS", 3)
    with pytest.raises(DataError, match="more than 3 members"):
        read(archive(*"abcd"))
