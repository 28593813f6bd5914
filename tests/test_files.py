import os
import stat
import threading
from pathlib import Path

import pytest

from fedspu.errors import DamagedError, StorageError
from fedspu.files import (
    Mark,
    append,
    check_marked,
    cut,
    lock,
    mark_of,
    not_a_link,
    read_file,
    read_marked,
    read_start,
    write_whole,
)

# Writing ------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_written_whole_and_marked(tmp_path: Path, durable: bool) -> None:
    file = tmp_path / "a"
    mark = write_whole(file, b"new", durable=durable)
    assert file.read_bytes() == b"new"
    assert mark == mark_of(file) == Mark.of(b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_part_that_a_killed_process_left_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(b"half of something longer")
    write_whole(tmp_path / "a", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"new")]


def test_private_files_are_their_owner_s_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_whole(tmp_path / "a", b"", private=True)
        append(tmp_path / "b", b"", 0, durable=False, private=True)
        write_whole(tmp_path / "c", b"")
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in "abc"] == [0o600, 0o600, 0o666]


def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    for name in ("a", "a.part", "b"):
        (tmp_path / name).symlink_to(victim)
    write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    with pytest.raises(OSError, match="symbolic"):
        append(tmp_path / "b", b"new", 4, durable=False)
    with pytest.raises(OSError, match="symbolic"):
        cut(tmp_path / "b", 0)
    with pytest.raises(OSError, match="symbolic"):
        lock(tmp_path / "b")
    assert victim.read_bytes() == b"mine"


def test_a_file_with_another_name_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    os.link(tmp_path / "a", tmp_path / "b")
    with pytest.raises(OSError, match="hard links"):
        append(tmp_path / "b", b"new", 4, durable=False)
    with pytest.raises(OSError, match="hard links"):
        cut(tmp_path / "b", 0)
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_lines_are_added_only_where_they_belong(tmp_path: Path) -> None:
    file = tmp_path / "a"
    append(file, b"one ", 0, durable=True)
    append(file, b"two", 4, durable=False)
    with pytest.raises(OSError, match="has 7 bytes instead of 4"):
        append(file, b"three", 4, durable=False)
    assert file.read_bytes() == b"one two"
    cut(file, 4)
    assert file.read_bytes() == b"one "


def test_a_locked_file_cannot_be_locked_again(tmp_path: Path) -> None:
    held = lock(tmp_path / "a")
    assert held is not None
    assert lock(tmp_path / "a") is None
    held.close()
    again = lock(tmp_path / "a")
    assert again is not None
    again.close()


def test_a_lock_that_its_holder_removed_is_made_anew(tmp_path: Path) -> None:
    """Or two processes would hold a lock, each on another file."""
    first = lock(tmp_path / "a")
    assert first is not None

    def remove() -> None:
        (tmp_path / "a").unlink()
        first.close()

    threading.Timer(0.2, remove).start()
    second = lock(tmp_path / "a", seconds=5)
    assert second is not None
    assert lock(tmp_path / "a") is None
    second.close()


# Reading ------------------------------------------------------------------------------


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    assert read_file(file, 5) == b"12345"
    with pytest.raises(DamagedError, match="has 5 bytes; expected at most 4"):
        read_file(file, 4)


def test_a_huge_file_with_nothing_in_it_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "a"
    with file.open("wb") as opened:
        opened.truncate(2**40)
    with pytest.raises(StorageError, match="expected at most"):
        read_file(file)
    with pytest.raises(StorageError, match="expected at most"):
        read_marked(file, Mark(2**40, "0" * 64))


def test_only_ordinary_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/etc/hostname")
    said = {
        "pipe": "not an ordinary file",
        "folder": "not an ordinary file",
        "link": "links are not followed",
        "nowhere": "is missing",
        "link/below": "is missing",
    }
    for name, text in said.items():
        for read in (read_file, mark_of):
            with pytest.raises(DamagedError, match=text):
                read(tmp_path / name)
    with pytest.raises(DamagedError, match="links are not followed"):
        not_a_link(tmp_path / "link")
    assert not_a_link(tmp_path / "folder") == tmp_path / "folder"


def test_what_was_changed_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "a"
    mark = write_whole(file, b"12345")
    assert read_marked(file, mark) == read_start(file, mark) == b"12345"
    file.write_bytes(b"123456")
    assert read_start(file, mark) == b"12345"
    with pytest.raises(DamagedError):
        read_marked(file, mark)
    file.write_bytes(b"12346")
    for read in (read_marked, read_start, check_marked):
        with pytest.raises(
            DamagedError, match=r"a is damaged: it is not what was saved"
        ):
            read(file, mark)
