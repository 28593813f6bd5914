"""Where clients' memories are between rounds: on disk, and some also in RAM.

A memory is named by its client and by the round after which the client had it. It is
written once and never changed, so a name means the same memory in every process.
"""

import re
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from fedspu.errors import StorageError
from fedspu.files import sync_folder, write_whole
from fedspu.methods.method import Memory, ModelState
from fedspu.neurons.table import State

SLIM, EXTRA, LOSSES = "slim:", "extra:", "losses:"
"""Prefixes of names in a file: the neurons of a group that a slim model has; what else
a method keeps; the last losses."""

Name = tuple[int, int]
"""A client, and the round after which it had this memory."""


class ShelfError(StorageError):
    """What a client keeps could not be written, or not be read."""


class LostError(ShelfError):
    """What a client kept is no longer there, or is damaged."""


class Shelf:
    """A folder of clients' memories, one file each; the latest also in RAM.

    ``cache`` is how many bytes may stay in RAM; the last memory always stays. Without a
    folder, all memories stay in RAM. ``durable``: a memory that is put here is on the
    disk then; else whoever saves the run sees to that.
    """

    def __init__(
        self,
        folder: Path | None,
        cache: float = float("inf"),
        *,
        durable: bool = False,
    ) -> None:
        self.folder, self.durable = folder, durable
        self.cache = cache if folder is not None else float("inf")
        self._memories: OrderedDict[Name, Memory] = OrderedDict()
        self._bytes = 0

    def put(self, client: int, t: int, memory: Memory) -> None:
        """Keep what a client has after round t."""
        if self.folder is not None:
            try:
                content = save(pack_memory(memory))
                path = self.path(client, t)
                write_whole(path, content, durable=self.durable, private=True)
                if self.durable:
                    sync_folder(self.folder)
            except OSError as error:
                raise ShelfError(
                    f"{self.folder}: cannot write ({error.strerror or error}); what "
                    "was there before is whole"
                ) from error
        self._forget((client, t))  # a round may be played again
        self._keep((client, t), memory)

    def get(self, client: int, t: int) -> Memory:
        """What a client had after round t; empty for t = 0, before its first turn."""
        if t == 0:
            return Memory()
        memory = self._memories.get((client, t))
        if memory is None:
            if self.folder is None:
                raise KeyError((client, t))
            memory = unpack_memory(read_state(self.path(client, t)))
        self._keep((client, t), memory)
        return memory

    def forget(self, client: int, t: int) -> None:
        """Keep a memory no longer in RAM; its file stays."""
        self._forget((client, t))

    def drop(self, client: int, t: int) -> None:
        """Forget a memory that is no longer needed."""
        self.forget(client, t)
        if self.folder is not None:
            self.path(client, t).unlink(missing_ok=True)

    def keep_only(self, names: Collection[Name]) -> None:
        """Forget all other memories; files that are no memories stay as they are."""
        for client, t in self.names():
            if (client, t) not in names:
                self.drop(client, t)

    def names(self) -> list[Name]:
        """The client and round of every memory here."""
        if self.folder is None:
            return list(self._memories)
        files = (file for file in self.folder.iterdir() if not file.is_dir())
        found = (_NAME.fullmatch(file.name) for file in files)
        return [(int(m[1]), int(m[2])) for m in found if m is not None]

    def path(self, client: int, t: int) -> Path:
        """The file of one memory."""
        if self.folder is None:
            raise ValueError("a shelf without a folder has no files")
        return self.folder / f"client-{client}-round-{t}.safetensors"

    def _forget(self, name: Name) -> None:
        memory = self._memories.pop(name, None)
        if memory is not None:
            self._bytes -= _size(memory)

    def _keep(self, name: Name, memory: Memory) -> None:
        if name in self._memories:
            self._memories.move_to_end(name)
            return
        self._memories[name] = memory
        self._bytes += _size(memory)
        while self._bytes > self.cache and len(self._memories) > 1:
            _, oldest = self._memories.popitem(last=False)
            self._bytes -= _size(oldest)


_NAME = re.compile(r"client-([0-9]+)-round-([0-9]+)\.safetensors")


# Files --------------------------------------------------------------------------------


def read_state(path: Path) -> State:
    """The tensors in a file."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise StorageError(f"{path} is missing") from None
    except Exception as error:  # safetensors has no base class of its own
        raise StorageError(f"{path}: cannot be read ({error})") from error


def pack_memory(memory: Memory) -> State:
    """A memory as tensors by name."""
    own = memory.own or ModelState({})
    slim = {f"{SLIM}{name}": indices for name, indices in (own.active or {}).items()}
    # Cloned, because a file cannot hold two tensors that share memory.
    extra = {f"{EXTRA}{name}": values.clone() for name, values in memory.extra.items()}
    losses = {}
    if memory.losses:
        losses[LOSSES] = torch.tensor(memory.losses, dtype=torch.float64)
    return {**own.state, **slim, **extra, **losses}


def unpack_memory(saved: State) -> Memory:
    """The memory that ``pack_memory`` made these tensors from."""
    slim, extra = _pick(saved, SLIM), _pick(saved, EXTRA)
    others = (SLIM, EXTRA, LOSSES)
    state = {name: t for name, t in saved.items() if not name.startswith(others)}
    return Memory(
        own=ModelState(state, slim or None) if state else None,
        losses=tuple(saved[LOSSES].tolist()) if LOSSES in saved else (),
        extra=extra,
    )


def _pick(saved: State, before: str) -> State:
    return {n.removeprefix(before): t for n, t in saved.items() if n.startswith(before)}


def _size(memory: Memory) -> int:
    return sum(tensor.nbytes for tensor in pack_memory(memory).values())
