"""One process at a time plays a comparison, and anybody can see whether one does."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fedspu
from fedspu.errors import StorageError
from fedspu.sweeps.compare import Watcher
from fedspu.sweeps.playing import alone_in, is_played, refuse_played

HOLD = """
import sys, time
from pathlib import Path
from fedspu.sweeps.playing import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def playing(out: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the folder for itself; it is killed in the end."""
    words = [sys.executable, "-c", HOLD, str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_is_played_until_its_process_ends_or_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "some/out"
    assert not is_played(out)
    with playing(out):
        assert is_played(out)
        with pytest.raises(StorageError, match=r"by another process; `fedspu report"):
            refuse_played(out)
        with pytest.raises(StorageError, match="is being played"), alone_in(out):
            pass
    assert (out / ".lock").exists()
    assert not is_played(out)
    with alone_in(out):
        pass
    assert list(out.iterdir()) == []


def test_folders_in_which_nothing_was_written_are_removed(tmp_path: Path) -> None:
    with alone_in(tmp_path / "some/out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_other_users_can_see_that_a_folder_is_played(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with alone_in(tmp_path / "out"):
            assert (tmp_path / "out/.lock").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_a_second_comparison_is_refused_and_the_first_goes_on(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    out, refused = tmp_path / "out", []

    def play(watcher: Watcher | None = None) -> fedspu.Comparison:
        return fedspu.compare(
            *(["local"], given), out=out, seeds=[0, 1], parallel=1, watcher=watcher
        )

    class Second(Watcher):
        def end(self, run: Any, why: str | None) -> None:
            with pytest.raises(StorageError, match="is being played") as found:
                play()
            refused.append(found)

    assert len(play(Second()).runs) == 2
    assert len(refused) == 2
    assert not is_played(out)
    assert not (out / ".lock").exists()


PLAY = """
import json, sys
import fedspu
given = json.loads(sys.argv[1])
fedspu.compare(["local"], given, out=sys.argv[2], seeds=[0, 1], parallel=2)
"""


def test_runs_at_once_do_not_keep_the_lock_of_a_process_that_was_killed(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    words = [json.dumps({**given, "rounds": 1000}), str(out)]
    with subprocess.Popen([sys.executable, "-c", PLAY, *words]) as process:
        while len(list(out.glob("*/rounds.jsonl"))) < 2:
            assert process.poll() is None
            time.sleep(0.1)
        assert is_played(out)
        process.kill()
    with alone_in(out):
        pass
