"""A run folder: settings, records, and all that is needed to resume a run.

A round is saved in this order: new files and new lines, then an index that marks each
of them, then files that only the save before the last needs are removed. Each step is
on the disk before the next begins. Whatever interrupts a save, also a power cut, the
folder still holds the last round that was saved, and the one before::

    settings.toml     all settings used
    rounds.jsonl      one line per round; the same bytes for the same settings
    clients.jsonl     one line per client's turn
    times.jsonl       one line per round, with the times measured
    summary.json      written at the end
    checkpoint/       plan.json and initial.safetensors (w0); of the last two rounds
                      the global model and the index, save-round-T.json; and
                      clients.jsonl: what each round changed
    personal/         what each client keeps, named by client and last round

Only files of these names are ever removed, and no link is followed.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save

from fedspu.errors import StorageError
from fedspu.federation.client_memory import Name, Shelf, ShelfError
from fedspu.federation.rounds import Round, Scores
from fedspu.federation.server import Federation
from fedspu.federation.storage.finding import (
    check_free,
    check_is_run,
    resume_command,
)
from fedspu.federation.storage.own_files import (
    LOCK,
    remove_other_rounds,
    remove_own,
    remove_round,
)
from fedspu.federation.storage.saved_index import (
    FOLDER,
    INITIAL,
    JOURNAL,
    PERSONAL,
    PLAN,
    RECORDS,
    SETTINGS,
    SUMMARY,
    VERSION,
    Index,
    JournalLine,
    dump_index,
    extra_path,
    global_path,
    index_path,
)
from fedspu.federation.storage.saved_run import Checkpoint, SavedRun, last_whole
from fedspu.files import (
    Mark,
    append,
    cut,
    lock,
    mark_of,
    not_a_link,
    sync_file,
    sync_folder,
    write_whole,
)
from fedspu.neurons.table import Active, State

Lines = Mapping[str, Sequence[Mapping[str, Any]]]
"""New lines, by the record that they belong to."""


class RunFolder:
    """One run on disk, locked while it is open.

    ``durable``: a save waits until the disk has it. ``has_memories`` is False if what
    clients keep is not here, but on their own devices.
    """

    def __init__(
        self, path: Path, cache: float = float("inf"), durable: bool = True
    ) -> None:
        self.path, self.durable, self.has_memories = path, durable, True
        self.shelf = Shelf(path / PERSONAL, cache)
        self.index: Index | None = None  # of the last save
        self._lock: BinaryIO | None = None
        self._saved = Checkpoint(Federation(0, {}), Scores())
        self._hashes = {name: hashlib.sha256() for name in RECORDS}
        self._lengths = dict.fromkeys(RECORDS, 0)
        self._marks: dict[int, Future[Mark]] = {}  # of the round that is being judged
        # Memories that only the save before the last needs.
        self._replaced: list[Name] = []

    @classmethod
    def create(
        cls,
        path: Path,
        settings: str,
        plan: str,
        initial: State,
        data: str = "",
        cache: float = float("inf"),
        durable: bool = True,
        has_memories: bool = True,
    ) -> "RunFolder":
        """A new run folder, saved at round 0; if this fails, nothing is left behind.

        ``data`` is a fingerprint of the run's data; ``cache`` is how many bytes of
        clients' models may stay in RAM.
        """
        folder = cls(path, cache, durable)
        folder.has_memories = has_memories
        check_free(path)
        around = [parent for parent in path.parents if not parent.exists()]
        with folder._guarded():
            path.mkdir(parents=True, exist_ok=True)
            folder._acquire()
        try:
            check_free(path)  # another run may have been quicker
        except StorageError:
            folder.close()
            raise
        try:
            with folder._guarded():
                remove_own(path)  # of a run that was killed before its first save
                for name in (FOLDER, PERSONAL):
                    (path / name).mkdir(mode=0o700)
                folder._sync(path)  # so that a folder half made can be told by these
                files = {
                    SETTINGS: folder._write(path / SETTINGS, settings.encode()),
                    PLAN: folder._write(path / PLAN, plan.encode()),
                    INITIAL: folder._write(path / INITIAL, save(initial)),
                }
                start = Round(Federation(0, initial), {})
                folder._save(start, {}, tomllib.loads(settings), data, files)
                for made in (path, *around):
                    folder._sync(made.parent)
        except BaseException:
            folder.remove()
            raise
        return folder

    @classmethod
    def open(cls, path: Path, cache: float = float("inf")) -> "RunFolder":
        """A run folder to resume, from its last save that is whole.

        Whatever belongs to no save is removed. ``saved`` reads what was saved.
        """
        check_is_run(path)
        folder = cls(path, cache)
        try:
            with folder._guarded():
                folder._acquire()
                folder._take_up(last_whole(path, _whole))
        except BaseException:
            folder.close()
            raise
        return folder

    def _take_up(self, saved: SavedRun) -> None:
        for name in (FOLDER, PERSONAL):
            not_a_link(self.path / name).mkdir(mode=0o700, exist_ok=True)
        self.index, self._saved = saved.index, saved.known
        for name in RECORDS:
            content = saved.record(name)
            cut(self.path / name, len(content))
            self._hashes[name].update(content)
            self._lengths[name] = len(content)
        wanted = _names(saved)
        before = wanted
        with suppress(StorageError):  # the save before may be damaged, or there is none
            before = _names(SavedRun(self.path, saved.round - 1))
        self._replaced = sorted(before - wanted)
        self.shelf.keep_only(wanted | before)
        remove_other_rounds(self.path, {saved.round, saved.round - 1})

    @property
    def saved(self) -> SavedRun:
        """The last save, to be read."""
        return SavedRun(self.path, self.round)

    @property
    def round(self) -> int:
        """The last round saved."""
        return 0 if self.index is None else self.index.round

    def check_same(self, initial: State, data: str) -> None:
        """Refuse to resume with a model or data other than the run's."""
        if self.index is not None and self.index.data != data:
            raise StorageError(
                f"{self.path} was started with other data (targets or shapes differ); "
                "resume it with the same data"
            )
        own = self.saved.initial()
        if {n: t.shape for n, t in own.items()} != {
            n: t.shape for n, t in initial.items()
        }:
            raise StorageError(
                f"{self.path} was started with another model (tensors differ in name "
                "or shape); resume it with the same model"
            )
        if not all(torch.equal(tensor, initial[name]) for name, tensor in own.items()):
            raise StorageError(
                f"{self.path} was started from other weights than this model has at "
                "first; resume it with the same model and the same PyTorch"
            )

    # Saving ---------------------------------------------------------------------------

    def prepare_save(self, played: Round) -> None:
        """Begin with what clients have put on the shelf, while the round is judged."""
        if self.has_memories:
            self._mark_memories(played)

    def save(self, played: Round, lines: Lines) -> None:
        """Save one round, and add its new lines to the records.

        What clients keep is on the shelf already. How much is written depends on the
        clients that changed in this round, not on how many there are.
        """
        index = self._index()
        with self._guarded():
            old = self._saved.federation.last
            files = {name: index.files[name] for name in (SETTINGS, PLAN, INITIAL)}
            self._save(played, lines, index.settings, index.data, files)
            for client, t in self._replaced:
                self.shelf.drop(client, t)
            self._replaced = [(k, old[k]) for k in played.answers if k in old]
            for client, t in self._replaced:
                self.shelf.forget(client, t)
            # A client that was refused or lost begins again from what it had before.
            for client in (*played.refused, *played.missing):
                self.shelf.drop(client, self.round)
            remove_round(self.path, self.round - 2)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of a finished run."""
        with self._guarded():
            text = json.dumps(summary, indent=2) + "\n"
            mark = self._write(self.path / SUMMARY, text.encode())
            self._sync(self.path)
            index = self._index()
            files = {**index.files, SUMMARY: mark}
            self._write_index(index.model_copy(update={"files": files}))

    def extend(self, settings: str, data: str | None = None) -> None:
        """Go on with other settings: more rounds, or more devices (``data``).

        The run is not finished any more.
        """
        with self._guarded():
            mark = self._write(self.path / SETTINGS, settings.encode())
            self._sync(self.path)
            index = self._index()
            files = {**index.files, SETTINGS: mark}
            files.pop(SUMMARY, None)
            update: dict[str, Any] = {"settings": tomllib.loads(settings)}
            if data is not None:
                update["data"] = data
            self._write_index(index.model_copy(update={"files": files, **update}))
            (self.path / SUMMARY).unlink(missing_ok=True)

    def _save(
        self,
        played: Round,
        lines: Lines,
        settings: dict[str, Any],
        data: str,
        files: dict[str, Mark],
    ) -> None:
        federation, scores = played.federation, played.scores
        t = federation.round
        line = self._journal_line(played)
        state = save(federation.global_state)
        global_state = self._write(global_path(self.path, t), state)
        extra = None
        if federation.extra:
            extra = self._write(extra_path(self.path, t), save(federation.extra))
        for name in RECORDS:
            if name == JOURNAL:
                self._append(name, line.model_dump_json().encode() + b"\n")
            else:
                added = (
                    json.dumps(line).encode() + b"\n" for line in lines.get(name, ())
                )
                self._append(name, b"".join(added))
        for folder in (self.path, self.path / PERSONAL, self.path / FOLDER):
            self._sync(folder)
        self._write_index(
            Index(
                version=VERSION,
                round=t,
                settings=settings,
                data=data,
                files=files,
                records={
                    name: Mark(self._lengths[name], self._hashes[name].hexdigest())
                    for name in RECORDS
                },
                global_state=global_state,
                extra=extra,
                global_score=scores.global_,
                are_clients_finished=federation.is_finished,
            )
        )
        self._saved = Checkpoint(replace(federation, global_state={}), scores)

    def _write_index(self, index: Index) -> None:
        self._write(index_path(self.path, index.round), dump_index(index))
        self._sync(self.path / FOLDER)
        self.index = index

    def _write(self, path: Path, content: bytes) -> Mark:
        private = path.parent != self.path
        return write_whole(path, content, durable=self.durable, private=private)

    def _append(self, name: str, content: bytes) -> None:
        start = self._lengths[name]
        path = self.path / name
        private = path.parent != self.path
        append(path, content, start, durable=self.durable, private=private)
        self._hashes[name].update(content)
        self._lengths[name] = start + len(content)

    def _sync(self, folder: Path) -> None:
        if self.durable:
            sync_folder(folder)

    def _journal_line(self, played: Round) -> JournalLine:
        """What has changed about clients since the round before."""
        now, old = played.federation, self._saved.federation
        known = self._saved.scores.personal
        return JournalLine(
            round=now.round,
            memories=self._marks_of(played),
            num_examples={
                client: now.num_examples[client]
                for client in played.answers
                if client in now.num_examples and client not in old.num_examples
            },
            stopped=sorted(now.stopped - old.stopped),
            scores={
                client: score
                for client, score in played.scores.personal.items()
                if known.get(client) != score
            },
            kept={
                client: {name: i.tolist() for name, i in now.kept[client].items()}
                for client in sorted(played.answers.keys() & now.kept.keys())
                if not _equal(now.kept[client], old.kept.get(client))
            },
        )

    def _mark_memories(self, played: Round) -> None:
        """Bring what clients have put on the shelf to the disk, and mark it."""

        def marked(client: int) -> Mark:
            path = self.shelf.path(client, played.federation.round)
            if self.durable:
                sync_file(path)
            return mark_of(path)

        pool = ThreadPoolExecutor(4)  # disks are quicker at several at once
        self._marks = {k: pool.submit(marked, k) for k in sorted(played.answers)}
        pool.shutdown(wait=False)

    def _marks_of(self, played: Round) -> dict[int, Mark | None]:
        """The marks of what clients have put on the shelf; it is on the disk then."""
        if not self.has_memories:
            return dict.fromkeys(sorted(played.answers))
        if self._marks.keys() != played.answers.keys():
            self._mark_memories(played)
        marks, self._marks = self._marks, {}
        return {client: mark.result() for client, mark in marks.items()}

    def _index(self) -> Index:
        if self.index is None:
            raise ValueError("this folder has not been saved yet")
        return self.index

    # Ending ---------------------------------------------------------------------------

    def remove(self) -> None:
        """Delete all that this run has written, and the folder if it is then empty."""
        with suppress(OSError):
            remove_own(self.path)
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()
        self.close()

    def close(self) -> None:
        """Unlock the folder, so that others can use it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _acquire(self) -> None:
        # Workers of a run that was killed hold it a little longer.
        self._lock = lock(self.path / LOCK, seconds=1.0, private=False)
        if self._lock is None:
            raise StorageError(
                f"{self.path} is being written by another run; wait for it, or choose "
                "another --out"
            )

    # Saying what went wrong -----------------------------------------------------------

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._cannot_write(error) from error

    @contextmanager
    def saying_what_is_saved(self) -> Iterator[None]:
        """Inside, if the shelf cannot be written, the error says what is saved."""
        try:
            yield
        except ShelfError as error:
            raise StorageError(f"{error}{self._so_far()}") from error

    def _cannot_write(self, error: OSError) -> StorageError:
        reason = error.strerror or str(error)
        return StorageError(f"{self.path}: cannot write ({reason}){self._so_far()}")

    def _so_far(self) -> str:
        if not self.round:
            return ""
        return (
            f"; rounds up to {self.round} are saved: fix the problem, then resume with "
            f"`{resume_command(self.path)}`"
        )


def _whole(saved: SavedRun) -> SavedRun:
    saved.check()
    return saved


def _names(saved: SavedRun) -> set[Name]:
    return {(client, t) for client, (t, _) in saved.memories.items()}


def _equal(a: Active, b: Active | None) -> bool:
    return b is not None and all(torch.equal(a[name], b[name]) for name in a)
