"""A run folder as it was last saved, to be read; ``run_folder.py`` writes it.

Everything is checked against the marks in the save's index before it is used. The last
two saves are in a folder; if something of the last one is damaged, the one before is
used, with a warning.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load

from fedspu.errors import DamagedError, StorageError
from fedspu.federation.client_memory import Shelf, unpack_memory
from fedspu.federation.rounds import Scores
from fedspu.federation.server import Federation
from fedspu.federation.storage.finding import check_is_run
from fedspu.federation.storage.saved_index import (
    INITIAL,
    JOURNAL,
    PERSONAL,
    PLAN,
    SUMMARY,
    Index,
    JournalLine,
    extra_path,
    global_path,
    load_journal,
    read_index,
    saved_rounds,
)
from fedspu.federation.values import Values
from fedspu.files import Mark, check_marked, not_a_link, read_marked, read_start
from fedspu.methods.method import Memory
from fedspu.neurons.table import Active, State


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands."""

    federation: Federation
    scores: Scores


DEVICES = "devices of run "
"""How ``Index.data`` begins in a run on devices; see ``flower/server.py``."""


class SavedRun:
    """One save of a run, to be read: the last, or the one after round ``t``.

    Every method raises ``DamagedError`` if what it reads is not what was saved.
    """

    def __init__(self, path: Path, t: int | None = None) -> None:
        self.path = path
        self.index: Index
        if t is None:
            self.index = last_whole(path, lambda saved: saved.index)
        else:
            self.index = read_index(path, t)

    @property
    def round(self) -> int:
        """The last round saved."""
        return self.index.round

    @property
    def is_finished(self) -> bool:
        """Whether the run has finished."""
        return SUMMARY in self.index.files

    @property
    def is_on_devices(self) -> bool:
        """Whether clients are devices, which keep their models themselves."""
        return self.index.data.startswith(DEVICES)

    @property
    def names_code(self) -> dict[str, str]:
        """The settings that name code outside of fedspu, and what they name."""
        return self.index.names_code

    def summary(self) -> dict[str, Any]:
        """The summary of a finished run."""
        return _object(self._read(SUMMARY), self.path / SUMMARY)

    def plan_text(self) -> str:
        """What is saved of the plan, as JSON."""
        try:
            return self._read(PLAN).decode()
        except UnicodeDecodeError:
            raise DamagedError(f"{self.path / PLAN} is damaged: no UTF-8") from None

    def initial(self) -> State:
        """w0."""
        return _state(self._read(INITIAL), self.path / INITIAL)

    def checkpoint(self) -> Checkpoint:
        """Everything the server needs to continue."""
        index = self.index
        extra: State = {}
        if index.extra is not None:
            extra = _marked_state(extra_path(self.path, self.round), index.extra)
        state = _marked_state(global_path(self.path, self.round), index.global_state)
        known = self.known
        federation = replace(known.federation, global_state=state, extra=extra)
        return Checkpoint(federation, known.scores)

    def memory(self, client: int) -> Memory:
        """What a client keeps."""
        if client not in self.memories:
            return Memory()
        t, mark = self.memories[client]
        if mark is None:
            raise StorageError(
                f"{self.path}: the model of client {client} is on its own device; look "
                "there"
            )
        path = self._memory_path(client, t)
        return unpack_memory(_marked_state(path, mark))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The saved lines of one record."""
        lines = self.record(name).splitlines()
        return [_object(line, self.path / name) for line in lines]

    def record(self, name: str) -> bytes:
        """The saved bytes of one record; later ones belong to no save."""
        return read_start(self.path / name, self.index.records[name])

    @cached_property
    def known(self) -> Checkpoint:
        """What is known about clients, from the journal."""
        stopped: set[int] = set()
        personal: dict[int, Values] = {}
        kept: dict[int, Active] = {}
        num_examples: dict[int, int] = {}
        for line in self._journal:
            num_examples.update(line.num_examples)
            stopped.update(line.stopped)
            personal.update(line.scores)
            for client, active in line.kept.items():
                kept[client] = {n: torch.tensor(i) for n, i in active.items()}
        last = {client: t for client, (t, _) in self.memories.items()}
        took_part = frozenset(last) & frozenset(personal)
        return Checkpoint(
            Federation(
                self.round,
                {},
                frozenset(stopped),
                last,
                kept,
                num_examples=num_examples,
                is_finished=self.index.are_clients_finished,
            ),
            Scores(personal, took_part, self.index.global_score),
        )

    @cached_property
    def memories(self) -> dict[int, tuple[int, Mark | None]]:
        """The last round of each client that took part, and the mark of its file.

        It is None if the file is on the client's own device.
        """
        return {
            client: (line.round, mark)
            for line in self._journal
            for client, mark in line.memories.items()
        }

    @cached_property
    def _journal(self) -> list[JournalLine]:
        file = self.path / JOURNAL
        lines = load_journal(self.record(JOURNAL), str(file))
        if len(lines) != self.round + 1:
            raise DamagedError(f"{file} is damaged: it ends before round {self.round}")
        return lines

    def check(self) -> None:
        """Refuse a save that is not whole."""
        for problem in self.problems_of_the_server():
            raise problem
        for problem in self.problems_of_clients().values():
            raise problem

    def problems_of_the_server(self) -> Iterator[StorageError]:
        """Everything but clients' files that is not as it was saved."""
        marks = {PLAN: self.index.files[PLAN], INITIAL: self.index.files[INITIAL]}
        if self.is_finished:
            marks[SUMMARY] = self.index.files[SUMMARY]
        checks: list[Callable[[], object]] = [
            lambda: not_a_link(self.path / PERSONAL),
            *(
                lambda n=n, m=m: check_marked(self.path / n, m)
                for n, m in marks.items()
            ),
            *(lambda n=n: self.record(n) for n in self.index.records),
            self.checkpoint,
        ]
        for check in checks:
            try:
                check()
            except StorageError as problem:
                yield problem

    def problems_of_clients(self) -> dict[int, StorageError]:
        """What is wrong with clients' files; nothing if the journal is damaged."""
        found: dict[int, StorageError] = {}
        try:
            memories = self.memories
        except DamagedError:
            return found
        for client, (t, mark) in memories.items():
            if mark is None:
                continue
            try:
                check_marked(self._memory_path(client, t), mark)
            except StorageError as problem:
                found[client] = problem
        return found

    def _read(self, name: str) -> bytes:
        return read_marked(self.path / name, self.index.files[name])

    def _memory_path(self, client: int, t: int) -> Path:
        return Shelf(not_a_link(self.path / PERSONAL)).path(client, t)


