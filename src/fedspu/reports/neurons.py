"""A model's neuron table for people: its groups, and what is active at each p."""

from collections.abc import Sequence
from math import prod
from typing import Any

from rich import box
from rich.table import Table

from fedspu.neurons.choose import choose_ordered
from fedspu.neurons.mapping import ALONE, ORDINARY, UNGROUPED, UNHEARD, UNPROVED
from fedspu.neurons.table import Neurons
from fedspu.neurons.tracing import BLOCK
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
        justify: Any = "right" if title == "neurons" else "left"
        # A name that is cut is of no use.
        groups.add_column(title, justify=justify, overflow="fold")
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
    return [groups, *explained(neurons), rich_table(rows)]


KINDS = {
    "permutable": "any reordering of these neurons leaves the output unchanged, so "
    "training may also move them where that is faster",
    "aligned": "each of these neurons may change places with a neighbour, but not with "
    "all others; they train and freeze as usual, and keep their places",
}

ADVICE = {
    UNPROVED: "fedspu follows the model wrongly here, or the model treats these "
    "neurons unlike each other. A layer of your own can be taught with "
    "fedspu.register, see docs/models.md",
    UNGROUPED: "no operation was found that makes neurons from them",
    UNHEARD: "nothing, or remove them from the model: they never learn anything",
    ALONE: "nothing: a single neuron cannot be frozen while others train",
    BLOCK: "nothing, unless the block is made of several equal parts: then teach it "
    "with fedspu.register",
}
ORDERED = (
    "nothing, if that is what the model means. If the layer treats its neurons alike, "
    "teach it with fedspu.register, see docs/models.md"
)


def explained(neurons: Neurons) -> list[str]:
    """What the table means, what is always active and why, and what to do about it."""
    lines = [
        f"{kind}: {meaning}."
        for kind, meaning in KINDS.items()
        if any(group.in_words()[2] == kind for group in neurons.groups)
    ]
    if any(not group.slim for group in neurons.groups):
        lines.append(
            "slim = no: a smaller copy of the model keeps these neurons, because the "
            "model stores their number somewhere. Training is not affected."
        )
    if any(group.padded for group in neurons.groups):
        lines.append(
            "slim = padded: a smaller copy of the model stores and sends the kept "
            "neurons alone, but computes with zeros in place of the others, because "
            "their number cannot be changed in the model's code."
        )
    total = neurons.num_entries()
    for fixed in sorted(neurons.fixed, key=lambda f: f.reason in ORDINARY):
        names = ", ".join(fixed.tensors[:4])
        more = f" and {len(fixed.tensors) - 4} more" if len(fixed.tensors) > 4 else ""
        line = f"always active: neurons of {names}{more}, because {fixed.reason}."
        if fixed.reason not in ORDINARY:
            entries = sum(prod(neurons.shapes.get(n, (0,))) for n in fixed.tensors)
            line += (
                f" They hold up to {percent(entries / total)} of all entries. "
                f"What you can do: {ADVICE.get(fixed.reason, ORDERED)}."
            )
        lines.append(line)
    if neurons.unreached:
        lines.append(
            f"not reached by the example: {', '.join(neurons.unreached)}. They are "
            "always active, and all neurons keep their places. What you can do: give "
            "an example input that uses them, or remove them from the model."
        )
    return lines
