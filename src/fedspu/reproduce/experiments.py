"""Play the paper's experiments, as far as a budget of time allows."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from fedspu import models
from fedspu.engines.machine import num_cores
from fedspu.errors import DataError, SettingsError, StorageError
from fedspu.federation.storage.saved_index import SWEEP
from fedspu.files import read_file, write_whole
from fedspu.prepare import choose, dataset_for
from fedspu.reproduce.printed import ALPHAS, DATASETS, METHODS, ROUNDS, Dataset
from fedspu.reproduce.quirks import quirk
from fedspu.reproduce.tables import Result
from fedspu.runs import simulate
from fedspu.sweeps.compare import Watcher, compare
from fedspu.sweeps.play import finished_summary
from fedspu.sweeps.progress import read_plan

BUDGETS = {"10min": 600.0, "1h": 3600.0, "full": None}
"""Seconds; None for everything that the paper did, with three seeds."""

FEWEST_ROUNDS = 20
"""If the budget does not suffice for so many, a single alpha is played."""

PLANS = "plans.json"
"""In a folder of tables: what was asked for, and how much of it is played."""


Run = tuple[str, float, int]
"""Method, alpha, seed."""


@dataclass(frozen=True)
class Extent:
    """How much of the paper's experiments is played."""

    budget: str
    rounds: int
    alphas: tuple[float, ...]
    seeds: tuple[int, ...]
    pace: dict[Dataset, float] = field(default_factory=dict, compare=False)
    """Seconds that one process takes for a round of FedSPU."""

    @property
    def what_cut(self) -> str:
        """What is missing, in words."""
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) > 1)}"
        if self.rounds == ROUNDS and self.alphas == ALPHAS:
            return f"All {ROUNDS} rounds and all alphas, {seeds} (the paper: one)."
        alphas = ", ".join(f"{a:g}" for a in self.alphas)
        return (
            f"Cut to fit {self.budget}: {self.rounds} of {ROUNDS} rounds, alpha "
            f"{alphas} (of 0.1, 0.5, 1), {seeds}. This is a first impression, not the "
            "paper's experiment; --budget full plays all of it."
        )


@dataclass(frozen=True)
class Series:
    """Runs of one data set: with or without early stopping, or for a fault."""

    dataset: Dataset
    with_stopping: bool
    methods: tuple[str, ...]
    fault: str = ""  # of the released code, see quirks.py

    @property
    def title(self) -> str:
        """What it is, in words."""
        if self.fault:
            return f"{DATASETS[self.dataset]}, {quirk(self.fault, self.dataset).title}"
        how = "with" if self.with_stopping else "without"
        return f"{DATASETS[self.dataset]} {how} early stopping"

    @property
    def settings(self) -> dict[str, Any]:
        """What its runs have in common, beside the data."""
        if self.fault:
            return quirk(self.fault, self.dataset).settings
        return {"early_stopping.on": self.with_stopping}

    def folder(self, rounds: int) -> str:
        """Where its runs are: runs of other numbers of rounds are elsewhere."""
        words: list[str] = [self.dataset]
        if self.fault:
            words += ["quirk", self.fault]
        if self.with_stopping:
            words += ["early-stopping"]
        if rounds != ROUNDS:
            words += [str(rounds), "rounds"]
        return "-".join(words)


def series_for(
    tables: Sequence[str], datasets: Sequence[Dataset], faults: Sequence[str] = ()
) -> list[Series]:
    """The runs that these tables and faults need."""
    everyone, spu = tuple(METHODS), ("fedspu",)
    found = []
    for dataset in datasets:
        if {"table1", "table3"} & set(tables):
            found.append(Series(dataset, False, everyone))
        if "table2" in tables:
            found.append(Series(dataset, True, everyone))
        elif {"table3", "table4"} & set(tables):
            found.append(Series(dataset, True, spu))
    for dataset in datasets:
        for name in faults:
            fault = quirk(name, dataset)
            methods = (*fault.without_it, *fault.with_it)
            found.append(Series(dataset, False, methods, name))
    return found


