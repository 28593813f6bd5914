"""Tables of one run, for a terminal."""

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from fedspu.units import duration, percent, shown, size, titled


def run_table(summary: Mapping[str, Any]) -> Table:
    """The result of one run: how well it did, and what it cost."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")

    metric, is_share = summary["metric"], summary["is_share"]
    lower = "" if summary["higher_is_better"] else "; lower is better"
    table.add_row(
        f"personal {titled(metric)}",
        shown(summary[f"personal_{metric}"], is_share),
        f"mean over clients, each on its own test examples{lower}",
    )
    for p, score in summary[f"personal_{metric}_by_capacity"].items():
        table.add_row(f"  clients with p = {p}", shown(score, is_share))
    table.add_row(
        "  clients that took part",
        shown(summary[f"participating_{metric}"], is_share),
        f"{summary['participating_clients']} clients",
    )
    if summary[f"global_{metric}"] is not None:
        table.add_row(
            f"global {titled(metric)}",
            shown(summary[f"global_{metric}"], is_share),
            "the server's model on the same examples",
        )
    exchanged = summary["bytes_down"] + summary["bytes_up"]
    table.add_row(
        "exchanged",
        size(exchanged),
        f"{exchanged:,} bytes of weights, both ways; besides them "
        f"{size(summary['index_bytes'])} that say which neurons, and "
        f"{size(summary['bytes_initial'])} of first models",
    )
    cpu = duration(summary["train_cpu_seconds"])
    table.add_row(
        "training time",
        duration(summary["train_seconds"]),
        f"by the clock, all clients added up ({cpu} of CPU time); "
        f"{duration(summary['critical_seconds'])} if each had its own device",
    )
    if "finish_bytes_down" in summary:
        table.add_row(
            "last models",
            size(summary["finish_bytes_down"]),
            "of the server's model, sent to all clients once; "
            f"{duration(summary['finish_train_cpu_seconds'])} of CPU time to train it; "
            "both are besides the above",
        )
    stopped = summary["stopped_clients"]
    rounds = str(summary["rounds_played"])
    table.add_row(
        "rounds", rounds, f"{stopped} clients stopped early" if stopped else ""
    )
    missing, refused = summary["missing_turns"], summary["refused_turns"]
    if missing or refused:
        table.add_row(
            "turns lost",
            str(missing + refused),
            f"{missing} missing, {refused} refused; rounds.jsonl says why",
        )
    if "epsilon" in summary:
        table.add_row(
            "epsilon",
            f"{summary['epsilon']:.2f}",
            f"at delta = {summary['delta']:g}, for each client: none took part more "
            f"than {summary['most_turns']} times; docs/security.md says what it means",
        )
    elif "guard" in summary:
        table.add_row("guard", summary["guard"], "against hostile clients")
    if beyond := summary.get("beyond_paper"):
        given = (f"{name} = {dumps(value)}" for name, value in beyond.items())
        table.add_row("beyond the paper", "", ", ".join(given))
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
    "training": "clients' turns, per worker",
    "judging": "judging",
    "server": "choosing, sending, averaging",
    "other": "records, files, display",
    "clients": "",
}
WAITING = "workers waiting, messages"


def rich_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Rows as a table for a terminal."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in rows[0]:
        has_numbers = any(row[title][:1].isdigit() for row in rows)
        is_number = has_numbers or any(row[title].startswith("-") for row in rows)
        table.add_column(title, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    return table
