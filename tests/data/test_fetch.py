"""Fetching, from a server on this machine."""

import fcntl
import socket
from collections.abc import Iterator
from hashlib import md5, sha256
from pathlib import Path

import pytest

from fedspu.data import files as fetching
from fedspu.data.files import Download, fetch
from fedspu.errors import DataError
from tests.data.server import Site, serve

CONTENT = bytes(range(256)) * 40
RIGHT = f"sha256:{sha256(CONTENT).hexdigest()}"
WRONG = f"sha256:{64 * '0'}"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetching, "CHUNK", 1000)


@pytest.fixture
def site() -> Iterator[Site]:
    with serve(Site({"a.bin": CONTENT})) as running:
        yield running


def download(site: Site, checksum: str = RIGHT, size: int = len(CONTENT)) -> Download:
    return Download(f"{site.url}/a.bin", size, checksum)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else []


def test_a_file_arrives_whole(site: Site, tmp_path: Path) -> None:
    assert fetch(download(site), tmp_path / "new/folder")
    assert (tmp_path / "new/folder/a.bin").read_bytes() == CONTENT
    assert names(tmp_path / "new/folder") == ["a.bin"]


@pytest.mark.parametrize("checksum", [f"md5:{md5(CONTENT).hexdigest()}", ""])
def test_an_older_checksum_or_none_will_do(
    site: Site, tmp_path: Path, checksum: str
) -> None:
    assert fetch(download(site, checksum), tmp_path)
    assert names(tmp_path) == ["a.bin"]


def test_progress_is_told_up_to_the_end(site: Site, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    fetch(download(site), tmp_path, lambda here, total: told.append((here, total)))
    assert told[0] == (0, 10240)
    assert told[-1] == (10240, 10240)
    assert told == sorted(told)
    assert len(told) > 5


def test_what_is_here_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    fetch(download(site), tmp_path)
    assert not fetch(download(site), tmp_path)
    assert len(site.ranges) == 1


def test_a_wrong_file_that_is_here_is_told_and_kept(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT[::-1])
    with pytest.raises(DataError, match=r"a\.bin: sha256 .*, expected .*; remove it"):
        fetch(download(site), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT[::-1]
    assert site.ranges == []


def test_what_was_cut_goes_on_where_it_was(site: Site, tmp_path: Path) -> None:
    site.cuts_after = 4000
    with pytest.raises(
        DataError,
        match=r"a\.bin: interrupted after 4,000 of 10,240 bytes \(the server sent no "
        r"more\); the same command resumes from there",
    ):
        fetch(download(site), tmp_path)
    assert names(tmp_path) == ["a.bin.part"]

    site.cuts_after = None
    told: list[int] = []
    assert fetch(download(site), tmp_path, lambda here, total: told.append(here))
    assert site.ranges == [None, "bytes=4000-"]
    assert told[0] == 4000
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["a.bin"]


def test_a_connection_that_breaks_is_a_cut_too(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = iter([CONTENT[:1000]])

    def read(response: object, size: int) -> bytes:
        for piece in pieces:
            return piece
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr("http.client.HTTPResponse.read", read)
    with pytest.raises(
        DataError, match=r"interrupted after 1,000 of 10,240 .*reset by peer"
    ):
        fetch(download(site), tmp_path)
    assert (tmp_path / "a.bin.part").read_bytes() == CONTENT[:1000]


def test_an_interrupted_fetch_can_go_on(site: Site, tmp_path: Path) -> None:
    def interrupt(here: int, total: int) -> None:
        if here >= 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(download(site), tmp_path, interrupt)
    assert fetch(download(site), tmp_path)
    assert site.ranges == [None, "bytes=3000-"]


def test_a_server_without_ranges_starts_anew(site: Site, tmp_path: Path) -> None:
    site.knows_ranges = False
    (tmp_path / "a.bin.part").write_bytes(b"something else")
    assert fetch(download(site), tmp_path)
    assert site.ranges == ["bytes=14-"]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_part_that_is_whole_needs_no_server(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    assert fetch(download(site), tmp_path)
    assert site.ranges == []
    assert names(tmp_path) == ["a.bin"]


def test_a_part_that_is_too_long_is_begun_anew(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT + b"more")
    assert fetch(download(site), tmp_path)
    assert site.ranges == [None]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_file_that_became_shorter_on_the_server_is_begun_anew(
    site: Site, tmp_path: Path
) -> None:
    (tmp_path / "a.bin.part").write_bytes(bytes(5000))
    site.files["a.bin"] = CONTENT[:5000]
    with pytest.raises(DataError, match="interrupted after 5,000 of 10,240"):
        fetch(download(site), tmp_path)
    assert site.ranges == ["bytes=5000-", None]
    assert (tmp_path / "a.bin.part").read_bytes() == CONTENT[:5000]


def test_a_wrong_checksum_deletes_what_came_and_says_so(
    site: Site, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        fetch(download(site, WRONG), tmp_path)
    assert str(caught.value) == (
        f"{site.url}/a.bin: {RIGHT.replace(':', ' ')}, expected {64 * '0'}; what was "
        f"received was deleted. Fetch again, or get a.bin (10,240 bytes, {WRONG}) in "
        f"another way and put it into {tmp_path}"
    )
    assert names(tmp_path) == []


def test_a_wrong_part_from_before_is_deleted_too(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(bytes(5000))
    with pytest.raises(DataError, match="what was received was deleted"):
        fetch(download(site), tmp_path)
    assert names(tmp_path) == []
    assert fetch(download(site), tmp_path)


@pytest.mark.parametrize("checksum", [RIGHT, ""])
def test_more_than_was_expected_is_refused(
    site: Site, tmp_path: Path, checksum: str
) -> None:
    with pytest.raises(DataError, match=r"more than the 100 bytes expected; what was"):
        fetch(download(site, checksum, size=100), tmp_path)
    assert names(tmp_path) == []


def test_a_file_the_server_has_not_says_what_to_put_where(
    site: Site, tmp_path: Path
) -> None:
    site.files.clear()
    with pytest.raises(DataError) as caught:
        fetch(download(site), tmp_path)
    assert str(caught.value) == (
        f"{site.url}/a.bin: the server answered 404 Not Found; get a.bin (10,240 "
        f"bytes, {RIGHT}) in another way and put it into {tmp_path}"
    )
    assert names(tmp_path) == []


def test_no_network_says_what_to_put_where(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # bound, and nobody listens
        nowhere = Download(f"http://127.0.0.1:{port}/a.bin", 10240, RIGHT)
        with pytest.raises(
            DataError,
            match=rf"cannot be reached \(.*refused\); get a\.bin \(10,240 bytes, "
            rf"{RIGHT}\) in another way and put it into {tmp_path}$",
        ):
            fetch(nowhere, tmp_path)
    assert names(tmp_path) == []


def test_only_one_process_fetches_a_file(site: Site, tmp_path: Path) -> None:
    with (tmp_path / "a.bin.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"part: another process is fetching it"):
            fetch(download(site), tmp_path)
    assert fetch(download(site), tmp_path)


def test_a_folder_that_cannot_be_written_is_told(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"part: cannot be written \(File exists"):
        fetch(download(site), tmp_path / "file")


def test_a_full_disk_is_told(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match="No space left on device"):
        fetch(download(site), tmp_path)
