"""How far a comparison is, read from its folder alone, so that anybody can watch it."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from time import monotonic
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from fedspu.errors import StorageError
from fedspu.federation.storage.own_files import LOCK
from fedspu.federation.storage.saved_index import SUMMARY, SWEEP
from fedspu.files import is_locked, read_file, write_whole
from fedspu.ordinary_files import open_ordinary
from fedspu.sweeps.cells import Cell, frozen
from fedspu.sweeps.play import Planned
from fedspu.sweeps.playing import is_played
from fedspu.sweeps.tuning import FOLDER

LARGEST_PLAN = 2**24

MOST_NEW = 2**26
"""At most so many bytes of a record are read at a time."""

State = Literal["waiting", "playing", "interrupted", "finished", "failed"]


class PlannedRun(BaseModel):
    """A run of a comparison, as its folder lists it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[^./\\\x00][^/\\\x00]*$")]  # of its folder
    method: str
    case: dict[str, Any]
    seed: int
    tuned: dict[str, Any]
    kind: str  # runs of one kind take about the same time
    rounds: NonNegativeInt
    may_end_early: bool

    @property
    def cell(self) -> Cell:
        """What makes it."""
        case = tuple((name, frozen(v)) for name, v in self.case.items())
        tuned = tuple((name, frozen(v)) for name, v in self.tuned.items())
        return Cell(self.method, case, self.seed, tuned)


class SweepPlan(BaseModel):
    """What a comparison is going to play."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parallel: NonNegativeInt
    runs: list[PlannedRun]
    earlier: list[PlannedRun] = []  # of other commands, in the same folder
    later: list[PlannedRun] = []  # of the comparison, if these are of its tuning
    failed: dict[str, str] = {}  # name -> why


def write_plan(
    out: Path,
    runs: Sequence[Planned],
    parallel: int,
    failed: Mapping[str, str],
    later: Sequence[Planned] = (),
) -> None:
    """Say in the folder what is going to be played, and what ``later``, elsewhere."""
    listed = [_listed(run) for run in runs]
    names = {run.name for run in listed}
    plan = SweepPlan(
        parallel=parallel,
        runs=listed,
        earlier=[run for run in _planned_before(out) if run.name not in names],
        later=[_listed(run) for run in later],
        failed=dict(failed),
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        content = plan.model_dump_json(indent=2).encode()
        write_whole(out / SWEEP, content, durable=False)
    except OSError as error:
        raise StorageError(f"{out}: cannot write ({error})") from error


def _listed(run: Planned) -> PlannedRun:
    return PlannedRun(
        name=run.path.name,
        method=run.cell.method,
        case=dict(run.cell.case),
        seed=run.cell.seed,
        tuned=dict(run.cell.tuned),
        kind=_kind(run),
        # Last models are one more round.
        rounds=run.settings.rounds + run.settings.method.finishes,
        may_end_early=run.settings.early_stopping.on,
    )


def remove_plan_alone(out: Path, made: Sequence[Path]) -> None:
    """Leave no folder in which there is nothing but a plan, nor those made for it."""
    with suppress(OSError):
        if {path.name for path in out.iterdir()} - {LOCK} == {SWEEP}:
            (out / SWEEP).unlink()
            for folder in made:
                folder.rmdir()


def _planned_before(out: Path) -> list[PlannedRun]:
    try:
        before = read_plan(out)
    except StorageError:  # there is none, or it is damaged: this one is complete
        return []
    return [*before.earlier, *before.runs]


def refuse_other_data(out: Path, runs: Sequence[Planned]) -> None:
    """Refuse to play into the folder of a comparison of other data or another model.

    Not if the data sets or models are what is compared.
    """

    def what(kind: str, method: str) -> str:
        return kind.removeprefix(f"{method} ").replace(" ", " with ", 1)

    new = {what(_kind(run), run.cell.method): dict(run.cell.case) for run in runs}
    old = {what(run.kind, run.method): run.case for run in _planned_before(out)}
    varies = any({"data.name", "model"} & case.keys() for case in (new | old).values())
    if old and not varies and not old.keys() & new.keys():
        raise StorageError(
            f"{out} holds a comparison on {next(iter(old))}, and this one is on "
            f"{next(iter(new))}; choose another --out, or give the same --data and "
            "--model"
        )


def _kind(run: Planned) -> str:
    return f"{run.cell.method} {run.settings.data.name} {run.settings.model}"


def read_plan(out: Path) -> SweepPlan:
    """What the comparison in this folder was going to play."""
    file = out / SWEEP
    if not file.exists():
        raise StorageError(f"{out} is no comparison: it has no {SWEEP}")
    try:
        return SweepPlan.model_validate_json(read_file(file, LARGEST_PLAN))
    except ValidationError:
        raise StorageError(
            f"{file} is damaged; the same compare writes it anew"
        ) from None


@dataclass(frozen=True)
class RunProgress:
    """How far one run is; ``seconds`` is how long its rounds have taken so far."""

    run: PlannedRun
    state: State
    round: int = 0
    seconds: float = 0.0
    first: float = 0.0  # seconds of its first round
    score: float | None = None  # of the personal models
    metric: str = ""  # of the score
    starting: float | None = None  # seconds since it began, if it has no round yet

    @property
    def rounds_left(self) -> int:
        """Rounds that are still to be played, at most."""
        done = self.state in ("finished", "failed")
        return 0 if done else max(0, self.run.rounds - self.round)


@dataclass(frozen=True)
class Progress:
    """How far a whole comparison is."""

    runs: list[RunProgress]
    parallel: int
    later: tuple[RunProgress, ...] = ()  # which follow, if these are of its tuning
    startup: float = 0.0  # seconds from the beginning of a run to its first round
    is_tuning: bool = False  # these are runs of its search
    is_played: bool = True  # by a process that is there now

    def count(self, state: State) -> int:
        """How many runs are in this state."""
        return sum(run.state == state for run in self.runs)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to play."""
        return self.count("finished") + self.count("failed") == len(self.runs)

    @property
    def seconds_left(self) -> float | None:
        """About how long the rest takes; None until enough rounds are played.

        A run takes as long per round as it did so far; one that has not begun, as long
        as others of its kind, or else as all others. Runs share the machine as now.
        """
        pace, times = _Pace(self.runs), [0.0]
        for run in self._left:
            rounds = pace.of_rounds_left(run)
            if rounds is None:
                return None
            beginning = 0.0 if run.round else self.startup + pace.of_first(run)
            times.append(max(0.0, beginning - (run.starting or 0.0)) + rounds)
        # No schedule is shorter than its longest run.
        return max(sum(times) / max(1, self.parallel), *times)

    @property
    def _left(self) -> list[RunProgress]:
        return [run for run in (*self.runs, *self.later) if run.rounds_left]

    @property
    def is_most(self) -> bool:
        """Whether the rest may also take less, because runs may end early."""
        return any(run.run.may_end_early for run in self._left)


