"""What a device can train, as a table and in words."""

from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from fedspu.profile.device import Limits, Proposal, TurnCosts
from fedspu.units import digits, size


def device_table(found: Proposal, limits: Limits) -> Table:
    """One line for each p that was measured."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for title in ("p", "step memory", "seconds per turn", "fits"):
        table.add_column(title, justify="left" if title == "fits" else "right")
    for row in found.rows:
        over = row.limited_by(limits)
        answer = f"no: {' and '.join(over)}" if over else "yes"
        if row.p == found.capacity:
            answer += "  <- proposed"
        table.add_row(f"{row.p:g}", size(row.num_bytes), digits(row.seconds, 3), answer)
    return table


def what_limits(found: Proposal, limits: Limits) -> str:
    """In words: what is proposed, and what keeps it from being more."""
    if found.capacity is None:
        least = found.rows[0]
        return f"No p fits, not even {least.p:g}: {_too_much(least, limits)}."
    if found.capacity == 1:
        return "p = 1 fits: this device can train the whole model."
    above = found.next_larger
    if above is None:
        return f"p = {found.capacity:g} fits, the largest of --p."
    return (
        f"p = {found.capacity:g} is the largest that fits; p = {above.p:g} is too "
        f"much: {_too_much(above, limits)}."
    )


def _too_much(row: TurnCosts, limits: Limits) -> str:
    over = row.limited_by(limits)
    words = []
    if "memory" in over and limits.num_bytes is not None:
        words.append(
            f"a step needs {size(row.num_bytes)} of memory, and may use "
            f"{size(limits.num_bytes)}"
        )
    if "time" in over and limits.seconds is not None:
        words.append(
            f"a turn takes {digits(row.seconds, 3)} s, and may take "
            f"{limits.seconds:g} s"
        )
    return "; ".join(words)


def as_json(found: Proposal, limits: Limits) -> dict[str, Any]:
    """Everything that was measured, in bytes and seconds."""
    return {
        "capacity": found.capacity,
        "limits": asdict(limits),
        "examples": found.num_examples,
        "steps_per_turn": found.num_steps,
        "rows": [
            {**asdict(row), "limited_by": list(row.limited_by(limits))}
            for row in found.rows
        ],
    }
