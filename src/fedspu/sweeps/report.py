"""What a report needs of run folders: their records, and the labels of clients."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedspu.data.own.pairs import Data
from fedspu.errors import FedSPUError, StorageError
from fedspu.prepare import dataset_for, fingerprint
from fedspu.reports.comparison.statistics import Case
from fedspu.reports.label_counts import count
from fedspu.reports.page.facts import (
    CaseFacts,
    Labels,
    PageFacts,
    PlayedRun,
    Unfinished,
    known,
)
from fedspu.run_records import RunRecords, load_run
from fedspu.settings import Settings
from fedspu.settings_text import flatten, one_line
from fedspu.sweeps.saved import Found
from fedspu.tasks import TASKS, find_task
from fedspu.tasks.task import Task

REPORT = "report.html"


@dataclass(frozen=True)
class Given:
    """What runs were given in Python, and whether code they name may be imported."""

    data: Data | None = None
    task: Task | None = None
    is_trusted: bool = False


def facts_of(
    cases: Sequence[Case],
    listed: Sequence[Found],
    unfinished: Sequence[str],
    given: Given | None = None,
) -> PageFacts:
    """Everything in a report of these runs."""
    by_case: dict[Any, list[Found]] = {}
    for found in listed:
        by_case.setdefault(found.cell.case, []).append(found)
    facts = tuple(
        CaseFacts(case, tuple(map(_played, runs)), _labels(runs[0], given or Given()))
        for case, runs in zip(cases, by_case.values(), strict=True)
    )
    begun, unreadable = [], []
    for path in unfinished:
        try:
            begun.append(_unfinished(path))
        except (FedSPUError, KeyError, TypeError, ValueError) as error:
            unreadable.append(f"{path}: {one_line(str(error))}")
    return PageFacts(facts, tuple(begun), tuple(unreadable))


@contextmanager
def refusing_damaged(listed: Sequence[Found]) -> Iterator[None]:
    """Say in a line that records cannot be used: only a forger's are such."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        where = listed[0].path if listed else "runs"
        raise StorageError(
            f"{where}: records of these runs are damaged ({one_line(repr(error))}); "
            "`fedspu check RUN` says more"
        ) from None


def _played(found: Found) -> PlayedRun:
    records = load_run(found.path)
    return PlayedRun(
        path=str(found.path),
        method=found.cell.method,
        seed=found.cell.seed,
        settings=dict(flatten(records.settings)),
        summary=found.run.summary,
        rounds=records.rounds,
        turns=records.turns,
        times=records.times,
        clients=records.clients,
    )


def _unfinished(path: str) -> Unfinished:
    records = load_run(path)
    settings = dict(flatten(records.settings))
    metric = _metric(records)
    name = str(settings["task"])
    is_share = name in TASKS and find_task(name).metric.is_share
    return Unfinished(
        path=path,
        method=str(settings["method.name"]),
        seed=int(settings["seed"]),
        rounds=int(settings["rounds"]),
        played=tuple(
            (int(line["round"]), score)
            for line in records.rounds
            if (score := known(line[f"personal_{metric}"])) is not None
        ),
        metric=metric,
        is_share=is_share,
        names_code=bool(_code(Path(path))),
    )


def _metric(records: RunRecords) -> str:
    start = "personal_val_"
    names = (name for name in records.rounds[0] if name.startswith(start))
    return next(names).removeprefix(start)


def _labels(found: Found, given: Given) -> Labels | str:
    """The labels of a run's clients; if its data are not here, why."""
    records = load_run(found.path)
    try:
        settings = Settings.model_validate(records.settings)
        if not given.is_trusted and _names_code(found.path):
            return "The runs' data or task are code, which a report does not run."
        task = given.task or find_task(settings.task)
        data = dataset_for(settings, given.data, task)
        if fingerprint(data) != found.data:
            return "The data are no longer what they were when this was played."
        counts, names = count(settings, data, task)
    except ValidationError:
        return "The settings of a run are damaged."
    except FedSPUError as error:
        return f"The data are not here: {one_line(str(error))}."
    if not counts.has_classes:
        return "These examples have no classes to tell clients apart by."
    return Labels(counts, names, settings.seed)


def _names_code(path: Path) -> Mapping[str, str]:
    named = _code(path)
    return {name: place for name, place in named.items() if name in CODE_OF_LABELS}


def _code(path: Path) -> Mapping[str, str]:
    from fedspu.federation.storage.saved_run import SavedRun

    return SavedRun(path).names_code


CODE_OF_LABELS = ("data.name", "task")
