"""Reproduced tables as text, Markdown and JSON; and what each quirk explains."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedspu.errors import StorageError
from fedspu.files import write_whole
from fedspu.reproduce.experiments import Series
from fedspu.reproduce.printed import DATASETS, Dataset
from fedspu.reproduce.quirks import Quirk, quirk
from fedspu.reproduce.tables import PaperTable, Result, by_alpha


def terminal(table: PaperTable, width: int) -> Group:
    """A table for a terminal; one that is too wide is turned, data set by data set."""
    parts: list[RenderableType] = [_drawn(table)]
    if table.columns[:2] == ("", "") and _width(parts[0]) > width:
        parts = [line for part in _turned(table) for line in (_drawn(part), Text())]
    notes = (Text(f"- {note}", style="dim") for note in table.notes)
    return Group(Text(table.title, style="bold"), *parts, *notes, Text())


def _drawn(table: PaperTable) -> Table:
    shown = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for i, title in enumerate(table.columns):
        is_left = i == 0 or (i == 1 and not title)
        shown.add_column(
            escape(title), justify="left" if is_left else "right", overflow="fold"
        )
    for row in table.rows:
        shown.add_row(*map(escape, row))
    return shown


def _width(shown: RenderableType) -> int:
    """How wide it is where nothing is wrapped."""
    console = Console(width=1000)
    return Measurement.get(console, console.options, shown).maximum


def _turned(table: PaperTable) -> Iterator[PaperTable]:
    """One table for each data set, with a row for each method."""
    groups: list[list[tuple[str, ...]]] = []
    for row in table.rows:
        if row[0] or not groups:
            groups.append([])
        groups[-1].append(row)
    for rows in groups:
        heads = (rows[0][0], *(row[1].replace(", ", "\n") for row in rows))
        turned = zip(table.columns[2:], *(row[2:] for row in rows), strict=True)
        yield PaperTable(table.title, heads, tuple(turned), ())


def markdown(table: PaperTable) -> str:
    """A table as Markdown."""
    rules = ["---" if not title else "---:" for title in table.columns]
    lines = [f"## {table.title}", ""]
    lines += [
        f"| {' | '.join(cells)} |" for cells in (table.columns, rules, *table.rows)
    ]
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes), ""])


def write(
    out: Path, tables: Mapping[str, PaperTable], results: Sequence[Result]
) -> None:
    """Write the tables, and the summaries they were made from."""
    texts = {f"{name}.md": markdown(table) for name, table in tables.items()}
    listed = [asdict(result) for result in results]
    texts["results.json"] = json.dumps(listed, indent=1) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(out / name, text.encode(), durable=True)
    except OSError as error:
        raise StorageError(f"{out}: cannot write ({error})") from error


# Quirks -------------------------------------------------------------------------------


def quirks_table(
    played: Sequence[tuple[Series, list[Result]]], what_cut: str
) -> PaperTable:
    """FedSPU with and without each fault of the released code."""
    return PaperTable(
        "Faults of the released code: what each explains",
        ("", "", "without", "with", "difference"),
        tuple(
            _quirk_row(series.dataset, quirk(series.fault, series.dataset), results)
            for series, results in played
        ),
        (
            what_cut,
            "Accuracy of FedSPU in %, mean over alphas; for learning rates, how far "
            "FedSPU is above the best rival.",
        ),
    )


def _quirk_row(
    dataset: Dataset, fault: Quirk, results: Sequence[Result]
) -> tuple[str, ...]:
    without, with_it = (
        _score([r for r in results if r.method in methods], methods)
        for methods in (fault.without_it, fault.with_it)
    )
    return (
        DATASETS[dataset],
        fault.title,
        f"{without:.1f}",
        f"{with_it:.1f}",
        f"{with_it - without:+.1f}",
    )


def _score(results: Sequence[Result], methods: Sequence[str]) -> float:
    """FedSPU's accuracy; beside others, how far it is above the best of them."""
    means = {}
    for method in methods:
        found = [r for r in results if r.method == method]
        each = by_alpha(found, lambda r: 100 * r.summary["personal_accuracy"])
        means[method] = mean(each.values())
    ours = next(m for m in methods if m.startswith("fedspu"))
    rivals = [score for m, score in means.items() if m != ours]
    return means[ours] - max(rivals) if rivals else means[ours]
