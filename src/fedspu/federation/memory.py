"""Clients' memories between rounds: on disk, some of them in RAM besides."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save

from fedspu.errors import StorageError
from fedspu.federation.client import Memory
from fedspu.methods.method import Held
from fedspu.neurons.table import Active, State

SLIM, KEPT = "slim:", "kept:"
"""Before a group's name: which of its neurons a slim model has; which were chosen."""


@dataclass(frozen=True)
class Entry:
    """What is known of a client's memory without reading its model."""

    file: str | None  # of all that takes room; None if the method keeps nothing
    losses: tuple[float, ...] = ()


class ShelfError(StorageError):
    """What a client keeps could not be written."""


class Shelf:
    """A folder of clients' own models, one file each; the latest also in RAM.

    A file is written once and never changed, so its name stands for what is in it,
    whichever process asks. ``cache`` are the bytes that may stay in RAM; the last model
    always does. Without a folder all of them stay there.
    """

    def __init__(self, folder: Path | None, cache: float = float("inf")) -> None:
        self.folder = folder
        self.cache = cache if folder is not None else float("inf")
        self._memories: OrderedDict[str, Memory] = OrderedDict()
        self._bytes = 0

    def put(self, client: int, t: int, memory: Memory) -> Entry:
        """Keep what a client has after round t."""
        if memory.own is None and memory.kept is None:
            return Entry(None, memory.losses)
        name = f"client-{client}-round-{t}.safetensors"
        if self.folder is not None:
            try:
                write_whole(self.folder / name, save(_pack(memory)))
            except OSError as error:
                raise ShelfError(
                    f"{self.folder}: cannot write ({error.strerror or error})"
                ) from error
        self._keep(name, memory)
        return Entry(name, memory.losses)

    def get(self, entry: Entry) -> Memory:
        """A client's memory."""
        if entry.file is None:
            return Memory(None, entry.losses)
        memory = self._memories.get(entry.file)
        if memory is None:
            if self.folder is None:
                raise KeyError(entry.file)
            memory = read_memory(self.folder / entry.file)
        self._keep(entry.file, memory)
        return replace(memory, losses=entry.losses)

    def drop(self, name: str) -> None:
        """Forget a model that nobody needs any more."""
        memory = self._memories.pop(name, None)
        if memory is not None:
            self._bytes -= _size(memory)
        if self.folder is not None:
            (self.folder / name).unlink(missing_ok=True)

    def _keep(self, name: str, memory: Memory) -> None:
        if name in self._memories:
            self._memories.move_to_end(name)
            return
        self._memories[name] = memory
        self._bytes += _size(memory)
        while self._bytes > self.cache and len(self._memories) > 1:
            _, oldest = self._memories.popitem(last=False)
            self._bytes -= _size(oldest)


class Memories(Mapping[int, Memory]):
    """Every client's memory, read when it is asked for.

    What a client had before is dropped, unless it ``is_saved`` with every round: then a
    run folder does so, once the round is saved whole.
    """

    def __init__(
        self,
        shelf: Shelf | None = None,
        entries: Mapping[int, Entry] | None = None,
        is_saved: bool = False,
    ) -> None:
        self.shelf = shelf or Shelf(None)
        self.entries = dict(entries or {})
        self.is_saved = is_saved

    def __getitem__(self, client: int) -> Memory:
        return self.shelf.get(self.entries[client])

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def update(self, entries: Mapping[int, Entry]) -> None:
        """Take note of memories that have changed."""
        for client, entry in entries.items():
            before = self.entries.get(client)
            if before is not None and before.file and not self.is_saved:
                self.shelf.drop(before.file)
            self.entries[client] = entry


# Files --------------------------------------------------------------------------------


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_state(path: Path) -> State:
    """The tensors in a file."""
    try:
        return load_file(path)
    except Exception as error:  # safetensors has no base class of its own
        raise StorageError(f"{path}: cannot be read ({error})") from error


def check_whole(path: Path) -> None:
    """Refuse a file that is missing or cut off, without reading all of it."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except Exception as error:  # safetensors has no base class of its own
        raise StorageError(f"{path}: cannot be read ({error})") from error


def read_memory(path: Path) -> Memory:
    """What a client keeps, but for its losses."""
    saved = read_state(path)
    slim, kept = _pick(saved, SLIM), _pick(saved, KEPT)
    state = {n: t for n, t in saved.items() if not n.startswith((SLIM, KEPT))}
    return Memory(own=Held(state, slim) if state else None, kept=kept)


def _pick(saved: State, before: str) -> Active | None:
    found = {
        n.removeprefix(before): t for n, t in saved.items() if n.startswith(before)
    }
    return found or None


def _pack(memory: Memory) -> State:
    held = memory.own or Held({})
    slim = {f"{SLIM}{name}": indices for name, indices in (held.active or {}).items()}
    # Both may be the same tensors, which one file cannot hold.
    kept = {f"{KEPT}{name}": i.clone() for name, i in (memory.kept or {}).items()}
    return {**held.state, **slim, **kept}


def _size(memory: Memory) -> int:
    return sum(tensor.nbytes for tensor in _pack(memory).values())