class _Pace:
    """Seconds per round, as measured so far.

    The first round of a run is apart: its method may have code to compile and models
    to cut, which can take a hundred times as long as a round.
    """

    def __init__(self, runs: Sequence[RunProgress]) -> None:
        self.first: dict[str, list[float]] = {}
        self.others: dict[str, list[float]] = {}
        for run in runs:
            if run.round:
                self.first.setdefault(run.run.kind, []).append(run.first)
            if run.round > 1:
                self.others.setdefault(run.run.kind, []).append(_pace(run))

    def of_first(self, run: RunProgress) -> float:
        return _known(self.first, run.run.kind) or 0.0

    def of_rounds_left(self, run: RunProgress) -> float | None:
        """The seconds of all rounds left but the first; None if nothing is known."""
        if not self.first:
            return None
        left = run.rounds_left if run.round else run.rounds_left - 1
        if not left:
            return 0.0
        pace = _pace(run) if run.round > 1 else _known(self.others, run.run.kind)
        return None if pace is None else left * pace


def _pace(run: RunProgress) -> float:
    return (run.seconds - run.first) / (run.round - 1)


def _known(by_kind: Mapping[str, list[float]], kind: str) -> float | None:
    """The median of this kind; of all, if nothing is known of it."""
    known = by_kind.get(kind) or [x for listed in by_kind.values() for x in listed]
    return median(known) if known else None


