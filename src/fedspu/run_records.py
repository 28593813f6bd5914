"""A saved run as records, to be analysed: what ``fedspu.load_run`` returns."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedspu.errors import StorageError
from fedspu.federation.plan import capacities_of
from fedspu.federation.storage.saved_run import SavedRun, last_whole
from fedspu.settings import Settings

Records = list[dict[str, Any]]


@dataclass(frozen=True, repr=False)
class RunRecords:
    """What a run has written down, up to its last save.

    ``rounds``, ``turns``, ``times`` and ``clients`` are lists of flat records, ready
    for ``pandas.DataFrame``: one for each round, for each turn of a client, for the
    times of each round, and for each client as it was last judged. ``summary`` is None
    if the run is not finished.
    """

    path: Path
    settings: dict[str, Any]
    summary: dict[str, Any] | None
    rounds: Records
    turns: Records
    times: Records
    clients: Records

    def __repr__(self) -> str:
        """Where it is, and how far."""
        state = "interrupted" if self.summary is None else "finished"
        return f"RunRecords({str(self.path)!r}, {len(self.rounds)} rounds, {state})"


def load_run(path: Path | str) -> RunRecords:
    """The records of a saved run; no code that it names is imported."""
    try:
        return last_whole(Path(path), _records)
    except (KeyError, TypeError) as error:  # only a forger's records
        raise StorageError(f"{path}: its records are damaged ({error!r})") from None


def _records(saved: SavedRun) -> RunRecords:
    known, turns = saved.known, saved.lines("clients.jsonl")
    # On devices, clients say themselves how strong they are.
    capacities = dict(enumerate(map(float, capacities_of(_settings(saved)))))
    capacities |= {turn["client"]: turn["capacity"] for turn in turns}
    rounds = saved.lines("rounds.jsonl")
    metric = _metric(saved, rounds)
    return RunRecords(
        path=saved.path,
        settings=dict(saved.index.settings),
        summary=saved.summary() if saved.is_finished else None,
        rounds=rounds,
        turns=turns,
        times=saved.lines("times.jsonl"),
        clients=[
            {
                "client": client,
                "capacity": capacities.get(client),
                metric: score.test,
                f"val_{metric}": score.val,
                "last_round": known.federation.last.get(client),
                "has_stopped": client in known.federation.stopped,
            }
            for client, score in sorted(known.scores.personal.items())
        ],
    )


def _settings(saved: SavedRun) -> Settings:
    try:
        return Settings.model_validate(saved.index.settings)
    except ValidationError:
        raise StorageError(f"{saved.path}: its settings are damaged") from None


def _metric(saved: SavedRun, rounds: Records) -> str:
    """The name of the task's metric, from the records."""
    start = "personal_val_"
    for name in rounds[0] if rounds else ():
        if name.startswith(start):
            return name.removeprefix(start)
    raise StorageError(f"{saved.path} has no round yet; resume it first")
