import os
import socket
from pathlib import Path

import pytest

from fedspu.ordinary_files import open_ordinary, size_of


def test_an_ordinary_file_is_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with open_ordinary(tmp_path / "link") as opened:
        assert size_of(opened) == 5
        assert opened.read() == b"hello"


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe, not an ordinary file"):
        open_ordinary(tmp_path / "pipe")


def test_a_device_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="a device, not an ordinary file"):
        open_ordinary(tmp_path / "link")


def test_a_socket_and_a_folder_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "s"))
        with pytest.raises(OSError, match="No such device or address"):
            open_ordinary(tmp_path / "s")
    with pytest.raises(IsADirectoryError):
        open_ordinary(tmp_path)


def test_refusing_leaves_nothing_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="a pipe"):
            open_ordinary(tmp_path / "pipe")
    assert len(os.listdir("/proc/self/fd")) == before
