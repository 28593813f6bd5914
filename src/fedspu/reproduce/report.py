"""Reproduced tables as text, Markdown and JSON; and what each quirk explains."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedspu.errors import StorageError
from fedspu.files import write_whole
from fedspu.reproduce.experiments import Series
from fedspu.reproduce.printed import DATASETS, Dataset
from fedspu.reproduce.quirks import Quirk, quirk
from fedspu.reproduce.tables import PaperTable, Result, by_alpha


def terminal(table: PaperTable) -> Group:
    """A table for a terminal."""
    shown = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for i, title in enumerate(table.columns):
        shown.add_column(
            escape(title), justify="left" if i < 2 and not title else "right"
        )
    for row in table.rows:
        shown.add_row(*map(escape, row))
    notes = (Text(f"- {note}", style="dim") for note in table.notes)
    return Group(Text(table.title, style="bold"), shown, *notes, Text())


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
