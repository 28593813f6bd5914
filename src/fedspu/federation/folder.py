"""A run folder: settings, records, and all that is needed to go on after a stop.

A round is saved in this order: new files, then one atomic rename of
``checkpoint/federation.json``, which names them, then old files are removed. Whatever
happens in between, the folder is that of the last round saved::

    settings.toml     all settings used
    rounds.jsonl      one line a round; the same bytes for the same settings
    clients.jsonl     one line for each client's turn
    times.jsonl       one line a round, of what the clock said
    summary.json      at the end
    checkpoint/       initial.safetensors (w0), the global model, federation.json and
                      clients.jsonl: what each round changed about clients
    personal/         each client's own model, named by its last round; of a slim model
                      also which neurons it has ("slim:group"), and which the client
                      chose, where it does ("kept:group")
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save

from fedspu.errors import StorageError
from fedspu.federation.client import Memory
from fedspu.federation.memory import (
    Entry,
    Memories,
    Shelf,
    ShelfError,
    check_whole,
    read_memory,
    read_state,
    write_whole,
)
from fedspu.federation.rounds import Accuracies
from fedspu.federation.server import Federation
from fedspu.methods.method import Held
from fedspu.neurons.table import Active, State

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]  # checked where it is used

RECORDS = ("rounds.jsonl", "clients.jsonl", "times.jsonl")
JOURNAL = "checkpoint/clients.jsonl"


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands."""

    federation: Federation
    accuracies: Accuracies
    memories: Memories


class RunFolder:
    """One run on disk, locked while it is open."""

    def __init__(self, path: Path, cache: float = float("inf")) -> None:
        self.path = path
        self.shelf = Shelf(path / "personal", cache)
        self._lock: IO[str] | None = None
        self._index: dict[str, Any] = {}
        self._known = Known()

    @classmethod
    def create(
        cls,
        path: Path,
        settings: str,
        initial: State,
        data: str = "",
        cache: float = float("inf"),
    ) -> "RunFolder":
        """A new run folder, saved as of round 0; nothing is left of a failed one.

        ``data`` tells the data it was begun with from any other; ``cache`` are the
        bytes of clients' models that may stay in RAM.
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
                write_whole(path / "checkpoint/initial.safetensors", save(initial))
                folder.save(Federation(0, initial), Accuracies(), {}, {})
        except BaseException:
            folder.remove()
            raise
        return folder

    @classmethod
    def open(cls, path: Path, cache: float = float("inf")) -> "RunFolder":
        """An existing run folder, to go on with; what is not saved whole is cut off."""
        read_index(path)  # says so if it is none
        folder = cls(path, cache)
        try:
            with folder._guarded():
                folder._acquire()
                folder._index = read_index(path)
                for name, length in folder._index["lengths"].items():
                    _cut(path / name, length)
                folder._known = _replay(path)
                for entry in folder._known.entries.values():
                    if entry.file is not None:
                        check_whole(path / "personal" / entry.file)
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
        """Refuse to go on with another model or other data than the run's."""
        if self._index.get("data", "") != data:
            raise StorageError(
                f"{self.path} was begun with other data: labels or shapes differ"
            )
        own = read_state(self.path / "checkpoint/initial.safetensors")
        if {n: t.shape for n, t in own.items()} != {
            n: t.shape for n, t in initial.items()
        }:
            raise StorageError(
                f"{self.path} was begun with another model: its tensors differ in name "
                "or shape"
            )

    def remove(self) -> None:
        """Leave nothing of the folder."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _in_use(self) -> StorageError:
        return StorageError(
            f"{self.path} is in use already; choose another --out, or go on with "
            f"`fedspu run --resume {self.path}`"
        )

    def save(
        self,
        federation: Federation,
        accuracies: Accuracies,
        entries: Mapping[int, Entry],
        lines: Mapping[str, list[dict[str, Any]]],
    ) -> None:
        """Save one round: whose memories have changed, and new lines of the records.

        The models themselves are on the shelf already. What this takes does not depend
        on how many clients there are.
        """
        t = federation.round
        with self._guarded():
            known = Known(federation, accuracies, {**self._known.entries, **entries})
            journal = {JOURNAL: [known.since(self._known, entries)]}
            global_file = f"global-round-{t}.safetensors"
            write_whole(
                self.path / "checkpoint" / global_file, save(federation.global_state)
            )
            index = {
                "round": t,
                "global": global_file,
                "global_accuracy": accuracies.global_,
                "lengths": {
                    name: self._append(name, {**lines, **journal}.get(name, []))
                    for name in (*RECORDS, JOURNAL)
                },
                "data": self._index.get("data", ""),
            }
            text = json.dumps(index, indent=1)
            write_whole(self.path / "checkpoint/federation.json", text.encode())
            before, self._index = self._index, index
            old, self._known = self._known, known
            self._remove_old(before, old, entries)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of a finished run."""
        with self._guarded():
            text = json.dumps(summary, indent=2) + "\n"
            write_whole(self.path / "summary.json", text.encode())

    def close(self) -> None:
        """Let others use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _append(self, name: str, lines: list[dict[str, Any]]) -> int:
        with (self.path / name).open("ab") as file:
            file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            return file.tell()

    def _remove_old(
        self, index: dict[str, Any], old: "Known", entries: Mapping[int, Entry]
    ) -> None:
        """Remove what the round before has left, now that there is better."""
        if "global" in index and index["global"] != self._index["global"]:
            (self.path / "checkpoint" / index["global"]).unlink(missing_ok=True)
        for client, entry in entries.items():
            before = old.entries.get(client)
            if before is not None and before.file and before.file != entry.file:
                self.shelf.drop(before.file)

    def _remove_strangers(self) -> None:
        """Remove files of a round that was not saved whole."""
        wanted = {entry.file for entry in self._known.entries.values()}
        wanted |= {self._index["global"], *CHECKPOINT_FILES}
        for folder in ("personal", "checkpoint"):
            for file in (self.path / folder).iterdir():
                if file.name not in wanted:
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
        """For whoever puts memories on the shelf inside."""
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
            f"; rounds up to {self.round} are saved: mend it, then go on with "
            f"`fedspu run --resume {self.path}`"
        )


CHECKPOINT_FILES = ("initial.safetensors", "federation.json", "clients.jsonl")


def _cut(path: Path, length: int) -> None:
    """Cut a record off where its last whole save ended."""
    if not path.exists() or path.stat().st_size < length:
        raise StorageError(f"{path} is damaged: it is shorter than what was saved")
    with path.open("ab") as file:
        file.truncate(length)


def read_index(path: Path) -> dict[str, Any]:
    """The index of a run folder's last save."""
    try:
        text = (path / "checkpoint/federation.json").read_text(encoding="utf-8")
    except OSError:
        raise StorageError(
            f"{path} is not a run folder: it has no checkpoint"
        ) from None
    except UnicodeDecodeError as error:
        raise StorageError(f"{path}: its checkpoint is damaged ({error})") from None
    try:
        index = json.loads(text)
    except ValueError as error:
        raise StorageError(f"{path}: its checkpoint is damaged ({error})") from None
    if not isinstance(index, dict) or not index.keys() >= INDEX_KEYS:
        raise StorageError(f"{path}: its checkpoint is damaged (it is not whole)")
    return index


