"""A model's neuron table for people: its groups, and what is active at each p."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from fedspu.neurons.choose import choose_ordered
from fedspu.neurons.table import Neurons
from fedspu.reports.tables import rich_table
from fedspu.units import percent, size


def active_counts(neurons: Neurons, shares: Sequence[float]) -> list[dict[str, Any]]:
    """How many entries are active, and so travel, at each p."""
    total = neurons.num_entries()
    counts = []
    for p in shares:
        active = neurons.num_entries(choose_ordered(neurons, p))
        counts.append({"p": p, "entries": active, "share": active / total})
    return counts


def neuron_tables(neurons: Neurons, counts: Sequence[dict[str, Any]]) -> list[Any]:
    """What ``fedspu neurons`` prints."""
    groups = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("group", "neurons", "kind", "slim", "lies along"):
        groups.add_column(title, justify="right" if title == "neurons" else "left")
    for group in neurons.groups:
        groups.add_row(*group.in_words())
    rows = [
        {
            "p": f"{count['p']:g}",
            "active entries": f"{count['entries']:,}",
            "of all": percent(count["share"]),
            "as float32": size(4 * count["entries"]),
        }
        for count in counts
    ]
    return [groups, *neurons.remarks(), rich_table(rows)]
