"""A comparison of runs that are there already: what ``fedspu report`` prints."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspu.errors import SettingsError, StorageError
from fedspu.federation.storage.finding import check_is_run
from fedspu.federation.storage.saved_index import SWEEP
from fedspu.federation.storage.saved_run import SavedRun, last_whole
from fedspu.files import read_file
from fedspu.reports.comparison.statistics import RunOfMethod
from fedspu.settings import SAME_BITS
from fedspu.settings_text import flatten
from fedspu.sweeps.cells import Cell, frozen
from fedspu.sweeps.progress import read_plan

COSTS = "costs.json"
"""The memory of training steps, by run, as measured when they were compared."""

OF_A_METHOD = ("method.", "train.", "server.", "guard.", "wire.", "norm.")
"""Settings that tell methods apart in one table; all others make another case."""


@dataclass(frozen=True)
class Found:
    """A finished run, and where a table has it."""

    path: Path
    cell: Cell
    run: RunOfMethod
    data: str  # tells data sets apart


def find(
    paths: Sequence[Path], only: Collection[str] | None = None
) -> tuple[list[Found], list[Path]]:
    """The finished runs in run folders and in folders of comparisons; and the others.

    ``only``: no other runs of a comparison than these, by their names.

    Runs of a comparison are found by what it was asked for; other folders are compared
    by their settings.
    """
    listed: list[Found] = []
    unfinished: list[Path] = []
    alone: list[SavedRun] = []
    for path in paths:
        if (path / SWEEP).exists():
            for where, found in _of_comparison(path, only):
                if found is None:
                    unfinished.append(where)
                else:
                    listed.append(found)
        else:
            check_is_run(path)
            saved = last_whole(path, lambda saved: saved)
            if saved.is_finished:
                alone.append(saved)
            else:
                unfinished.append(path)
    listed += _by_settings(alone)
    _check_match(listed)
    return listed, unfinished


def _of_comparison(
    out: Path, only: Collection[str] | None
) -> Iterator[tuple[Path, Found | None]]:
    costs, plan = read_costs(out), read_plan(out)
    for run in (*plan.earlier, *plan.runs):
        path = out / run.name
        if only is not None and run.name not in only:
            continue
        try:
            saved = last_whole(path, lambda saved: saved)
            summary = saved.summary() if saved.is_finished else None
        except StorageError:
            summary = None
        if summary is None:
            yield path, None
            continue
        cell = run.cell
        steps, chooses = costs.get(run.name, ({}, False))
        of_method = RunOfMethod(cell.method, summary, steps, chooses, dict(cell.tuned))
        yield path, Found(path, cell, of_method, saved.index.data)


def read_costs(out: Path) -> dict[str, tuple[dict[str, int], bool]]:
    """Run -> the memory of its steps by capacity, and whether clients choose first."""
    file = out / COSTS
    if not file.exists():
        return {}
    try:
        return {
            str(name): ({str(p): int(n) for p, n in steps.items()}, bool(chooses))
            for name, (steps, chooses) in json.loads(read_file(file, 2**24)).items()
        }
    except (ValueError, TypeError, AttributeError):
        raise StorageError(f"{file} is damaged; remove it") from None


def _by_settings(alone: Sequence[SavedRun]) -> Iterator[Found]:
    """Runs of any folders: what differs between them makes methods and cases."""
    flats = [dict(flatten(saved.index.settings)) for saved in alone]
    names = sorted({name for flat in flats for name in flat} - SAME_BITS)
    varying = [
        name
        for name in names
        if len({repr(flat.get(name)) for flat in flats}) > 1 and name != "seed"
    ]
    for saved, flat in zip(alone, flats, strict=True):
        summary = saved.summary()
        method = str(summary.get("label"))
        case: dict[str, Any] = {"data.alpha": flat.get("data.alpha")}
        for name in varying:
            if name.startswith("method."):
                continue  # in the label
            if name.startswith(OF_A_METHOD):
                method += f"@{name}={flat.get(name)}"
            elif name not in ("data.name", "data.dir"):
                case[name] = frozen(flat.get(name))
        seed = flat.get("seed")
        if not isinstance(seed, int):
            raise StorageError(f"{saved.path}: its settings are damaged")
        cell = Cell(method, (*case.items(), ("data", saved.index.data)), seed)
        run = RunOfMethod(method, summary, {}, False, {})
        yield Found(saved.path, cell, run, saved.index.data)


def _check_match(listed: Sequence[Found]) -> None:
    """Refuse runs that one table cannot hold."""
    if not listed:
        return
    first: dict[Any, Found] = {}
    for found in listed:
        same = first.setdefault((found.cell.case, "data"), found)
        if same.data != found.data:
            raise SettingsError(
                f"{same.path} and {found.path} have different data, so they cannot be "
                "compared"
            )
        twin = first.setdefault(
            (found.cell.case, found.cell.method, found.cell.seed), found
        )
        if twin is not found:
            raise SettingsError(
                f"{twin.path} and {found.path} are the same run (same method, settings "
                "and seed); leave one out"
            )
        metric = first.setdefault((found.cell.case, "metric"), found)
        if metric.run.summary.get("metric") != found.run.summary.get("metric"):
            raise SettingsError(
                f"{metric.path} and {found.path} have different metrics, so they "
                "cannot be compared"
            )


def by_case(listed: Sequence[Found]) -> dict[tuple[Any, ...], list[RunOfMethod]]:
    """The runs of each case."""
    cases: dict[tuple[Any, ...], list[RunOfMethod]] = {}
    for found in listed:
        cases.setdefault(found.cell.case, []).append(found.run)
    return cases


def title_of(case: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """What a case is called: without the mark of its data."""
    return {name: value for name, value in case if name != "data"}
