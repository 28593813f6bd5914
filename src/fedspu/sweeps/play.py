"""Play the runs of a comparison that are missing, several at once where it pays."""

import multiprocessing
import os
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fedspu.engines.crew import portable
from fedspu.engines.machine import find_device, num_cores
from fedspu.engines.workers import can_fork
from fedspu.errors import (
    DamagedError,
    DataError,
    FedSPUError,
    SettingsError,
    StorageError,
)
from fedspu.federation.storage.finding import check_is_run
from fedspu.federation.storage.own_files import is_free
from fedspu.federation.storage.saved_index import saved_rounds
from fedspu.federation.storage.saved_run import SavedRun, last_whole
from fedspu.lifetimes import (
    end_with_parent,
    leave_interrupts_to_parent,
    starting_a_process,
)
from fedspu.runs import resume, simulate
from fedspu.settings import SAME_BITS, Settings
from fedspu.settings_text import flatten
from fedspu.sweeps.cells import Cell

DIED = "its process died; is there enough memory? Try --parallel 1"


@dataclass(frozen=True)
class Planned:
    """A run that a comparison needs: what makes it, and where it is or will be."""

    cell: Cell
    settings: Settings
    path: Path


@dataclass
class Played:
    """What became of runs: their summaries, or why there is none."""

    summaries: dict[Cell, dict[str, Any]] = field(default_factory=dict)
    failures: dict[Cell, str] = field(default_factory=dict)


OnBegin = Callable[[Planned], None]
OnEnd = Callable[[Planned, str | None], None]
"""Called with a run that has ended, and why it failed, if it did."""


def play_missing(
    runs: Sequence[Planned],
    given: Mapping[str, Any],
    parallel: int | None = None,
    on_begin: OnBegin = lambda run: None,
    on_end: OnEnd = lambda run, why: None,
) -> Played:
    """Play what is missing, resume what was interrupted, read what is finished.

    ``given`` are the objects that ``simulate`` takes: model, data, task. A run that
    fails does not end the others.
    """
    played = Played()
    missing = []
    for run in runs:
        summary = finished_summary(run.path)
        if summary is None:
            missing.append(run)
        else:
            played.summaries[run.cell] = summary
    number = parallel or runs_at_once([run.settings for run in missing])
    if number > 1 and len(missing) > 1:
        _play_at_once(missing, given, number, played, on_begin, on_end)
        return played
    for run in missing:
        on_begin(run)
        why = None
        try:
            played.summaries[run.cell] = _play(run, given, run.settings.workers)
        except FedSPUError as error:
            why = _note_failure(run, error, played)
        on_end(run, why)
    return played


def _note_failure(run: Planned, error: FedSPUError, played: Played) -> str:
    """Why a run failed; wrong input that the first run meets is the others' too."""
    if isinstance(error, SettingsError | DataError) and not played.summaries:
        raise error
    played.failures[run.cell] = str(error)
    return str(error)


