"""What a report is made from: records of runs, and what was found by comparing them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

from fedspu.data.partition import LabelCounts
from fedspu.reports.comparison.statistics import Case
from fedspu.units import digits, shown, titled

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PlayedRun:
    """A finished run of a case: what its folder has."""

    path: str
    method: str
    seed: int
    settings: Mapping[str, Any]  # flat: dotted names
    summary: Mapping[str, Any]
    rounds: Records
    turns: Records
    times: Records
    clients: Records


@dataclass(frozen=True)
class Labels:
    """Which client has which classes, with one seed; ``names`` may be empty."""

    counts: LabelCounts
    names: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class CaseFacts:
    """One case: its numbers, its runs, and its clients' labels, or why they are not."""

    case: Case
    runs: tuple[PlayedRun, ...]
    labels: Labels | str

    @cached_property
    def methods(self) -> list[str]:
        """The methods, in the order of the table."""
        return [row.method for row in self.case.rows]

    def of(self, method: str) -> list[PlayedRun]:
        """The runs of one method, by seed."""
        return sorted(
            (run for run in self.runs if run.method == method), key=lambda run: run.seed
        )

    @property
    def metric(self) -> str:
        """What the metric is called, with its unit."""
        name = titled(self.case.metric)
        return f"{name}, %" if self.case.is_share else name

    def show(self, value: float) -> str:
        """A value of the metric, without its unit."""
        return f"{100 * value:.1f}" if self.case.is_share else digits(value, 4)

    def tick(self, value: float) -> str:
        """A value of the metric beside an axis."""
        return f"{100 * value:.4g}" if self.case.is_share else f"{value:.4g}"

    def said(self, value: float | None) -> str:
        """A value of the metric, with its unit."""
        return shown(value, self.case.is_share)


@dataclass(frozen=True)
class Unfinished:
    """A run that is not finished: where it is, and what it has reached."""

    path: str
    method: str
    seed: int
    rounds: int  # to be played
    played: tuple[tuple[int, float], ...]  # round, personal score
    metric: str
    is_share: bool
    names_code: bool = False  # which resuming would run


@dataclass(frozen=True)
class PageFacts:
    """Everything in a report; ``slots`` gives each method its colour."""

    cases: tuple[CaseFacts, ...]
    unfinished: tuple[Unfinished, ...]
    unreadable: tuple[str, ...]  # run folders that are gone or have no round yet

    @cached_property
    def slots(self) -> dict[str, int]:
        """A colour for each method; the same in all cases."""
        listed = (method for facts in self.cases for method in facts.methods)
        return {method: i for i, method in enumerate(dict.fromkeys(listed))}


def known(value: Any) -> float | None:
    """A number that can be drawn; None for any other."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) else None
