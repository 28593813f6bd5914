"""Tables of runs, for a terminal and for a file."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from fedspu.reports.intervals import mean, mean_shown
from fedspu.units import duration, paper_gb, percent, shown, size, titled


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
        f"{exchanged:,} bytes, {paper_gb(exchanged)} of the paper's GB; "
        f"positions {size(summary['index_bytes'])}, first model "
        f"{size(summary['bytes_initial'])}",
    )
    table.add_row(
        "training time",
        duration(summary["train_seconds"]),
        f"all clients; {duration(summary['critical_seconds'])} if each had "
        "its own device",
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


def compare_rows(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One row for each method and alpha, averaged over seeds, in the order given."""
    cells: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for summary in summaries:
        method = summary.get("label", summary["method"])
        cells.setdefault((method, summary["alpha"]), []).append(summary)
    first = next(iter(cells))[0]
    return [
        _compare_row(method, alpha, runs, first, cells.get((first, alpha), runs))
        for (method, alpha), runs in cells.items()
    ]


def _compare_row(
    method: str,
    alpha: float,
    runs: Sequence[Mapping[str, Any]],
    first: str,
    others: Sequence[Mapping[str, Any]],
) -> dict[str, str]:
    metric, is_share = runs[0]["metric"], runs[0]["is_share"]
    lower = "" if runs[0]["higher_is_better"] else " (lower is better)"
    exchanged = [run["bytes_down"] + run["bytes_up"] for run in runs]
    return {
        "method": method,
        "alpha": f"{alpha:g}",
        "seeds": str(len(runs)),
        **{
            f"{whose} {titled(metric)}{lower}": mean_shown(
                [run[f"{whose}_{metric}"] for run in runs], is_share
            )
            for whose in ("personal", "global")
        },
        f"against {first}": "-" if runs is others else _gap(runs, others),
        "exchanged": size(mean(exchanged)),
        "training time": duration(mean([run["train_seconds"] for run in runs])),
        "peak memory": size(max(run["peak_rss_bytes"] for run in runs)),
    }


def _gap(runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> str:
    """How far the personal models of runs are above those of others, seed by seed.

    Runs of one seed have the same clients and splits, so differences vary less than
    scores do.
    """
    name = f"personal_{runs[0]['metric']}"
    theirs = {run["seed"]: run[name] for run in others}
    gaps = [run[name] - theirs[run["seed"]] for run in runs if run["seed"] in theirs]
    return mean_shown(gaps, runs[0]["is_share"])


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


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows as a Markdown table."""
    lines = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *(list(row.values()) for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
