"""How far a comparison is can be read from its folder alone."""

from pathlib import Path
from typing import Any

import pytest

import fedspu
from fedspu.errors import StorageError
from fedspu.sweeps.compare import Watcher
from fedspu.sweeps.display import headline, picture
from fedspu.sweeps.progress import (
    Following,
    PlannedRun,
    Progress,
    RunProgress,
    State,
)


def run(
    state: State, t: int = 0, seconds: float = 0.0, kind: str = "a", early: bool = False
) -> RunProgress:
    planned = PlannedRun(
        name="x",
        method="m",
        case={},
        seed=0,
        tuned={},
        kind=kind,
        rounds=10,
        may_end_early=early,
    )
    return RunProgress(planned, state, t, seconds)


def left(*runs: RunProgress, parallel: int = 1) -> float | None:
    return Progress(list(runs), parallel).seconds_left


def test_time_left_is_unknown_before_the_first_round() -> None:
    assert left(run("playing"), run("waiting")) is None


def test_a_run_takes_as_long_as_it_did_and_others_as_their_kind_did() -> None:
    assert left(run("playing", 5, 10.0)) == 10.0
    known = run("finished", 10, 30.0, "slow"), run("finished", 10, 10.0, "fast")
    assert left(*known, run("waiting", kind="slow")) == 30.0
    assert left(*known, run("waiting", kind="new")) == 20.0  # as all others
    assert left(*known) == 0.0


def test_runs_share_the_machine_but_none_is_shorter_than_itself() -> None:
    known = run("finished", 10, 10.0)
    assert left(known, *[run("waiting")] * 4, parallel=2) == 20.0
    assert left(known, run("waiting"), parallel=8) == 10.0


def test_a_run_that_stopped_early_has_nothing_left() -> None:
    assert left(run("finished", 3, 3.0, early=True)) == 0.0
    assert Progress([run("playing", 3, 3.0, early=True)], 1).is_most


def test_the_headline_counts_runs() -> None:
    found = Progress(
        [run("finished", 10, 1.0), run("playing", 1, 0.1), run("waiting")], 2
    )
    assert headline(found).startswith("run 2 of 3, about 1.0 s left (until ")
    assert headline(Progress([run("finished")], 1)) == "1 of 1 runs finished"
    failed = headline(Progress([run("failed"), run("playing")], 1))
    assert failed == "run 2 of 2, 1 failed, time left: known after the first round"


def test_a_folder_is_followed_while_it_is_played(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    seen: list[list[tuple[State, int]]] = []

    class Looking(Watcher):
        def plan(self, where: Path, runs: Any, what: str) -> None:
            self.following = Following(where)

        def begin(self, run: Any) -> None:
            self.look()

        def end(self, run: Any, why: str | None) -> None:
            self.look()

        def look(self) -> None:
            runs = self.following.read().runs
            seen.append([(run.state, run.round) for run in runs])

    fedspu.compare(
        ["local"], given, out=out, seeds=[0, 1], parallel=1, watcher=Looking()
    )
    assert seen == [
        [("waiting", 0), ("waiting", 0)],
        [("finished", 2), ("waiting", 0)],
        [("finished", 2), ("waiting", 0)],
        [("finished", 2), ("finished", 2)],
    ]
    found = Following(out).read()
    assert found.is_over
    assert picture(found)
    assert all(run.score is not None and run.seconds > 0 for run in found.runs)


def test_an_interrupted_run_is_told_from_one_that_is_played(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    fedspu.compare(["local"], given, out=out, seeds=[0], parallel=1)
    (folder,) = [path for path in out.iterdir() if path.is_dir()]
    (folder / "summary.json").unlink()
    assert Following(out).read().runs[0].state == "interrupted"


FORGED = """{"parallel": 1, "runs": [{"name": "../elsewhere", "method": "m", "case": {},
"seed": 0, "tuned": {}, "kind": "k", "rounds": 1, "may_end_early": false}]}"""


@pytest.mark.parametrize("content", [None, "", "{", '{"runs": 3}', FORGED])
def test_a_folder_that_is_no_comparison_is_refused(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(StorageError, match=r"no comparison|is damaged"):
        Following(tmp_path).read()


def test_a_part_of_something_larger_is_named(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    fedspu.compare(["local"], given, out=out, seeds=[0], parallel=1)
    found = Following(out).read()
    assert headline(found) == "1 of 1 runs finished"
    part = "CIFAR10 with early stopping (part 2 of 6)"
    assert headline(found, part) == f"{part}, 1 of 1 runs finished"
