"""Settings, environment and run folders, as tables of a report."""

from collections.abc import Iterable, Mapping
from typing import Any

from fedspu.reports.page.chart import Table
from fedspu.reports.page.facts import PageFacts, PlayedRun
from fedspu.settings import SAME_BITS
from fedspu.units import duration, shown, size

MOST_VALUES = 6


def settings_table(facts: PageFacts) -> Table:
    """Every setting; where runs differ, by method if that explains it."""
    runs = [run for found in facts.cases for run in found.runs]
    names = sorted({name for run in runs for name in run.settings} - SAME_BITS)
    return Table(
        ("setting", "value"), tuple((name, _values(name, runs)) for name in names)
    )


def _values(name: str, runs: Iterable[PlayedRun]) -> str:
    by_method: dict[str, list[str]] = {}
    for run in runs:
        text = written(run.settings.get(name))
        listed = by_method.setdefault(run.method, [])
        if text not in listed:
            listed.append(text)
    each = {
        method: ", ".join(listed[:MOST_VALUES]) for method, listed in by_method.items()
    }
    if len(set(each.values())) == 1:
        return next(iter(each.values()))
    return "; ".join(f"{method}: {text}" for method, text in each.items())


def written(value: Any) -> str:
    """A setting's value as people write it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(written, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else _shortened(str(value))


LONGEST_PATH = 40


def _shortened(text: str) -> str:
    """A long path by its end; the run's settings.toml has the whole."""
    parts = text.split("/")
    if len(text) <= LONGEST_PATH or len(parts) < 4:
        return text
    kind = f"{parts[0]}" if parts[0].endswith(":") else ""  # arrays:
    return f"{kind}…/{'/'.join(parts[-2:])}"


def environment_table(facts: PageFacts) -> Table:
    """Versions and machines of all runs; other machines have other times."""
    found: dict[str, list[str]] = {}
    for run in (run for found in facts.cases for run in found.runs):
        given = run.summary.get("environment")
        known: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        more = {"kernels": run.summary.get("kernels"), "engine": run.settings["engine"]}
        for name, value in {**known, **more}.items():
            listed = found.setdefault(str(name), [])
            if (text := written(value)) not in listed:
                listed.append(text)
    rows = tuple((name, "; ".join(listed)) for name, listed in found.items())
    return Table(("what", "version or kind"), rows)


def run_table(facts: PageFacts) -> Table:
    """Every run: where it is, and what came of it."""
    rows = []
    for found in facts.cases:
        metric, share = found.case.metric, found.case.is_share
        for run in found.runs:
            summary = run.summary
            rows.append(
                (
                    run.path,
                    run.method,
                    str(run.seed),
                    str(summary["rounds_played"]),
                    shown(summary[f"personal_{metric}"], share),
                    shown(summary[f"global_{metric}"], share),
                    size(summary["bytes_down"] + summary["bytes_up"]),
                    duration(summary["wall_seconds"]),
                )
            )
    titles = ("run", "method", "seed", "rounds", "personal", "global", "exchanged")
    return Table((*titles, "took"), tuple(rows))
