"""How far a comparison is can be read from its folder alone."""

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedspu
from fedspu.errors import StorageError
from fedspu.sweeps.compare import Watcher
from fedspu.sweeps.display import SweepDisplay, headline, picture
from fedspu.sweeps.playing import alone_in
from fedspu.sweeps.progress import (
    Following,
    PlannedRun,
    Progress,
    RunProgress,
    State,
    Watched,
)
from fedspu.units import duration


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
    first = seconds / t if t else 0.0
    return RunProgress(planned, state, t, seconds, first)


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


def test_the_first_round_says_nothing_of_the_others() -> None:
    """A method's first round may compile code: 5.7 s, and then 0.1 s each."""
    slow = replace(run("playing", 1, 50.0, "new"), first=50.0)
    assert left(slow) is None
    known = run("finished", 10, 10.0, "a")
    assert left(known, slow) == 9.0  # as the others
    slow = replace(slow, round=2, seconds=52.0)
    assert left(known, slow) == 16.0
    assert left(known, slow, run("waiting", kind="new")) == 16.0 + 50.0 + 9 * 2.0


def test_first_rounds_say_nothing_of_later_parts() -> None:
    slow = replace(run("playing", 2, 52.0), first=50.0)
    said = headline(Progress([slow], 1), later=5)
    assert "about 26.0 s left" in said
    assert said.endswith("16.0 s for this part")


def test_runs_of_one_round_have_no_other_pace() -> None:
    def once(found: RunProgress) -> RunProgress:
        return replace(found, run=found.run.model_copy(update={"rounds": 1}))

    assert left(once(run("finished", 1, 5.0)), once(run("waiting"))) == 5.0


def test_the_time_left_of_tuning_counts_the_comparison() -> None:
    tuning = Progress([run("playing", 5, 5.0)], 1, later=(run("waiting"),) * 2)
    assert tuning.seconds_left == 25.0
    assert "about 25.0 s left in all (until " in headline(tuning)


def test_the_time_left_counts_what_runs_need_before_their_first_round() -> None:
    known = run("finished", 10, 10.0)
    starting = replace(run("playing"), starting=1.5)

    def left_of(*runs: RunProgress) -> float | None:
        return Progress([known, *runs], 1, startup=4.0).seconds_left

    assert left_of(run("waiting")) == 14.0
    assert left_of(starting) == 12.5
    assert left_of(replace(starting, starting=60.0)) == 9.0
    assert left_of(run("playing", 5, 5.0)) == 5.0


def test_a_run_that_has_begun_is_shown_before_its_folder_is_there(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    seen: list[Progress] = []

    class Looking(SweepDisplay):
        def begin(self, run: Any) -> None:
            assert self._following is not None
            super().begin(run)
            seen.append(self._following.read())

    fedspu.compare(
        *(["local"], given),
        out=tmp_path / "out",
        seeds=[0, 1],
        parallel=1,
        watcher=Looking(),
    )
    first, second = seen
    assert [run.state for run in first.runs] == ["playing", "waiting"]
    assert first.runs[0].starting is not None
    assert first.startup == 0.0
    assert [run.state for run in second.runs] == ["finished", "playing"]
    assert second.startup > 0.0
    screen = Console(width=100, record=True, file=io.StringIO())
    screen.print(picture(first))
    assert "starting: model, data …" in screen.export_text()


def test_a_plan_that_is_removed_leaves_the_last_picture(tmp_path: Path) -> None:
    shown = SweepDisplay()
    shown._following = Following(tmp_path)  # there is no plan in it any more
    screen = Console(width=100, record=True, file=io.StringIO())
    screen.print(shown._shown())
    assert "no comparison" not in screen.export_text()


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
    assert failed == "run 2 of 2, 1 failed, time left: known after some rounds"


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


def test_a_comparison_that_nobody_plays_is_told_from_one_that_is_played(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    seen = []

    class Looking(Watcher):
        def end(self, run: Any, why: str | None) -> None:
            seen.append(headline(Watched(out).read()))

    fedspu.compare(
        *(["local"], given), out=out, seeds=[0, 1], parallel=1, watcher=Looking()
    )
    assert seen[0].startswith("run 2 of 2, about ")
    assert headline(Watched(out).read()) == "2 of 2 runs finished"
    (summary,) = out.glob("local-*-seed-1/summary.json")
    summary.unlink()
    assert headline(Watched(out).read()) == (
        "1 of 2 runs finished; nobody is playing it: the same command resumes it"
    )
    with alone_in(out):
        assert headline(Watched(out).read()).startswith("run 2 of 2, about ")


def test_tuning_is_watched_and_then_the_comparison_itself(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    watched, seen = Watched(out), []

    class Looking(Watcher):
        def begin(self, run: Any) -> None:
            found = watched.read()
            number = len(found.runs), found.count("finished")
            seen.append((found.is_tuning, found.is_played, *number, len(found.later)))

    def tune(watcher: Watcher | None = None) -> None:
        fedspu.compare(
            *(["local"], given),
            out=out,
            seeds=[0],
            tune={"train.lr": [0.1, 0.2]},
            tune_rounds=1,
            parallel=1,
            watcher=watcher,
        )

    tune(Looking())
    assert seen == [
        (True, True, 2, 0, 1),
        (True, True, 2, 1, 1),
        (False, True, 1, 0, 0),
    ]
    assert headline(watched.read()) == "1 of 1 runs finished"
    later = (out / "sweep.json").stat().st_mtime + 10
    os.utime(out / "tuning/sweep.json", (later, later))  # such is a copied folder
    assert headline(watched.read()) == "1 of 1 runs finished"
    (out / "sweep.json").unlink()
    dead = "tuning, 2 of 2 runs finished; nobody is playing it"
    assert headline(watched.read()).startswith(dead)


def test_runs_of_tuning_are_told_apart_by_what_they_try() -> None:
    def trying(lr: float) -> RunProgress:
        known = run("playing", 1, 1.0)
        return replace(known, run=known.run.model_copy(update={"tuned": {"lr": lr}}))

    def shown(*runs: RunProgress) -> str:
        screen = Console(width=100, record=True, file=io.StringIO())
        screen.print(picture(Progress(list(runs), 1)))
        return screen.export_text()

    assert "m, lr 0.1, " in shown(trying(0.1), trying(0.2))
    assert "lr" not in shown(trying(0.1))


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


def test_the_time_left_is_for_all_parts_of_something_larger() -> None:
    # 2 s a round, two at once: 6 rounds here, and as many as 60 more later.
    found = Progress([run("playing", 4, 8.0), run("waiting", 0)], 2)
    assert found.seconds_left is not None
    alone = headline(found, "EMNIST (part 1 of 6)")
    assert f"about {duration(found.seconds_left)} left" in alone
    assert "this part" not in alone
    whole = headline(found, "EMNIST (part 1 of 6)", 60)
    assert f"about {duration(found.seconds_left + 60)} left (until" in whole
    assert whole.endswith(f"), {duration(found.seconds_left)} for this part")


@pytest.mark.parametrize(("metric", "said"), [("accuracy", "28.8 %"), ("mae", "0.288")])
def test_a_score_is_shown_as_in_tables(metric: str, said: str) -> None:
    known = replace(run("playing", 3), score=0.288, metric=metric)
    screen = Console(width=100, record=True, file=io.StringIO())
    screen.print(picture(Progress([known], 1)))
    assert f"personal {said}" in screen.export_text()