INDEX_KEYS = {
    *("round", "global", "global_accuracy", "lengths"),
}


@dataclass(frozen=True)
class Known:
    """What is known of clients after a round: memories, accuracies, who has stopped."""

    federation: Federation = field(default_factory=lambda: Federation(0, {}))
    accuracies: Accuracies = field(default_factory=Accuracies)
    entries: Mapping[int, Entry] = field(default_factory=dict)

    def since(self, old: "Known", entries: Mapping[int, Entry]) -> dict[str, Any]:
        """What has changed since a round, as one line of the journal."""
        now, before = self.federation, old.federation
        known, kept = old.accuracies.personal, before.kept
        return {
            "round": now.round,
            "stopped": sorted(now.stopped - before.stopped),
            "met": sorted(now.met - before.met),
            "accuracy": {
                client: accuracy
                for client, accuracy in self.accuracies.personal.items()
                if known.get(client) != accuracy
            },
            "entries": {k: [e.file, e.losses] for k, e in sorted(entries.items())},
            "kept": {
                client: {name: i.tolist() for name, i in now.kept[client].items()}
                for client in sorted(entries.keys() & now.kept.keys())
                if not _equal(now.kept[client], kept.get(client))
            },
        }


def _equal(a: Active, b: Active | None) -> bool:
    return b is not None and all(torch.equal(a[name], b[name]) for name in a)


def _replay(path: Path) -> Known:
    """What is known of clients after the last save, from the journal."""
    stopped: set[int] = set()
    met: set[int] = set()
    personal: dict[int, float] = {}
    entries: dict[int, Entry] = {}
    kept: dict[int, Active] = {}
    try:
        for line in read_lines(path, JOURNAL):
            stopped.update(line["stopped"])
            met.update(line["met"])
            personal.update({int(k): value for k, value in line["accuracy"].items()})
            for client, (file, losses) in line["entries"].items():
                entries[int(client)] = Entry(file, tuple(losses))
            for client, active in line["kept"].items():
                kept[int(client)] = {n: torch.tensor(i) for n, i in active.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path}: its checkpoint is damaged ({error!r})") from None
    index = read_index(path)
    federation = Federation(
        index["round"], {}, frozenset(stopped), frozenset(met), kept
    )
    judged = federation.met & frozenset(personal)
    accuracies = Accuracies(personal, judged, index["global_accuracy"])
    return Known(federation, accuracies, entries)


def read_checkpoint(path: Path, shelf: Shelf | None = None) -> Checkpoint:
    """Everything a run needs to go on from its last save."""
    known = _replay(path)
    return Checkpoint(
        federation=replace(known.federation, global_state=read_global(path)),
        accuracies=known.accuracies,
        memories=Memories(
            shelf or Shelf(path / "personal"), known.entries, is_saved=True
        ),
    )


def read_personal(path: Path, client: int) -> Memory:
    """What a client has as last saved; w0 if it never took part."""
    entry = _replay(path).entries.get(client)
    initial = Held(read_state(path / "checkpoint/initial.safetensors"))
    if entry is None or entry.file is None:
        return Memory(initial)
    memory = read_memory(path / "personal" / entry.file)
    return memory if memory.own else replace(memory, own=initial)


def read_global(path: Path) -> State:
    """The global model as last saved."""
    return read_state(path / "checkpoint" / read_index(path)["global"])


def read_lines(path: Path, name: str) -> list[dict[str, Any]]:
    """The saved lines of one record."""
    length = read_index(path)["lengths"][name]
    with (path / name).open("rb") as file:
        return [json.loads(line) for line in file.read(length).splitlines()]
