"""Compare methods on the same clients: play what is missing, then make one table."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedspu.data.own.pairs import Data
from fedspu.errors import FedSPUError, SettingsError, StorageError
from fedspu.federation.plan import Build
from fedspu.federation.storage.finding import refuse_single_run
from fedspu.files import write_whole
from fedspu.prepare import choose
from fedspu.reports.comparison import blocks, files
from fedspu.reports.comparison.statistics import Case, make_case
from fedspu.reports.page.facts import PageFacts
from fedspu.reports.page.html import page
from fedspu.reports.page.sections import pictures
from fedspu.runs import open_client
from fedspu.settings import Settings
from fedspu.settings_text import flatten, one_line
from fedspu.sweeps.cells import Cell, Sweep, make_sweep
from fedspu.sweeps.play import Planned, Played, check_same, play_missing, runs_at_once
from fedspu.sweeps.playing import alone_in, refuse_played
from fedspu.sweeps.progress import (
    refuse_other_data,
    remove_plan_alone,
    write_plan,
)
from fedspu.sweeps.report import REPORT, Given, facts_of, refusing_damaged
from fedspu.sweeps.saved import (
    COSTS,
    Found,
    by_case,
    find,
    read_costs,
    refuse_other_settings,
    title_of,
)
from fedspu.sweeps.step_costs import StepCosts
from fedspu.sweeps.tuning import FOLDER, Pick, Search, describe, pick
from fedspu.tasks.task import Task


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods side by side; print it to see the table.

    ``records`` has a flat record for each case and method, ``runs`` the summary of each
    run; both are ready for ``pandas.DataFrame``. ``unfinished`` lists run folders that
    are left out.
    """

    cases: tuple[Case, ...]
    runs: list[dict[str, Any]]
    unfinished: list[str]
    listed: tuple[Found, ...] = ()  # where the runs are

    def __str__(self) -> str:
        """The table, at most 80 columns wide."""
        return blocks.plain(self.cases)

    def __repr__(self) -> str:
        """How much was compared."""
        methods = {row.method for case in self.cases for row in case.rows}
        return (
            f"Comparison({len(methods)} methods, {len(self.cases)} cases, "
            f"{len(self.runs)} runs; print it to see the table)"
        )

    @property
    def records(self) -> list[dict[str, Any]]:
        """One flat record for each case and method."""
        return files.records(self.cases)

    def to_markdown(self) -> str:
        """The table as Markdown."""
        return blocks.markdown(self.cases)

    def to_csv(self) -> str:
        """The records as CSV."""
        return files.as_csv(self.cases)

    def to_latex(self) -> str:
        """The table for a paper, in the style of booktabs."""
        return files.latex(self.cases)

    def to_json(self) -> str:
        """Records, and the summaries of all runs, as JSON."""
        found = {
            "records": self.records,
            "runs": self.runs,
            "unfinished": self.unfinished,
        }
        return json.dumps(found, indent=2) + "\n"

    def to_html(self, given: Given | None = None) -> str:
        """A report with pictures, as one HTML file.

        ``given``: data and task that the runs were given in Python, if any.
        """
        with refusing_damaged(self.listed):
            return page(self._facts(given))

    def write_html(self, file: Path | str) -> None:
        """Write the report to a file."""
        _write(Path(file), self.to_html())

    def write_plots(self, folder: Path | str) -> int:
        """Write every picture of the report as .png and .svg; how many there are."""
        from fedspu.reports.plots import plot_pictures

        with refusing_damaged(self.listed):
            found = list(pictures(self._facts(None)))
        return plot_pictures(found, Path(folder))

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to show: a finished run, or a round of one."""
        facts = self._facts(None)
        return bool(facts.cases or facts.unfinished)

    def _facts(self, given: Given | None) -> PageFacts:
        return facts_of(self.cases, self.listed, self.unfinished, given)

    def write(self, out: Path, given: Given | None = None) -> None:
        """Write the table in every form, as ``comparison.*``, and ``report.html``."""
        forms = {
            "comparison.txt": str(self),
            "comparison.md": self.to_markdown(),
            "comparison.csv": self.to_csv(),
            "comparison.tex": self.to_latex(),
            "comparison.json": self.to_json(),
            REPORT: self.to_html(given),
        }
        for name, text in forms.items():
            _write(out / name, text)


class Watcher:
    """Follows a comparison while it is played; by itself it does nothing."""

    part = ""
    """Which part of something larger is played, in words; empty if there is none."""

    later = 0.0
    """How many rounds, as long as those of this part, the parts after it are like."""

    def plan(self, out: Path, runs: Sequence[Planned], what: str) -> None:
        """These runs are going to be played: ``what`` is comparison or tuning."""

    def begin(self, run: Planned) -> None:
        """A run begins."""

    def end(self, run: Planned, why: str | None) -> None:
        """A run has ended; ``why`` it failed, if it did."""

    def finish(self, what: str) -> None:
        """All runs have ended; ``what`` is done now takes some seconds."""


def compare(
    methods: Sequence[str] = ("fedspu", "local"),
    settings: Mapping[str, Any] | None = None,
    *,
    out: Path | str = "runs/compare",
    seeds: Sequence[int] = (0, 1, 2),
    vary: Mapping[str, Sequence[Any]] | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    tune_rounds: int = 50,
    parallel: int | None = None,
    model: Build | None = None,
    data: Data | None = None,
    task: Task | None = None,
    watcher: Watcher | None = None,
) -> Comparison:
    """Play every method with every value of ``vary`` and every seed; compare them.

    Each run has a folder in ``out``; finished ones are read, interrupted ones resumed.
    ``tune`` names settings to pick for each method, by the score on validation examples
    after ``tune_rounds`` rounds. ``parallel`` is how many runs are played at once.
    Raises ``FedSPUError`` if a run failed, once the others are played and their table
    is written.
    """
    out = Path(out)
    house = _House(
        dict(flatten(settings or {})),
        {"model": model, "data": data, "task": task},
        out,
        parallel,
        watcher or Watcher(),
    )
    axes = dict(vary or {})
    if not {"data.alpha", "data.partition"} & axes.keys():
        axes = {"data.alpha": [house.resolved({}).data.alpha], **axes}
    sweep = make_sweep(methods, seeds, axes)
    search = None
    if tune:
        search = Search({n: tuple(v) for n, v in tune.items()}, _rounds(tune_rounds))
    runs = house.plan(list(sweep.cells()))  # all are checked before the first is played
    refuse_other_data(out, runs)
    refuse_other_settings(out, runs)
    with alone_in(out):
        return _play(house, sweep, search, runs, Given(data, task, is_trusted=True))


def _play(
    house: "_House",
    sweep: Sweep,
    search: Search | None,
    runs: list[Planned],
    given: Given,
) -> Comparison:
    """Tune if asked for, play what is missing, and write the tables."""
    cells, out = list(sweep.cells()), house.out
    if search is not None:
        picks = house.tune(sweep, search, runs)
        chosen = {(p.method, p.case): p.chosen for p in picks}
        runs = house.plan([replace(c, tuned=chosen[c.method, c.case]) for c in cells])
    played = house.play(runs, "comparison")
    found = Comparison((), [], [])
    if played.summaries:
        house.watcher.finish("measuring the memory of training steps …")
        house.measure(runs, played)
        house.watcher.finish("writing the tables and the report …")
        found = compare_saved([out], only={run.path.name for run in runs})
        found.write(out, given)
    if played.failures:
        failures = {cell.name: why for cell, why in played.failures.items()}
        raise FedSPUError(_what_failed(failures, len(runs)))
    return found


def compare_saved(
    paths: Sequence[Path | str], only: Collection[str] | None = None
) -> Comparison:
    """Compare runs that are there already: run folders, and folders of comparisons.

    Runs that are not finished are left out, and listed in ``unfinished``. ``only``: no
    other runs of comparisons than these, by the names of their folders.
    """
    listed, unfinished = find([Path(path) for path in paths], only)
    try:
        cases = tuple(
            make_case(title_of(case), runs) for case, runs in by_case(listed).items()
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(
            f"{paths[0]}: a summary in it is damaged ({one_line(repr(error))}); "
            "choose another --out"
        ) from None
    runs = [dict(found.run.summary) for found in listed]
    return Comparison(cases, runs, [str(path) for path in unfinished], tuple(listed))


def _write(file: Path, text: str) -> None:
    """Write a small file, whole."""
    try:
        write_whole(file, text.encode(), durable=True)
    except OSError as error:
        raise StorageError(f"{file}: cannot be written ({error})") from error


def _rounds(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise SettingsError(
            f"--tune-rounds {given}: expected a whole number of at least 1"
        )
    return given


def _what_failed(failures: Mapping[str, str], number: int) -> str:
    (name, why), *others = failures.items()
    more = f"; so did {len(others)} more" if others else ""
    return (
        f"{len(failures)} of {number} runs failed; {name}: {why}{more}. The others are "
        "kept: the same command plays only what is missing"
    )


class _House:
    """Where the runs of one comparison are, and what they have in common."""

    def __init__(
        self,
        given: dict[str, Any],
        objects: Mapping[str, Any],
        out: Path,
        parallel: int | None,
        watcher: Watcher,
    ) -> None:
        self.given, self.objects, self.out = given, objects, out
        self.parallel, self.watcher = parallel, watcher
        if parallel is not None and parallel < 1:
            raise SettingsError(f"--parallel {parallel}: expected at least 1")
        refuse_single_run(out)
        refuse_played(out)

    def resolved(self, chosen: Mapping[str, Any]) -> Settings:
        """Complete settings, with what was chosen for a run."""
        given = {**self.given, **chosen}
        objects = self.objects
        return choose(given, objects["model"], objects["data"], None, objects["task"])[
            0
        ]

    def plan(
        self,
        cells: Sequence[Cell],
        folder: str = "",
        more: Mapping[str, Any] | None = None,
    ) -> list[Planned]:
        """The runs of these cells; refuses settings that cannot be played."""
        runs = []
        for cell in cells:
            path = self.out / folder / cell.name
            settings = self.resolved(
                {**cell.settings(), **(more or {}), "out": str(path)}
            )
            runs.append(Planned(cell, settings, path))
            check_same(path, settings)
        return runs

    def play(
        self, runs: Sequence[Planned], what: str, later: Sequence[Planned] = ()
    ) -> Played:
        """Play what is missing; ``later`` come others, to be told how long it takes."""
        number = self.parallel or runs_at_once([run.settings for run in runs])
        out = self.out if what == "comparison" else self.out / what
        failed: dict[str, str] = {}
        made = [path for path in (out, *out.absolute().parents) if not path.exists()]
        write_plan(out, runs, number, failed, later)
        self.watcher.plan(out, runs, what)

        def end(run: Planned, why: str | None) -> None:
            if why is not None:
                failed[run.cell.name] = why
                write_plan(out, runs, number, failed, later)
            self.watcher.end(run, why)

        given = {
            name: value for name, value in self.objects.items() if value is not None
        }
        try:
            return play_missing(runs, given, number, self.watcher.begin, end)
        finally:
            remove_plan_alone(out, made)

    def tune(
        self, sweep: Sweep, search: Search, later: Sequence[Planned]
    ) -> list[Pick]:
        """Play the search; the best choice of each method and case."""
        cells = search.cells(sweep)
        runs = self.plan(cells, FOLDER, {"rounds": search.rounds})
        for run in runs:
            if run.settings.data.split == "paper":
                raise SettingsError(
                    "--tune with data.split = 'paper': its validation examples are the "
                    "test examples, so nothing can be picked fairly; use three-way"
                )
        played = self.play(runs, FOLDER, later)
        picks = pick(cells, played.summaries)
        _write(self.out / FOLDER / "picks.json", describe(search, picks))
        return picks

    def measure(self, runs: Sequence[Planned], played: Played) -> None:
        """Measure the training steps of finished runs, and write that down."""
        known = read_costs(self.out)
        kinds: dict[tuple[str, Any], tuple[dict[str, int], bool]] = {}
        costs = StepCosts(self.objects["data"])
        for run in runs:
            kind = (run.cell.method, run.cell.case)
            if run.cell in played.summaries and kind not in kinds:
                kinds[kind] = known.get(run.path.name) or self._steps(run, costs)
        found = {
            run.path.name: kinds[run.cell.method, run.cell.case]
            for run in runs
            if run.cell in played.summaries
        }
        if found != known:
            text = json.dumps({**known, **found}, indent=2)
            _write(self.out / COSTS, text)

    def _steps(self, run: Planned, costs: StepCosts) -> tuple[dict[str, int], bool]:
        objects = self.objects
        client = open_client(
            run.path,
            0,
            objects["model"],
            objects["data"],
            task=objects["task"],
            trust=True,  # these are the settings that were asked for, see check_same
        )
        found = costs.by_capacity(client.plan, client.federation)
        return found, client.plan.method.is_choice