def settings_of(dataset: Dataset, source: str | None) -> dict[str, Any]:
    """The paper's settings; ``source`` is other data to use instead."""
    if source is None:
        return {"data.name": dataset}
    own = choose({"data.name": dataset}, None, None, None, None)[0]
    train = own.train
    return {
        "data.name": source,
        "model": dataset,
        "train.lr": train.lr,
        "train.batch_size": train.batch_size,
    }


def available(
    given: Mapping[Dataset, dict[str, Any]],
) -> tuple[list[Dataset], dict[Dataset, str]]:
    """The data sets that are here; and why others are not."""
    found: list[Dataset] = []
    missing: dict[Dataset, str] = {}
    for dataset, settings in given.items():
        chosen, _, task = choose(settings, None, None, None, None)
        try:
            data = dataset_for(chosen, None, task)
        except DataError as error:
            missing[dataset] = str(error)
        else:
            shape = tuple(data.take(slice(1))[0].shape[1:])
            _check_shape(dataset, chosen.data.name, shape)
            found.append(dataset)
    if not found:
        name, why = next(iter(missing.items()))
        others = f"; nor {', '.join(list(missing)[1:])}" if len(missing) > 1 else ""
        raise DataError(
            f"no data to play with: {name}: {why}{others}; other data can be given, as "
            f"in --use {name}=arrays:FILE.npz"
        )
    return found, missing


def _check_shape(dataset: Dataset, source: str, shape: tuple[int, ...]) -> None:
    """Refuse examples that the paper's network cannot take."""
    wanted: tuple[int, ...] = models.find(dataset).input_shape  # type: ignore[attr-defined]  # ours
    if shape != wanted:
        theirs, ours = (" x ".join(map(str, sizes)) for sizes in (shape, wanted))
        raise SettingsError(
            f"--use {dataset}={source}: its examples are {theirs}, but the network of "
            f"{DATASETS[dataset]} takes {ours}; use data of that shape"
        )


def check_budget(budget: str) -> None:
    """Refuse a budget that does not exist."""
    if budget not in BUDGETS:
        raise SettingsError(f"--budget {budget}: expected one of {', '.join(BUDGETS)}")


def extent_for(
    budget: str,
    planned: Sequence[Series],
    given: Mapping[Dataset, dict[str, Any]],
    out: Path,
    parallel: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Extent:
    """How much can be played within a budget; the same again for the same request.

    Other requests in the same folder have plans of their own. ``say`` is told if
    something is measured, because that takes a while.
    """
    request = _request(budget, planned, given)
    file = out / PLANS
    plans = _read_plans(file)
    for plan in plans:
        if plan["request"] == request:
            return _extent(budget, plan, file)
    say("measuring how long a round takes here …")
    pace = {d: _seconds_per_round(given[d]) for d in given}
    extent = _fitting(budget, planned, pace, parallel)
    plans.append({"request": request, **asdict(extent)})
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(plans, indent=1).encode(), durable=False)
    except OSError as error:
        raise StorageError(f"{out}: cannot write ({error})") from error
    return extent


def _fitting(
    budget: str,
    planned: Sequence[Series],
    pace: dict[Dataset, float],
    parallel: int | None,
) -> Extent:
    """As much as fits a budget."""
    seconds = BUDGETS[budget]
    if seconds is None:
        return Extent(budget, ROUNDS, ALPHAS, (0, 1, 2), pace)
    # One round of every run, with one alpha; runs share the cores.
    at_once = min(parallel or num_cores(), num_cores())
    each = sum(len(s.methods) * pace[s.dataset] for s in planned) / at_once
    alphas: tuple[float, ...] = ALPHAS
    rounds = int(seconds / (each * len(alphas)))
    if rounds < FEWEST_ROUNDS:
        alphas, rounds = ALPHAS[:1], int(seconds / each)
    return Extent(budget, max(2, min(ROUNDS, rounds)), alphas, (0,), pace)


def _request(
    budget: str, planned: Sequence[Series], given: Mapping[Dataset, dict[str, Any]]
) -> dict[str, Any]:
    """All that a plan depends on, as JSON has it."""
    request = {
        "budget": budget,
        "series": [asdict(series) for series in planned],
        "data": given,
    }
    found: dict[str, Any] = json.loads(json.dumps(request, default=str))
    return found