T = TypeVar("T")


def last_whole(path: Path, read: Callable[[SavedRun], T]) -> T:
    """What is read from the last save in which it is whole.

    Warns if that is not the last save of all.
    """
    check_is_run(path)
    problems: list[str] = []
    rounds = saved_rounds(path)
    for t in rounds:
        try:
            found = read(SavedRun(path, t))
        except DamagedError as problem:
            problems.append(str(problem))
            continue
        if problems:
            warnings.warn(
                f"{problems[0]}; using the save before, after round {t}", stacklevel=2
            )
        return found
    if saved_rounds(path) != rounds:  # a run that goes on has removed them meanwhile
        return last_whole(path, read)
    raise StorageError(
        f"{problems[0]}; `fedspu check {path}` says what can still be used"
    )


def _marked_state(path: Path, mark: Mark) -> State:
    return _state(read_marked(path, mark), path)


def _state(content: bytes, path: Path) -> State:
    try:
        return load(content)
    except Exception as error:  # safetensors has no base class of its own
        raise DamagedError(f"{path} is damaged ({error})") from error


_OBJECT = TypeAdapter(dict[str, Any])


def _object(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return _OBJECT.validate_json(content)
    except ValidationError:
        raise DamagedError(f"{path} is damaged: it is not JSON") from None
