import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedspu.data import cache
from fedspu.data.cache import Arrays, cache_folder, cache_place, cached
from fedspu.errors import DataError


class Builder:
    """Builds the same arrays each time, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Arrays:
        self.calls += 1
        return {"x": np.arange(6).reshape(2, 3), "words": np.array(["a", "bc"])}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source"
    file.write_bytes(b"abc")
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "caches"


def test_arrays_come_back_as_they_were(source: Path, folder: Path) -> None:
    arrays = cached("n", "1", [source], Builder(), folder)
    assert arrays["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays["words"].tolist() == ["a", "bc"]


def test_arrays_are_built_once(source: Path, folder: Path) -> None:
    build = Builder()
    for _ in range(3):
        cached("n", "1", [source], build, folder)
    assert build.calls == 1


def test_arrays_are_mapped_and_cannot_change_the_file(
    source: Path, folder: Path
) -> None:
    first = cached("n", "1", [source], Builder(), folder)["x"]
    assert isinstance(first, np.memmap)
    first[:] = 9
    first.flush()
    file = cache_place("n", "1", [source], folder) / "x.npy"
    assert np.load(file).sum() == 15


def test_torch_takes_the_arrays_without_a_warning(source: Path, folder: Path) -> None:
    arrays = cached("n", "1", [source], Builder(), folder)
    assert torch.from_numpy(arrays["x"]).sum() == 15


def longer(source: Path) -> None:
    source.write_bytes(b"abcd")


def touched(source: Path) -> None:
    os.utime(source, ns=(0, 0))


@pytest.mark.parametrize("change", [longer, touched])
def test_a_changed_source_makes_a_new_cache(
    source: Path, folder: Path, change: Callable[[Path], None]
) -> None:
    build = Builder()
    cached("n", "1", [source], build, folder)
    change(source)
    cached("n", "1", [source], build, folder)
    assert build.calls == 2
    assert len(list(folder.iterdir())) == 2


def test_another_recipe_name_or_list_makes_a_new_cache(
    source: Path, folder: Path
) -> None:
    other = source.with_name("other")
    shutil.copy2(source, other)
    places = {
        cache_place("n", "1", [source], folder),
        cache_place("n", "2", [source], folder),
        cache_place("m", "1", [source], folder),
        cache_place("n", "1", [other], folder),
        cache_place("n", "1", [source, other], folder),
    }
    assert len(places) == 5


def test_a_source_that_changes_meanwhile_is_not_kept(
    source: Path, folder: Path
) -> None:
    def build() -> Arrays:
        source.write_bytes(b"other")
        return Builder()()

    with pytest.raises(DataError, match="n: its files changed while they were read"):
        cached("n", "1", [source], build, folder)
    assert not folder.exists()


def test_a_missing_source_is_told_by_name(source: Path, folder: Path) -> None:
    source.unlink()
    with pytest.raises(DataError, match="source: No such file or directory"):
        cached("n", "1", [source], Builder(), folder)


@pytest.mark.parametrize("error", [DataError("bad"), KeyboardInterrupt()])
def test_a_build_that_fails_leaves_nothing(
    source: Path, folder: Path, error: BaseException
) -> None:
    def build() -> Arrays:
        raise error

    with pytest.raises(type(error)):
        cached("n", "1", [source], build, folder)
    assert not folder.exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_nothing(
    source: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    real = np.save
    saved: list[Path] = []

    def save(file: Path, array: NDArray[Any], allow_pickle: bool) -> None:
        if saved:
            raise error
        saved.append(file)
        real(file, array, allow_pickle=allow_pickle)

    monkeypatch.setattr(np, "save", save)
    expected = DataError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        cached("n", "1", [source], Builder(), folder)
    assert list(folder.iterdir()) == []
    if expected is DataError:
        assert str(caught.value) == (
            f"{folder}: the decoded data cannot be stored there (No space left); "
            "set FEDSPU_CACHE to a folder with enough space"
        )


def test_empty_arrays_are_refused(source: Path, folder: Path) -> None:
    with pytest.raises(DataError, match="n: x is empty"):
        cached("n", "1", [source], lambda: {"x": np.zeros((0, 3))}, folder)
    assert not folder.exists()


def cut(place: Path) -> None:
    file = place / "x.npy"
    file.write_bytes(file.read_bytes()[:-8])


def flip_one_bit(place: Path) -> None:
    content = bytearray((place / "x.npy").read_bytes())
    content[-1] ^= 1
    (place / "x.npy").write_bytes(content)


def lose_an_array(place: Path) -> None:
    (place / "x.npy").unlink()


def lose_the_list(place: Path) -> None:
    (place / "contents.json").unlink()


def garble_the_list(place: Path) -> None:
    (place / "contents.json").write_text("[1]")


def empty(place: Path) -> None:
    for file in place.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    "damage",
    [cut, flip_one_bit, lose_an_array, lose_the_list, garble_the_list, empty],
)
def test_a_damaged_cache_is_built_again(
    source: Path, folder: Path, damage: Callable[[Path], None]
) -> None:
    build = Builder()
    cached("n", "1", [source], build, folder)
    damage(cache_place("n", "1", [source], folder))
    assert cached("n", "1", [source], build, folder)["x"].sum() == 15
    assert build.calls == 2
    assert list(folder.iterdir()) == [cache_place("n", "1", [source], folder)]
    cached("n", "1", [source], build, folder)
    assert build.calls == 2


def test_who_comes_second_takes_what_the_first_has_put(
    source: Path, folder: Path
) -> None:
    def build() -> Arrays:
        cached("n", "1", [source], Builder(), folder)  # meanwhile, someone else
        return {"x": np.zeros(1)}

    assert cached("n", "1", [source], build, folder)["x"].sum() == 15
    assert len(list(folder.iterdir())) == 1


PROCESS = """
import sys, time
from pathlib import Path
import numpy as np
from fedspu.data.cache import cached

def build():
    print("building", flush=True)
    sys.stdin.readline()
    return {"x": np.arange(100_000)}

source, folder = map(Path, sys.argv[1:])
print(cached("n", "1", [source], build, folder)["x"].sum())
"""


def test_two_processes_may_build_at_once(source: Path, folder: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(source), str(folder)]
    both = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in both:  # both are at it before either goes on
        assert process.stdout
        assert process.stdout.readline() == "building\n"
    said = [process.communicate("\n", timeout=60)[0] for process in both]
    assert said == ["4999950000\n"] * 2
    assert len(list(folder.iterdir())) == 1


def test_what_a_killed_process_left_is_removed_after_a_day(
    source: Path, folder: Path
) -> None:
    old, new = folder / f"{cache.UNFINISHED}old", folder / f"{cache.UNFINISHED}new"
    for left in (old, new):
        left.mkdir(parents=True)
        (left / "x.npy").touch()
    a_day_ago = time.time() - cache.A_DAY - 1
    os.utime(old, (a_day_ago, a_day_ago))
    cached("n", "1", [source], Builder(), folder)
    assert not old.exists()
    assert new.exists()


def test_the_place_is_the_users_cache_folder_unless_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FEDSPU_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache_folder() == Path("/home/ada/.cache/fedspu")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/fedspu")
    monkeypatch.setenv("FEDSPU_CACHE", "~/mine")
    assert cache_folder() == Path("/home/ada/mine")


def test_others_may_read_the_cache(source: Path, folder: Path) -> None:
    cached("n", "1", [source], Builder(), folder)
    mode = cache_place("n", "1", [source], folder).stat().st_mode
    assert mode & 0o777 == 0o755