def runs_at_once(missing: Sequence[Settings]) -> int:
    """How many runs to play at once: one worker each is quicker than one run on all.

    Runs on a GPU, or by an engine that has the whole machine, are played in turn.
    """
    if not can_fork() or any(
        settings.engine != "here" or find_device(settings.device).type != "cpu"
        for settings in missing
    ):
        return 1
    most_workers = max((settings.workers or 1 for settings in missing), default=1)
    return max(1, min(num_cores() // most_workers, len(missing)))


def finished_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a run; None if it is not finished, or not even begun."""
    return None if is_free(path) else last_whole(path, _summary)


def _summary(saved: SavedRun) -> dict[str, Any] | None:
    return saved.summary() if saved.is_finished else None


def _play(
    run: Planned, given: Mapping[str, Any], workers: int | None
) -> dict[str, Any]:
    settings = run.settings
    if is_free(run.path):
        chosen = settings.model_copy(update={"workers": workers})
        return simulate(chosen, **given).summary
    return resume(
        run.path,
        **given,
        trust={settings.model, settings.method.name, settings.task, settings.data.name},
        workers=workers,
        engine=settings.engine,
        ray_address=settings.ray_address,
    ).summary


# Several at once ----------------------------------------------------------------------


def _play_at_once(
    missing: Sequence[Planned],
    given: Mapping[str, Any],
    number: int,
    played: Played,
    on_begin: OnBegin,
    on_end: OnEnd,
) -> None:
    waiting = deque(missing)
    running: dict[Connection, tuple[Planned, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < number:
                run = waiting.popleft()
                # The last runs share the cores that would else be idle.
                left = min(number, len(waiting) + len(running) + 1)
                workers = run.settings.workers or max(1, num_cores() // left)
                on_begin(run)
                pipe, process = _start(run, given, workers)
                running[pipe] = run, process
            for pipe in [pipe for pipe in wait(list(running), 0.5) if pipe in running]:
                run, process = running.pop(pipe)
                why = _take(pipe, run, played)
                process.join()
                on_end(run, why)
    finally:
        for pipe, (_, process) in running.items():
            pipe.close()
            process.kill()
            process.join()


def _start(
    run: Planned, given: Mapping[str, Any], workers: int
) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_serve, args=(theirs, run, given, workers, os.getpid())
    )
    with starting_a_process():
        process.start()
    theirs.close()
    return pipe, process


def _take(pipe: Connection, run: Planned, played: Played) -> str | None:
    """Note what became of a run; returns why it failed, if it did."""
    try:
        summary, error, remarks = pipe.recv()
    except (EOFError, OSError):
        summary, error, remarks = None, None, []
    pipe.close()
    for remark in remarks:
        warnings.warn(f"{run.cell.name}: {remark}", stacklevel=4)
    if summary is not None:
        played.summaries[run.cell] = summary
        return None
    found = FedSPUError(DIED) if error is None else pickle.loads(error)
    if not isinstance(found, FedSPUError):
        raise found
    return _note_failure(run, found, played)


def _serve(
    pipe: Connection, run: Planned, given: Mapping[str, Any], workers: int, parent: int
) -> None:
    """In a process of its own: play one run, and tell what became of it."""
    leave_interrupts_to_parent()
    end_with_parent(parent)
    # PyTorch would wait for ever for threads that it began before the fork.
    torch.set_num_threads(1)
    summary, failed = None, None
    with warnings.catch_warnings(record=True) as remarks:
        try:
            summary = _play(run, given, workers)
        except Exception as error:  # whatever it is, the main process raises it
            failed = portable(error)
    with suppress(OSError):
        pipe.send((summary, failed, [str(remark.message) for remark in remarks]))


# Runs that are there already ----------------------------------------------------------


def check_same(path: Path, settings: Settings) -> None:
    """Refuse to mix runs of different settings in one comparison."""
    if is_free(path):
        return
    check_is_run(path)
    # All saves, because the last one may turn out to be damaged.
    for t in saved_rounds(path):
        try:
            _check_save(SavedRun(path, t), settings)
        except DamagedError:
            continue


def _check_save(saved: SavedRun, settings: Settings) -> None:
    # A setting that the run's fedspu did not have yet has its default.
    defaults = Settings(model=settings.model).model_dump(mode="json")
    before = {**dict(flatten(defaults)), **dict(flatten(saved.index.settings))}
    wanted = dict(flatten(settings.model_dump(mode="json")))
    for name in sorted((before.keys() | wanted.keys()) - SAME_BITS):
        if name == "train.kernels" and wanted[name] == "auto":
            continue  # the run wrote down which it used
        if before.get(name) != wanted.get(name):
            raise StorageError(
                f"{saved.path} was played with {name} = {before.get(name)}, but "
                f"{wanted.get(name)} is asked for now; choose another --out"
            )
