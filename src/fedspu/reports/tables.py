"""Tables of runs, for a terminal and for a file."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from fedspu.reports.intervals import mean, mean_percent
from fedspu.units import duration, paper_gb, percent, size


def run_table(summary: Mapping[str, Any]) -> Table:
    """The end of one run: how well it did, and what it cost."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")

    table.add_row(
        "personal accuracy",
        percent(summary["personal_accuracy"]),
        "mean over clients, each on its own test examples",
    )
    for p, accuracy in summary["personal_accuracy_by_capacity"].items():
        table.add_row(f"  clients with p = {p}", percent(accuracy))
    table.add_row(
        "  took part at all",
        percent(summary["participating_accuracy"]),
        f"{summary['participating_clients']} clients",
    )
    if summary["global_accuracy"] is not None:
        table.add_row(
            "global accuracy",
            percent(summary["global_accuracy"]),
            "the server's model on the same examples",
        )
    exchanged = summary["bytes_down"] + summary["bytes_up"]
    table.add_row(
        "exchanged",
        size(exchanged),
        f"{exchanged:,} bytes, {paper_gb(exchanged)} of the paper's GB; "
        f"positions {size(summary['index_bytes'])}, first model "
        f"{size(summary['bytes_initial'])}",
    )
    table.add_row(
        "training time",
        duration(summary["train_seconds"]),
        f"all clients; {duration(summary['critical_seconds'])} if each had a device",
    )
    stopped = summary["stopped_clients"]
    rounds = str(summary["rounds_played"])
    table.add_row(
        "rounds", rounds, f"{stopped} clients stopped early" if stopped else ""
    )
    if summary["split"] == "paper":
        table.add_row(
            "note", "", "validation and test examples are the same, as in the paper"
        )
    return table


def time_table(times: Sequence[Mapping[str, Any]], workers: int) -> Table:
    """Where the time of a run went."""
    total = {
        name: sum(line[name] for line in times) for name in (*PHASES, "wall_seconds")
    }
    waiting = total["clients"] - total["training"]
    rows = {**{PHASES[name]: total[name] for name in PHASES}, WAITING: waiting}
    rows.pop(PHASES["clients"])
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(justify="right")
    for title, seconds in rows.items():
        table.add_row(
            title, duration(seconds), percent(seconds / total["wall_seconds"])
        )
    wall = duration(total["wall_seconds"])
    table.add_row(f"all, on {workers} worker{'s' * (workers > 1)}", wall, "")
    return table


PHASES = {
    "training": "clients' turns, by each worker",
    "judging": "judging",
    "server": "choosing, sending, averaging",
    "other": "records, files, display",
    "clients": "",
}
WAITING = "workers waiting, messages"


COMPARED = (
    ("personal accuracy", "personal_accuracy"),
    ("global accuracy", "global_accuracy"),
)


def compare_rows(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One row for each method and alpha, over its seeds; in the order first met."""
    cells: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for summary in summaries:
        method = summary.get("label", summary["method"])
        cells.setdefault((method, summary["alpha"]), []).append(summary)
    first = next(iter(cells))[0]
    rows = []
    for (method, alpha), runs in cells.items():
        exchanged = [run["bytes_down"] + run["bytes_up"] for run in runs]
        rows.append(
            {
                "method": method,
                "alpha": f"{alpha:g}",
                "seeds": str(len(runs)),
                **{
                    title: mean_percent([run[key] for run in runs])
                    for title, key in COMPARED
                },
                f"against {first}": _gap(runs, cells.get((first, alpha), runs)),
                "exchanged": size(mean(exchanged)),
                "training time": duration(mean([run["train_seconds"] for run in runs])),
                "peak memory": size(max(run["peak_rss_bytes"] for run in runs)),
            }
        )
    return rows


def _gap(runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> str:
    """How far runs are ahead of others in personal accuracy, seed by seed.

    Runs of one seed have the same clients and splits, so differences vary less than
    accuracies do.
    """
    theirs = {run["seed"]: run["personal_accuracy"] for run in others}
    gaps = [
        r["personal_accuracy"] - theirs[r["seed"]] for r in runs if r["seed"] in theirs
    ]
    return "-" if runs is others else mean_percent(gaps)


def rich_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Rows as a table for a terminal."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in rows[0]:
        has_numbers = any(row[title][:1].isdigit() for row in rows)
        is_number = has_numbers or any(row[title].startswith("-") for row in rows)
        table.add_column(title, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*row.values())
    return table


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows as a Markdown table."""
    lines = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *(list(row.values()) for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