class Following:
    """A comparison's folder, read again and again; only what is new is read."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._rounds: dict[str, _Tail] = {}
        self._times: dict[str, _Tail] = {}
        self._finished: dict[str, RunProgress] = {}
        self._begun: dict[str, float] = {}  # those without a round yet -> since when
        self._startups: list[float] = []

    def begin(self, path: Path) -> None:
        """A run begins now; its folder will be made once its model is ready."""
        name = path.relative_to(self.out).as_posix()
        if not path.exists():
            self._begun[name] = monotonic()

    def read(self) -> Progress:
        """How far it is now."""
        plan = read_plan(self.out)
        runs = [self._starting(self._run(run, plan)) for run in plan.runs]
        startup = mean(self._startups) if self._startups else 0.0
        later = tuple(RunProgress(run, "waiting") for run in plan.later)
        return Progress(runs, plan.parallel, later, startup)

    def _starting(self, found: RunProgress) -> RunProgress:
        """The same run, also while nothing of it is in the folder."""
        name = found.run.name
        if name not in self._begun:
            return found
        elapsed = monotonic() - self._begun[name]
        if found.round == 0 and found.state in ("waiting", "playing"):
            return replace(found, state="playing", starting=elapsed)
        del self._begun[name]
        if found.round:
            self._startups.append(max(0.0, elapsed - found.seconds))
        return found

    def _run(self, run: PlannedRun, plan: SweepPlan) -> RunProgress:
        if run.name in self._finished:
            return self._finished[run.name]
        path = self.out / run.name
        if not path.is_dir():
            why = run.name in plan.failed
            return RunProgress(run, "failed" if why else "waiting")
        t, score, metric = self._rounds.setdefault(
            run.name, _Tail(path / "rounds.jsonl", _round_and_score, (0, None, ""))
        ).last()
        timed, seconds, first = self._times.setdefault(
            run.name, _Tail(path / "times.jsonl", _add_seconds, (0, 0.0, 0.0))
        ).last()
        state = self._state(path, run, plan)
        # A round may be in one of the two files only, for a moment.
        found = RunProgress(run, state, min(t, timed), seconds, first, score, metric)
        if found.state == "finished":
            self._finished[run.name] = found
        return found

    def _state(self, path: Path, run: PlannedRun, plan: SweepPlan) -> State:
        if (path / SUMMARY).exists():
            return "finished"
        if run.name in plan.failed:
            return "failed"
        return "playing" if is_locked(path / LOCK) else "interrupted"


class Watched:
    """A comparison that any process plays: its tuning, if it has one, then itself."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._tuning, self._itself = Following(out / FOLDER), Following(out)

    def read(self) -> Progress:
        """How far it is now, and whether anybody plays it."""
        # In this order: a comparison that ends meanwhile is not taken for a dead one.
        held = is_played(self.out)
        found = self._itself.read() if (self.out / SWEEP).exists() else None
        is_tuning = False
        if _planned_at(self.out / FOLDER) > _planned_at(self.out):
            search = self._tuning.read()
            # A copied folder may have other times.
            is_tuning = held or found is None or not search.is_over
            found = search if is_tuning else found
        found = found or self._itself.read()  # which says that there is none
        # Older versions of fedspu play without a lock of the comparison.
        played = held or found.count("playing") > 0
        return replace(found, is_tuning=is_tuning, is_played=played)


def _planned_at(folder: Path) -> int:
    try:
        return (folder / SWEEP).stat().st_mtime_ns
    except OSError:
        return 0


class _Tail:
    """A growing file of lines, of which each changes what is known."""

    def __init__(
        self, path: Path, add: Callable[[Any, dict[str, Any]], Any], known: Any
    ) -> None:
        self.path, self.add, self.known = path, add, known
        self._read = 0

    def last(self) -> Any:
        """What is known after all whole lines so far."""
        try:
            with open_ordinary(self.path, follow=False) as file:
                file.seek(self._read)
                content = file.read(MOST_NEW)
        except (OSError, StorageError):
            return self.known
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                self.known = self.add(self.known, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a damaged line; reading the run will say so
        self._read += len(whole)
        return self.known


def _round_and_score(known: Any, line: dict[str, Any]) -> tuple[int, float | None, str]:
    """The round, its score, and the metric's name."""
    for name, value in line.items():
        if name.startswith("personal_") and not name.startswith("personal_val_"):
            return int(line["round"]), value, name.removeprefix("personal_")
    return int(line["round"]), None, ""


def _add_seconds(known: Any, line: dict[str, Any]) -> tuple[int, float, float]:
    """The round, the seconds up to it, and those of the first."""
    t, seconds = int(line["round"]), float(line["wall_seconds"])
    return t, known[1] + seconds, known[2] if known[0] else seconds
