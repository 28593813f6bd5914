"""Many runs, one table: what ``fedspu compare`` calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedspu.errors import StorageError
from fedspu.federation.store import read_index
from fedspu.methods import find_method
from fedspu.reports.tables import compare_rows, markdown
from fedspu.settings import flatten, read_toml
from fedspu.simulation import Watch, lay_out, resume, simulate


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    method: str
    alpha: float
    seed: int

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"{self.method}-alpha-{self.alpha:g}-seed-{self.seed}"


def compare(
    given: Mapping[str, Any],
    methods: Sequence[str],
    alphas: Sequence[float],
    seeds: Sequence[int],
    out: Path,
    begin: Callable[[Cell, bool], Watch | None] = lambda cell, is_done: None,
) -> list[dict[str, Any]]:
    """Play what is missing, one run folder each; the summaries of all.

    ``begin`` is told of each run, and whether it is finished already, and returns who
    watches it. Finished runs are read, interrupted ones go on where they were.
    """
    for method in methods:
        find_method(method)
    cells = [Cell(*three) for three in product(methods, alphas, seeds)]
    plans = {cell: _settings(given, cell, out) for cell in cells}
    for cell, settings in plans.items():
        _check_same(out / cell.name, settings)
    summaries = [_play(settings, cell, out, begin) for cell, settings in plans.items()]
    rows = compare_rows(summaries)
    (out / "comparison.md").write_text(markdown(rows), encoding="utf-8")
    text = json.dumps(summaries, indent=2) + "\n"
    (out / "comparison.json").write_text(text, encoding="utf-8")
    return summaries


def _settings(given: Mapping[str, Any], cell: Cell, out: Path) -> dict[str, Any]:
    return {
        **dict(flatten(given)),
        "method.name": cell.method,
        "data.alpha": cell.alpha,
        "seed": cell.seed,
        "out": str(out / cell.name),
    }


def _check_same(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to mix runs of different settings in one comparison."""
    if not (path / "settings.toml").exists():
        return
    before = dict(flatten(read_toml(path / "settings.toml")))
    wanted = dict(flatten(lay_out(settings).settings.model_dump(mode="json")))
    for name in sorted((before.keys() | wanted.keys()) - {"out"}):
        if before.get(name) != wanted.get(name):
            raise StorageError(
                f"{path} was played with {name} = {before.get(name)}, and "
                f"{wanted.get(name)} is asked for now; choose another --out"
            )


def _play(
    settings: Mapping[str, Any],
    cell: Cell,
    out: Path,
    begin: Callable[[Cell, bool], Watch | None],
) -> dict[str, Any]:
    path = out / cell.name
    is_done = (path / "summary.json").exists()
    watch = begin(cell, is_done)
    if is_done:
        summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
        return summary
    if path.exists():
        read_index(path)  # says so if it is not a run folder
        return resume(path, watch=watch).summary
    return simulate(settings, watch=watch).summary
