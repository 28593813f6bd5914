"""Pick settings for each method on validation data, with the same budget for all."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fedspu.errors import SettingsError
from fedspu.sweeps.cells import Cell, Sweep, method_settings

FOLDER = "tuning"
"""Where the runs of the search are, in the comparison's folder."""


@dataclass(frozen=True)
class Search:
    """What to try for each method: every combination of these values."""

    grid: Mapping[str, tuple[Any, ...]]  # dotted name -> values
    rounds: int

    def __post_init__(self) -> None:
        """Refuse a search that has nothing to choose from."""
        for name, values in self.grid.items():
            if len(values) < 2:
                raise SettingsError(
                    f"--tune {name}={values[0] if values else ''}: expected at least "
                    "two values to choose from; to set one, use --set"
                )
            if name in ("data.split", "seed", "rounds") or not name.startswith(
                MAY_TUNE
            ):
                raise SettingsError(
                    f"--tune {name}: cannot be picked for one method alone; expected "
                    f"a setting of {', '.join(n.rstrip('.') for n in MAY_TUNE)}, or an "
                    "option of a method"
                )

    @property
    def num_tries(self) -> int:
        """How many combinations there are."""
        return len(list(self.choices()))

    def choices(self) -> Iterator[tuple[tuple[str, Any], ...]]:
        """Every combination of values."""
        for values in product(*self.grid.values()):
            yield tuple(zip(self.grid, values, strict=True))

    def cells(self, sweep: Sweep) -> list[Cell]:
        """The runs of the search: each method and case, with the first seed."""
        firsts = {(c.method, c.case): c for c in reversed(list(sweep.cells()))}
        return [
            replace(cell, tuned=choice)
            for cell in reversed(list(firsts.values()))
            for choice in self.choices_for(cell)
        ]

    def choices_for(self, cell: Cell) -> Iterator[tuple[tuple[str, Any], ...]]:
        """The combinations for a method; refuses to tune what the user has set."""
        own = method_settings(cell.method).keys() & self.grid.keys()
        varies = dict(cell.case).keys() & self.grid.keys()
        if own or varies:
            what = "is set for this method" if own else "is compared, by --vary"
            raise SettingsError(
                f"{cell.method}: {sorted(own or varies)[0]} {what}, and --tune would "
                "change it; leave one of the two out"
            )
        yield from self.choices()


MAY_TUNE = ("train.", "server.", "method.", "early_stopping.", "norm.")


@dataclass(frozen=True)
class Pick:
    """What was picked for a method in a case, and how good it was in the search."""

    method: str
    case: tuple[tuple[str, Any], ...]
    chosen: tuple[tuple[str, Any], ...]
    scores: tuple[tuple[str, float | None], ...]  # choice -> on validation data

    def at_the_edge(self, grid: Mapping[str, Sequence[Any]]) -> list[str]:
        """The settings of which the largest or smallest value of three was picked."""
        return [
            name
            for name, value in self.chosen
            if len(numbers := _numbers(grid[name])) > 2
            and value in (min(numbers), max(numbers))
        ]


def _numbers(values: Sequence[Any]) -> list[float]:
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def pick(
    cells: Sequence[Cell], summaries: Mapping[Cell, Mapping[str, Any]]
) -> list[Pick]:
    """The best choice of each method and case; a run that failed is never the best."""
    groups: dict[tuple[str, tuple[tuple[str, Any], ...]], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.method, cell.case), []).append(cell)
    picks = []
    for (method, case), tried in groups.items():
        scores = {cell: _score(summaries.get(cell)) for cell in tried}
        known = {cell: score for cell, score in scores.items() if score is not None}
        if not known:
            raise SettingsError(
                f"--tune: every choice failed for {method}; try others, such as lower "
                "learning rates"
            )
        is_higher = summaries[next(iter(known))]["higher_is_better"]
        wanted = (max if is_higher else min)(known.values())
        best = next(cell for cell, score in known.items() if score == wanted)
        found = tuple((words(cell.tuned), scores[cell]) for cell in tried)
        picks.append(Pick(method, case, best.tuned, found))
    return picks


def _score(summary: Mapping[str, Any] | None) -> float | None:
    if summary is None:
        return None
    found: float | None = summary[f"personal_val_{summary['metric']}"]
    return found


def words(chosen: tuple[tuple[str, Any], ...]) -> str:
    """A choice in words: ``train.lr 0.1, train.epochs 5``."""
    return ", ".join(f"{name} {value}" for name, value in chosen)


def describe(search: Search, picks: Sequence[Pick]) -> str:
    """The search and its result, as JSON."""
    found = {
        "grid": {name: list(values) for name, values in search.grid.items()},
        "rounds": search.rounds,
        "tries_for_each_method": search.num_tries,
        "judged_on": "validation examples, first seed",
        "picks": [
            {
                "method": one.method,
                "case": dict(one.case),
                "picked": dict(one.chosen),
                "scores": dict(one.scores),
                "at_the_edge_of_the_grid": one.at_the_edge(search.grid),
            }
            for one in picks
        ],
    }
    return json.dumps(found, indent=2) + "\n"
