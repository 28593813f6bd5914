"""A comparison of runs that are there already: what ``fedspu report`` prints."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedspu.errors import SettingsError, StorageError
from fedspu.federation.storage.finding import check_is_run
from fedspu.federation.storage.own_files import is_free
from fedspu.federation.storage.saved_index import SWEEP
from fedspu.federation.storage.saved_run import SavedRun, last_whole
from fedspu.files import read_file
from fedspu.methods import suggested_by
from fedspu.reports.comparison.statistics import RunOfMethod
from fedspu.settings import SAME_BITS, Settings
from fedspu.settings_text import flatten
from fedspu.sweeps.cells import Cell, frozen
from fedspu.sweeps.play import Planned
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
    settings: Mapping[str, Any]  # all that it was played with, by dotted name


def find(
    paths: Sequence[Path], only: Collection[str] | None = None
) -> tuple[list[Found], list[Path]]:
    """The finished runs in run folders and in folders of comparisons; and the others.

    ``only``: no other runs of a comparison than these, by their names.

    Runs of a comparison are found by what it was asked for; other folders, and
    comparisons with others, are told apart by their settings.
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
    if len(paths) > 1:  # what one comparison picked is not what another did
        listed = [
            replace(found, cell=replace(found.cell, tuned=())) for found in listed
        ]
    listed = [*_told_apart(listed), *_by_settings(alone)]
    _check_match(listed)
    return listed, unfinished


def _of_comparison(
    out: Path, only: Collection[str] | None
) -> Iterator[tuple[Path, Found | None]]:
    costs, plan = read_costs(out), read_plan(out)
    runs = [*plan.earlier, *plan.runs]
    # A method that was tuned again has other runs now; those before are left out.
    latest = {(run.cell.method, run.cell.case): run.cell.tuned for run in runs}
    for run in runs:
        path = out / run.name
        if only is not None and run.name not in only:
            continue
        if run.cell.tuned != latest[run.cell.method, run.cell.case]:
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
        yield path, Found(path, cell, of_method, saved.index.data, _settings(saved))


def _settings(saved: SavedRun) -> dict[str, Any]:
    """What a run was played with; what its fedspu did not have yet has its default."""
    given = dict(flatten(saved.index.settings))
    defaults = Settings(model=str(given.get("model"))).model_dump(mode="json")
    return {**dict(flatten(defaults)), **given}


def _not_asked_for(settings: Mapping[str, Any], cell: Cell) -> dict[str, Any]:
    """The settings of a run that neither its cell nor its method is about."""
    suggested = suggested_by(cell.method.partition("@")[0])
    return {
        name: value
        for name, value in settings.items()
        if name not in SAME_BITS | OF_THE_MACHINE | cell.settings().keys()
        and suggested.get(name, NOTHING) != value
    }


OF_THE_MACHINE = {"data.name", "data.dir", "train.kernels"}
"""Where the data are, which has a check of its own, and what a run wrote down."""

NOTHING = object()


def _told_apart(listed: Sequence[Found]) -> Iterator[Found]:
    """Runs of comparisons: what differs besides makes other methods or cases."""
    by_case: dict[Any, list[tuple[Found, dict[str, Any]]]] = {}
    for found in listed:
        rest = _not_asked_for(found.settings, found.cell)
        by_case.setdefault(found.cell.case, []).append((found, rest))
    for runs in by_case.values():
        values: dict[str, set[str]] = {}
        for _, rest in runs:
            for name, value in rest.items():
                values.setdefault(name, set()).add(repr(value))
        varying = sorted(name for name, several in values.items() if len(several) > 1)
        for found, rest in runs:
            yield _renamed(found, {n: rest[n] for n in varying if n in rest})


def _renamed(found: Found, differing: Mapping[str, Any]) -> Found:
    """A run whose method and case say these settings, too."""
    method, case = found.cell.method, found.cell.case
    for name, value in differing.items():
        if name.startswith(OF_A_METHOD):
            method += f"@{name}={value}"
        else:
            case = (*case, (name, frozen(value)))
    return replace(
        found,
        cell=replace(found.cell, method=method, case=case),
        run=replace(found.run, method=method),
    )


def refuse_other_settings(out: Path, runs: Sequence[Planned]) -> None:
    """Refuse to add to a comparison whose other runs were played in another way."""
    if not (out / SWEEP).exists():
        return
    names = {run.path.name for run in runs}
    new = {run.cell.case: run for run in runs}
    plan = read_plan(out)
    for run in (*plan.earlier, *plan.runs):
        path, mine = out / run.name, new.get(run.cell.case)
        if mine is None or run.name in names or is_free(path):
            continue
        try:
            before = last_whole(path, _settings)
        except StorageError:  # damaged: it is in no table
            continue
        asked = dict(flatten(mine.settings.model_dump(mode="json")))
        was, now = _not_asked_for(before, run.cell), _not_asked_for(asked, mine.cell)
        for name in sorted(was.keys() & now.keys()):
            if was[name] != now[name]:
                advice = "one table cannot hold both; choose another --out"
                if name.startswith(OF_A_METHOD):
                    other = f"{mine.cell.method}@{name}={now[name]}"
                    advice = f"choose another --out, or compare {other}"
                raise StorageError(
                    f"{path} was played with {name} = {was[name]}, but {now[name]} is "
                    f"asked for now; {advice}"
                )


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
        yield Found(saved.path, cell, run, saved.index.data, flat)


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