def _read_plans(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    try:
        plans = json.loads(read_file(file, 2**20))
        return [{**plan, "request": plan["request"]} for plan in plans]
    except (ValueError, KeyError, TypeError):
        raise StorageError(f"{file} is damaged; choose another --out") from None


def _extent(budget: str, plan: Mapping[str, Any], file: Path) -> Extent:
    try:
        return Extent(
            budget,
            int(plan["rounds"]),
            tuple(map(float, plan["alphas"])),
            tuple(map(int, plan["seeds"])),
            {name: float(seconds) for name, seconds in plan["pace"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StorageError(f"{file} is damaged; choose another --out") from None


def _seconds_per_round(settings: Mapping[str, Any]) -> float:
    """How long one process takes for a round of FedSPU, measured on two."""
    few = {**settings, "rounds": 3, "workers": 1, "judge.clients": 2}
    ends: list[float] = []
    simulate(few, watch=lambda plan, played: ends.append(perf_counter()))
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def play(
    planned: Sequence[Series],
    extent: Extent,
    given: Mapping[Dataset, dict[str, Any]],
    out: Path,
    parallel: int | None,
    watcher: Watcher | None,
) -> list[tuple[Series, list[Result]]]:
    """Play what is missing of these series; each with all its results."""
    found = []
    for number, series in enumerate(planned, 1):
        folder = out / series.folder(extent.rounds)
        if watcher is not None:
            watcher.part = f"{series.title} (part {number} of {len(planned)})"
            watcher.later = rounds_later(planned[number - 1 :], extent, out)
        compare(
            series.methods,
            {**given[series.dataset], **series.settings, "rounds": extent.rounds},
            out=folder,
            seeds=list(extent.seeds),
            vary={"data.alpha": list(extent.alphas)},
            parallel=parallel,
            watcher=watcher,
        )
        # Other requests may have more runs here.
        wanted = _runs_of(series, extent)
        results = results_in(folder, series.dataset, series.with_stopping)
        found.append((series, [r for r in results if _run(r) in wanted]))
    return found


def _run(result: Result) -> Run:
    return result.method, result.alpha, result.seed


def _runs_of(series: Series, extent: Extent) -> set[Run]:
    return set(product(series.methods, extent.alphas, extent.seeds))


def rounds_later(planned: Sequence[Series], extent: Extent, out: Path) -> float:
    """As many rounds of the first series as take as long as all that follow it."""
    first, *others = planned
    wanted = 0.0
    for series in others:
        pace = extent.pace.get(series.dataset, 1) / extent.pace.get(first.dataset, 1)
        wanted += pace * extent.rounds * len(_missing(series, extent, out))
    return wanted


def _missing(series: Series, extent: Extent, out: Path) -> set[Run]:
    """The runs that are not finished."""
    folder = out / series.folder(extent.rounds)
    if not (folder / SWEEP).exists():
        return _runs_of(series, extent)
    finished = results_in(folder, series.dataset, series.with_stopping)
    return _runs_of(series, extent) - set(map(_run, finished))


def results_in(folder: Path, dataset: Dataset, with_stopping: bool) -> list[Result]:
    """The finished runs of a comparison's folder."""
    plan = read_plan(folder)
    found = []
    for run in (*plan.earlier, *plan.runs):
        summary = finished_summary(folder / run.name)
        if summary is None:
            continue
        found.append(
            Result(
                dataset,
                run.method,
                float(summary["alpha"]),
                run.seed,
                with_stopping,
                run.rounds,
                summary,
            )
        )
    return found


def titles(missing: Mapping[Dataset, str]) -> list[str]:
    """A note for each data set that is not played."""
    return [
        f"{DATASETS[name]} is not played: {why.removesuffix('.')}."
        for name, why in missing.items()
    ]


def stand_ins(sources: Mapping[str, str]) -> list[str]:
    """A note for each data set that other data stand in for."""
    return [
        f"{DATASETS[name]} is not the paper's data but {source}; only the order of "  # type: ignore[index]  # checked
        "methods may be compared."
        for name, source in sources.items()
    ]
