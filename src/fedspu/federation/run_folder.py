"""A run folder: settings, records, and all that is needed to resume a run.

A round is saved in this order: new files, then one atomic rename of
``checkpoint/federation.json``, which names them, then old files are removed. If
a save is interrupted, the folder still holds the last round that was saved::

    settings.toml     all settings used
    rounds.jsonl      one line per round; the same bytes for the same settings
    clients.jsonl     one line per client's turn
    times.jsonl       one line per round, with the times measured
    summary.json      written at the end
    checkpoint/       plan.json and initial.safetensors (w0), the global model,
                      federation.json, and clients.jsonl: what each round changed
    personal/         what each client keeps, named by client and last round
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from fedspu.errors import StorageError
from fedspu.federation.client_memory import Shelf, ShelfError, read_state, write_whole
from fedspu.federation.rounds import Round, Scores, drop_old_memories
from fedspu.federation.saved_run import (
    INDEX,
    INITIAL,
    JOURNAL,
    PLAN,
    VERSION,
    Checkpoint,
    read_index,
    replay,
)
from fedspu.federation.server import Federation
from fedspu.neurons.table import Active, State

try:
    import fcntl
except ImportError:  # this system has no such locks
    fcntl = None  # type: ignore[assignment]  # checked where it is used

RECORDS = ("rounds.jsonl", "clients.jsonl", "times.jsonl")

Lines = Mapping[str, Sequence[Mapping[str, Any]]]
"""New lines, by the record that they belong to."""


class RunFolder:
    """One run on disk, locked while it is open."""

    def __init__(self, path: Path, cache: float = float("inf")) -> None:
        self.path = path
        self.shelf = Shelf(path / "personal", cache)
        self._lock: IO[str] | None = None
        self._index: dict[str, Any] = {}
        self._saved = Checkpoint(Federation(0, {}), Scores())

    @classmethod
    def create(
        cls,
        path: Path,
        settings: str,
        plan: str,
        initial: State,
        data: str = "",
        cache: float = float("inf"),
    ) -> "RunFolder":
        """A new run folder, saved at round 0; if this fails, nothing is left behind.

        ``data`` is a fingerprint of the run's data; ``cache`` is how many bytes of
        clients' models may stay in RAM.
        """
        folder = cls(path, cache)
        folder._index["data"] = data
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise folder._in_use()
        try:
            (path / "checkpoint").mkdir(parents=True)
        except FileExistsError:  # another run was quicker
            raise folder._in_use() from None
        except OSError as error:
            raise folder._cannot_write(error) from error
        try:
            with folder._guarded():
                (path / "personal").mkdir()
                folder._acquire()
                write_whole(path / "settings.toml", settings.encode())
                write_whole(path / PLAN, plan.encode())
                write_whole(path / INITIAL, save(initial))
                folder.save(Round(Federation(0, initial), {}), {})
        except BaseException:
            folder.remove()
            raise
        return folder

    @classmethod
    def open(cls, path: Path, cache: float = float("inf")) -> "RunFolder":
        """A run folder to resume; what was not saved completely is removed."""
        read_index(path)  # raises if it is not a run folder
        folder = cls(path, cache)
        try:
            with folder._guarded():
                folder._acquire()
                folder._index = read_index(path)
                for name, length in folder._index["lengths"].items():
                    _cut(path / name, length)
                folder._saved = replay(path, folder._index)
                last = folder._saved.federation.last
                for client, t in last.items():
                    _check_whole(folder.shelf.path(client, t))
                folder.shelf.keep_only(last)
                folder._remove_strangers()
        except BaseException:
            folder.close()
            raise
        return folder

    @property
    def round(self) -> int:
        """The last round saved."""
        return int(self._index.get("round", 0))

    def check_same(self, initial: State, data: str) -> None:
        """Refuse to resume with a model or data other than the run's."""
        if self._index.get("data", "") != data:
            raise StorageError(
                f"{self.path} was started with other data (targets or shapes differ); "
                "resume it with the same data"
            )
        own = read_state(self.path / INITIAL)
        if {n: t.shape for n, t in own.items()} != {
            n: t.shape for n, t in initial.items()
        }:
            raise StorageError(
                f"{self.path} was started with another model (tensors differ in name "
                "or shape); resume it with the same model"
            )

    def save(self, played: Round, lines: Lines) -> None:
        """Save one round, and add its new lines to the records.

        What clients keep is on the shelf already. How much is written depends on the
        clients that changed in this round, not on how many there are.
        """
        federation, scores = played.federation, played.scores
        t = federation.round
        with self._guarded():
            journal = {JOURNAL: [_journal_line(self._saved, played)]}
            folder = self.path / "checkpoint"
            global_file, extra_file = f"global-round-{t}.safetensors", None
            write_whole(folder / global_file, save(federation.global_state))
            if federation.extra:
                extra_file = f"extra-round-{t}.safetensors"
                write_whole(folder / extra_file, save(federation.extra))
            index = {
                "version": VERSION,
                "round": t,
                "global": global_file,
                "extra": extra_file,
                "global_score": scores.global_,
                "lengths": {
                    name: self._append(name, {**lines, **journal}.get(name, []))
                    for name in (*RECORDS, JOURNAL)
                },
                "data": self._index.get("data", ""),
            }
            write_whole(self.path / INDEX, json.dumps(index, indent=1).encode())
            before, self._index = self._index, index
            old = self._saved.federation
            self._saved = Checkpoint(replace(federation, global_state={}), scores)
            self._remove_old(before)
            drop_old_memories(self.shelf, old, played)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of a finished run."""
        with self._guarded():
            text = json.dumps(summary, indent=2) + "\n"
            write_whole(self.path / "summary.json", text.encode())

    def close(self) -> None:
        """Unlock the folder, so that others can use it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Delete the folder and everything in it."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> int:
        with (self.path / name).open("ab") as file:
            file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            return file.tell()

    def _remove_old(self, index: Mapping[str, Any]) -> None:
        """Remove the states of the round before, now that there are newer ones."""
        for key in ("global", "extra"):
            if index.get(key) and index[key] != self._index[key]:
                (self.path / "checkpoint" / index[key]).unlink(missing_ok=True)

    def _remove_strangers(self) -> None:
        """Remove files of a round that was not saved completely."""
        wanted = {Path(name).name for name in (INDEX, INITIAL, PLAN, JOURNAL)}
        wanted |= {self._index["global"], self._index["extra"]}
        for file in (self.path / "checkpoint").iterdir():
            if file.name not in wanted:
                file.unlink()
        for file in (self.path / "personal").glob("*.part"):
            file.unlink()

    def _acquire(self) -> None:
        self._lock = (self.path / ".lock").open("w")
        if fcntl is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise StorageError(
                f"{self.path} is being written by another run; wait for it, or choose "
                "another --out"
            ) from None

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

    def _in_use(self) -> StorageError:
        return StorageError(
            f"{self.path} is in use already; choose another --out, or resume the run "
            f"in it with `fedspu run --resume {self.path}`"
        )

    def _cannot_write(self, error: OSError) -> StorageError:
        reason = error.strerror or str(error)
        return StorageError(f"{self.path}: cannot write ({reason}){self._so_far()}")

    def _so_far(self) -> str:
        if not self.round:
            return ""
        return (
            f"; rounds up to {self.round} are saved: fix the problem, then resume with "
            f"`fedspu run --resume {self.path}`"
        )


