"""A run folder as it was last saved, to be read; ``run_folder.py`` writes it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedspu.errors import StorageError
from fedspu.federation.client_memory import Shelf, read_state
from fedspu.federation.rounds import Scores
from fedspu.federation.server import Federation
from fedspu.methods.method import Memory
from fedspu.neurons.table import Active, State

VERSION = 2
"""The version of the folder's format; others are refused."""

JOURNAL = "checkpoint/clients.jsonl"
INDEX = "checkpoint/federation.json"
INITIAL = "checkpoint/initial.safetensors"
PLAN = "checkpoint/plan.json"


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands."""

    federation: Federation
    scores: Scores


class SavedRun:
    """A run folder as it was last saved, to be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = read_index(path)

    @property
    def round(self) -> int:
        """The last round saved."""
        return int(self.index["round"])

    @property
    def is_finished(self) -> bool:
        """Whether the run has finished."""
        return (self.path / "summary.json").exists()

    def plan_text(self) -> str:
        """What is saved of the plan, as JSON."""
        try:
            return (self.path / PLAN).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(
                f"{self.path}: its checkpoint is damaged ({error})"
            ) from None

    def initial(self) -> State:
        """w0."""
        return read_state(self.path / INITIAL)

    def checkpoint(self) -> Checkpoint:
        """Everything the server needs to continue."""
        folder = self.path / "checkpoint"
        extra = self.index["extra"]
        federation = replace(
            self._known.federation,
            global_state=read_state(folder / self.index["global"]),
            extra=read_state(folder / extra) if extra else {},
        )
        return Checkpoint(federation, self._known.scores)

    def memory(self, client: int) -> Memory:
        """What a client keeps."""
        last = self._known.federation.last.get(client, 0)
        return Shelf(self.path / "personal").get(client, last)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The saved lines of one record."""
        return read_lines(self.path, name, self.index)

    @cached_property
    def _known(self) -> Checkpoint:
        return replay(self.path, self.index)


def read_index(path: Path) -> dict[str, Any]:
    """The index of a run folder's last save."""
    try:
        text = (path / INDEX).read_text(encoding="utf-8")
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
    if not isinstance(index, dict):
        raise StorageError(f"{path}: its checkpoint is damaged (it is incomplete)")
    version = index.get("version", 1)
    if version != VERSION:
        raise StorageError(
            f"{path} is a run folder of version {version}, and this fedspu reads "
            f"version {VERSION}; finish it with the fedspu that wrote it, or play it "
            "again, with another --out"
        )
    if not index.keys() >= INDEX_KEYS:
        raise StorageError(f"{path}: its checkpoint is damaged (it is incomplete)")
    return index


INDEX_KEYS = {"round", "global", "extra", "global_score", "lengths", "data"}


def read_lines(path: Path, name: str, index: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The saved lines of one record."""
    length = index["lengths"][name]
    with (path / name).open("rb") as file:
        return [json.loads(line) for line in file.read(length).splitlines()]


def replay(path: Path, index: Mapping[str, Any]) -> Checkpoint:
    """What is known about clients after the last save, from the journal."""
    stopped: set[int] = set()
    last: dict[int, int] = {}
    personal: dict[int, float] = {}
    kept: dict[int, Active] = {}
    try:
        for line in read_lines(path, JOURNAL, index):
            stopped.update(line["stopped"])
            last.update(dict.fromkeys(line["clients"], line["round"]))
            personal.update({int(k): value for k, value in line["scores"].items()})
            for client, active in line["kept"].items():
                kept[int(client)] = {n: torch.tensor(i) for n, i in active.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path}: its checkpoint is damaged ({error!r})") from None
    federation = Federation(index["round"], {}, frozenset(stopped), last, kept)
    took_part = frozenset(last) & frozenset(personal)
    return Checkpoint(federation, Scores(personal, took_part, index["global_score"]))
