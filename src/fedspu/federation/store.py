"""A run folder: settings, records, and all that is needed to go on after a stop.

A round is saved in this order: new files, then one atomic rename of
``checkpoint/federation.json``, which names them, then old files are removed. Whatever
happens in between, the folder is that of the last round saved::

    settings.toml     all settings used
    rounds.jsonl      one line a round; the same bytes for the same settings
    clients.jsonl     one line for each client's turn
    times.jsonl       one line a round, of what the clock said
    summary.json      at the end
    checkpoint/       initial.safetensors (w0), the global model, federation.json
    personal/         each client's own model, named by its last round
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load_file, save

from fedspu.core.types import State
from fedspu.errors import StorageError
from fedspu.federation.client import Memory
from fedspu.federation.run import Accuracies
from fedspu.federation.server import Federation

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]  # checked where it is used

RECORDS = ("rounds.jsonl", "clients.jsonl", "times.jsonl")


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands."""

    federation: Federation
    accuracies: Accuracies
    memories: dict[int, Memory]


class RunFolder:
    """One run on disk, locked while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._index: dict[str, Any] = {"personal": {}, "losses": {}}

    @classmethod
    def create(
        cls, path: Path, settings: str, initial: State, data: str = ""
    ) -> "RunFolder":
        """A new run folder, saved as of round 0; nothing is left of a failed one.

        ``data`` tells the data it was begun with from any other.
        """
        folder = cls(path)
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
                _write(path / "settings.toml", settings.encode())
                _write(path / "checkpoint/initial.safetensors", save(initial))
                folder.save(Federation(0, initial), Accuracies(), {}, {})
        except BaseException:
            folder.remove()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """An existing run folder, to go on with; what is not saved whole is cut off."""
        read_index(path)  # says so if it is none
        folder = cls(path)
        try:
            with folder._guarded():
                folder._acquire()
                folder._index = read_index(path)
                for name, length in folder._index["lengths"].items():
                    _cut(path / name, length)
                folder._remove_old()
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
        own = _load(self.path / "checkpoint/initial.safetensors")
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
        memories: Mapping[int, Memory],
        lines: Mapping[str, list[dict[str, Any]]],
    ) -> None:
        """Save one round: the memories that changed, and new lines of the records."""
        t = federation.round
        with self._guarded():
            lengths = {
                name: self._append(name, lines.get(name, [])) for name in RECORDS
            }
            personal, losses = (
                dict(self._index["personal"]),
                dict(self._index["losses"]),
            )
            for client, memory in memories.items():
                losses[str(client)] = memory.losses
                if memory.own is not None:
                    personal[str(client)] = f"client-{client}-round-{t}.safetensors"
                    _write(
                        self.path / "personal" / personal[str(client)], save(memory.own)
                    )
            global_file = f"global-round-{t}.safetensors"
            _write(
                self.path / "checkpoint" / global_file, save(federation.global_state)
            )
            index = {
                "round": t,
                "stopped": sorted(federation.stopped),
                "met": sorted(federation.met),
                "personal_accuracy": accuracies.personal,
                "global_accuracy": accuracies.global_,
                "global": global_file,
                "personal": personal,
                "losses": losses,
                "lengths": lengths,
                "data": self._index.get("data", ""),
            }
            text = json.dumps(index, indent=1)
            _write(self.path / "checkpoint/federation.json", text.encode())
            self._index = index
            self._remove_old()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of a finished run."""
        with self._guarded():
            text = json.dumps(summary, indent=2) + "\n"
            _write(self.path / "summary.json", text.encode())

    def close(self) -> None:
        """Let others use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _append(self, name: str, lines: list[dict[str, Any]]) -> int:
        with (self.path / name).open("ab") as file:
            file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            return file.tell()

    def _remove_old(self) -> None:
        wanted = {*self._index["personal"].values(), self._index["global"]}
        for folder, keep in (("personal", ()), ("checkpoint", CHECKPOINT_FILES)):
            for file in (self.path / folder).iterdir():
                if file.name not in wanted and file.name not in keep:
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

    def _cannot_write(self, error: OSError) -> StorageError:
        reason = error.strerror or str(error)
        so_far = ""
        if self.round:
            so_far = (
                f"; rounds up to {self.round} are saved: mend it, then go on with "
                f"`fedspu run --resume {self.path}`"
            )
        return StorageError(f"{self.path}: cannot write ({reason}){so_far}")


CHECKPOINT_FILES = ("initial.safetensors", "federation.json")


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


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
    *("round", "stopped", "met", "personal_accuracy", "global_accuracy"),
    *("global", "personal", "losses", "lengths"),
}


def read_checkpoint(path: Path) -> Checkpoint:
    """Everything a run needs to go on from its last save."""
    index = read_index(path)
    memories = {
        int(client): Memory(
            own=(
                _load(path / "personal" / index["personal"][client])
                if client in index["personal"]
                else None
            ),
            losses=tuple(losses),
        )
        for client, losses in index["losses"].items()
    }
    met = frozenset(index["met"])
    personal = {int(k): value for k, value in index["personal_accuracy"].items()}
    return Checkpoint(
        federation=Federation(
            round=index["round"],
            global_state=_load(path / "checkpoint" / index["global"]),
            stopped=frozenset(index["stopped"]),
            met=met,
        ),
        accuracies=Accuracies(
            personal, met & frozenset(personal), index["global_accuracy"]
        ),
        memories=memories,
    )


def read_personal(path: Path, client: int) -> State:
    """A client's own model as last saved; w0 if it never took part."""
    index = read_index(path)
    name = index["personal"].get(str(client))
    file = f"personal/{name}" if name else "checkpoint/initial.safetensors"
    return _load(path / file)


def read_global(path: Path) -> State:
    """The global model as last saved."""
    return _load(path / "checkpoint" / read_index(path)["global"])


def read_lines(path: Path, name: str) -> list[dict[str, Any]]:
    """The saved lines of one record."""
    length = read_index(path)["lengths"][name]
    with (path / name).open("rb") as file:
        return [json.loads(line) for line in file.read(length).splitlines()]


def _load(path: Path) -> State:
    try:
        return load_file(path)
    except Exception as error:  # safetensors has no base class of its own
        raise StorageError(f"{path}: cannot be read ({error})") from error