def _cut(path: Path, length: int) -> None:
    """Cut a record back to the length it had at the last save."""
    if not path.exists() or path.stat().st_size < length:
        raise StorageError(f"{path} is missing or shorter than what was saved in it")
    with path.open("ab") as file:
        file.truncate(length)


def _check_whole(path: Path) -> None:
    """Refuse a file that is missing or cut off, without reading all of it."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except Exception as error:  # safetensors has no base class of its own
        raise StorageError(f"{path}: cannot be read ({error})") from error


def _journal_line(before: Checkpoint, played: Round) -> dict[str, Any]:
    """What has changed about clients since the round before, as one line."""
    now, old = played.federation, before.federation
    known = before.scores.personal
    return {
        "round": now.round,
        "clients": sorted(played.answers),
        "stopped": sorted(now.stopped - old.stopped),
        "scores": {
            client: score
            for client, score in played.scores.personal.items()
            if known.get(client) != score
        },
        "kept": {
            client: {name: i.tolist() for name, i in now.kept[client].items()}
            for client in sorted(played.answers.keys() & now.kept.keys())
            if not _equal(now.kept[client], old.kept.get(client))
        },
    }


def _equal(a: Active, b: Active | None) -> bool:
    return b is not None and all(torch.equal(a[name], b[name]) for name in a)
