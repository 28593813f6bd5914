"""Play the paper's experiments, as far as a budget of time allows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from fedspu.engines.machine import num_cores
from fedspu.errors import DataError, SettingsError, StorageError
from fedspu.files import read_file, write_whole
from fedspu.prepare import choose, dataset_for
from fedspu.reproduce.printed import ALPHAS, DATASETS, METHODS, ROUNDS, Dataset
from fedspu.reproduce.tables import Result
from fedspu.runs import simulate
from fedspu.sweeps.compare import Watcher, compare
from fedspu.sweeps.play import finished_summary
from fedspu.sweeps.progress import read_plan

BUDGETS = {"10min": 600.0, "1h": 3600.0, "full": None}
"""Seconds; None for everything that the paper did, with three seeds."""

FEWEST_ROUNDS = 20
"""If the budget does not suffice for so many, a single alpha is played."""

TABLES = ("table1", "table2", "table3", "table4", "memory")


@dataclass(frozen=True)
class Extent:
    """How much of the paper's experiments is played."""

    budget: str
    rounds: int
    alphas: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def what_cut(self) -> str:
        """What is missing, in words."""
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) > 1)}"
        if self.rounds == ROUNDS and self.alphas == ALPHAS:
            return f"All {ROUNDS} rounds and all alphas, {seeds} (the paper: one)."
        alphas = ", ".join(f"{a:g}" for a in self.alphas)
        return (
            f"Cut to fit {self.budget}: {self.rounds} of {ROUNDS} rounds, alpha "
            f"{alphas} of 0.1, 0.5, 1, {seeds}. This is a first impression, not the "
            "paper's experiment; --budget full plays all of it."
        )


@dataclass(frozen=True)
class Series:
    """Runs of one data set, with or without early stopping."""

    dataset: Dataset
    with_stopping: bool
    methods: tuple[str, ...]

    @property
    def title(self) -> str:
        """What it is, in words."""
        how = "with" if self.with_stopping else "without"
        return f"{DATASETS[self.dataset]} {how} early stopping"

    @property
    def folder(self) -> str:
        """Where its runs are."""
        return f"{self.dataset}-early-stopping" if self.with_stopping else self.dataset


def series_for(tables: Sequence[str], datasets: Sequence[Dataset]) -> list[Series]:
    """The runs that these tables need."""
    everyone, spu = tuple(METHODS), ("fedspu",)
    found = []
    for dataset in datasets:
        if {"table1", "table3"} & set(tables):
            found.append(Series(dataset, False, everyone))
        if "table2" in tables:
            found.append(Series(dataset, True, everyone))
        elif {"table3", "table4"} & set(tables):
            found.append(Series(dataset, True, spu))
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
            dataset_for(chosen, None, task)
            found.append(dataset)
        except DataError as error:
            missing[dataset] = str(error)
    if not found:
        name, why = next(iter(missing.items()))
        others = f"; nor {', '.join(list(missing)[1:])}" if len(missing) > 1 else ""
        raise DataError(
            f"no data to play with: {name}: {why}{others}; other data can be given, as "
            f"in --use {name}=arrays:FILE.npz"
        )
    return found, missing


def check_budget(budget: str) -> None:
    """Refuse a budget that does not exist."""
    if budget not in BUDGETS:
        raise SettingsError(f"--budget {budget}: expected one of {', '.join(BUDGETS)}")


def extent_for(
    budget: str,
    planned: Sequence[Series],
    given: Mapping[Dataset, dict[str, Any]],
    out: Path,
) -> Extent:
    """How much can be played within a budget; the same again for the same folder."""
    seconds = BUDGETS[budget]
    if seconds is None:
        return Extent(budget, ROUNDS, ALPHAS, (0, 1, 2))
    file = out / "budget.json"
    if file.exists():
        return _read_extent(file, budget)
    pace = {d: _seconds_per_round(given[d]) for d in {s.dataset for s in planned}}
    # One round of every run, with one alpha; runs share the cores.
    each = sum(len(s.methods) * pace[s.dataset] for s in planned) / num_cores()
    alphas: tuple[float, ...] = ALPHAS
    rounds = int(seconds / (each * len(alphas)))
    if rounds < FEWEST_ROUNDS:
        alphas, rounds = ALPHAS[:1], int(seconds / each)
    extent = Extent(budget, max(2, min(ROUNDS, rounds)), alphas, (0,))
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(asdict(extent)).encode(), durable=False)
    except OSError as error:
        raise StorageError(f"{out}: cannot write ({error})") from error
    return extent


def _read_extent(file: Path, budget: str) -> Extent:
    try:
        found = json.loads(read_file(file, 2**16))
        extent = Extent(
            str(found["budget"]),
            int(found["rounds"]),
            tuple(map(float, found["alphas"])),
            tuple(map(int, found["seeds"])),
        )
    except (ValueError, KeyError, TypeError):
        raise StorageError(f"{file} is damaged; choose another --out") from None
    if extent.budget != budget:
        raise SettingsError(
            f"{file.parent} was begun with --budget {extent.budget}; choose another "
            "--out"
        )
    return extent


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
) -> list[Result]:
    """Play what is missing of these series; all their results."""
    results = []
    for number, series in enumerate(planned, 1):
        folder = out / series.folder
        if watcher is not None:
            watcher.part = f"{series.title} (part {number} of {len(planned)})"
        settings = {
            **given[series.dataset],
            "rounds": extent.rounds,
            "early_stopping.on": series.with_stopping,
        }
        compare(
            series.methods,
            settings,
            out=folder,
            seeds=list(extent.seeds),
            vary={"data.alpha": list(extent.alphas)},
            parallel=parallel,
            watcher=watcher,
        )
        results += results_in(folder, series.dataset, series.with_stopping)
    return results


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
    return [f"{DATASETS[name]} is not played: {why}" for name, why in missing.items()]


def stand_ins(sources: Mapping[str, str]) -> list[str]:
    """A note for each data set that other data stand in for."""
    return [
        f"{DATASETS[name]} is not the paper's data but {source}; only the order of "  # type: ignore[index]  # checked
        "methods may be compared."
        for name, source in sources.items()
    ]
