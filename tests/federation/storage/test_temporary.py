import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from fedspu.federation.storage.temporary import temporary_shelf
from fedspu.methods.method import Memory


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of one's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_shelf_s_folder_is_private_and_is_deleted_with_it(place: Path) -> None:
    shelf = temporary_shelf(1e6)
    shelf.put(0, 1, Memory())
    assert shelf.folder is not None
    assert shelf.folder.stat().st_mode & 0o777 == 0o700
    assert len(list(place.iterdir())) == 1
    del shelf
    assert list(place.iterdir()) == []


def test_what_a_killed_run_left_is_removed_by_the_next(place: Path) -> None:
    child = os.fork()
    if child == 0:
        shelf = temporary_shelf(1e6)
        shelf.put(3, 1, Memory())
        (place / "ready").touch()
        time.sleep(60)
        os._exit(0)
    while not (place / "ready").exists():
        time.sleep(0.01)
    (place / "ready").unlink()
    (left,) = place.iterdir()
    kept = temporary_shelf(1e6)  # the other one goes on
    assert len(list(left.iterdir())) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    again = temporary_shelf(1e6)
    assert not left.exists()
    assert {kept.folder, again.folder} == set(place.iterdir())


def test_what_is_not_ours_is_left_alone(place: Path, tmp_path: Path) -> None:
    other = place / "fedspu-models-of-mine"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    (place / "fedspu-models-link").symlink_to(other)
    shelf = temporary_shelf(1e6)
    assert (other / "notes.txt").read_text() == "mine"
    assert shelf.folder is not None
