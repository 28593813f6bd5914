"""What training steps cost, as a table for people and as JSON for scripts."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedspu.neurons.table import Neurons
from fedspu.profile.measure import Budget, Choice, Costs, Profile, StepSetting
from fedspu.units import size


def profile_table(profile: Profile) -> Table:
    """One line for the dense step, then one for each setting."""
    dense = profile.dense
    ms = _Scale(1e3 * dense.seconds)
    unit, num_bytes = unit_of(dense.held.peak)
    mb = _Scale(dense.held.peak / num_bytes)
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for title in ("p", "mode", "saves"):
        table.add_column(title, justify="right" if title == "p" else "left")
    for title in (
        "time\nms",
        "of\ndense",
        "FLOP\nlimit",
        f"held\n{unit}",
        "\nsaved",
        f"peak\n{unit}",
        "\nsaved",
        f"paper\n{unit}",
    ):
        table.add_column(title, justify="right")

    def show(costs: Costs) -> tuple[str, ...]:
        return (
            ms.show(1e3 * costs.seconds),
            f"{costs.seconds / dense.seconds:.2f}",
            "-" if costs.flop_limit is None else f"{costs.flop_limit:.2f}",
            mb.show(costs.held.total / num_bytes),
            _saved(costs.held.total, dense.held.total),
            mb.show(costs.held.peak / num_bytes),
            _saved(costs.held.peak, dense.held.peak),
            mb.show(costs.paper_bytes / num_bytes),
        )

    table.add_row("dense", "", "", *show(dense))
    way = ""
    for row in profile.rows:
        if row.setting.way != way:
            table.add_section()
        way = row.setting.way
        table.add_row(
            f"{row.setting.p:g}", row.setting.mode, row.setting.saves, *show(row)
        )
    return table


class _Scale:
    """Shows numbers with as many decimals as give the largest one three digits."""

    def __init__(self, largest: float) -> None:
        self.decimals = 2 if largest < 10 else 1 if largest < 100 else 0

    def show(self, number: float) -> str:
        return f"{number:.{self.decimals}f}"


def unit_of(num_bytes: float) -> tuple[str, float]:
    """The unit that suits a number of bytes, and how many bytes it is."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next((unit for unit in units if num_bytes >= unit[1]), ("B", 1.0))


def _saved(part: float, whole: float) -> str:
    return f"{100 * (1 - part / whole):.0f} %"


def how_measured(profile: Profile) -> str:
    """What was done to get the times."""
    return (
        f"median {clock_of(profile)} of {profile.repetitions} x {profile.steps} steps, "
        "all settings in turn; plain SGD"
    )


def clock_of(profile: Profile) -> str:
    """What kind of time was measured."""
    return "CPU time" if profile.clock == "cpu" else "wall time"


LEGEND = {
    "of dense": "against plain PyTorch's step in the same run",
    "FLOP limit": "the same, if only multiplications took time",
    "held": "weights, gradients, and what is saved for the backward pass",
    "peak": "the most that is alive at any moment, temporary tensors included",
    "paper": "its formula: weights; gradients and activations of active neurons",
}


def notes(profile: Profile, neurons: Neurons, budget: Budget | None) -> list[str]:
    """What is printed below the table."""
    lines = [f"{word:<11} {meaning}" for word, meaning in LEGEND.items()]
    lines += costly_lines(profile)
    lines += path_lines(profile, neurons)
    if budget is not None:
        lines += ["", *choice_lines(profile.choices, budget), how_found(budget)]
    return lines


def costly_lines(profile: Profile) -> list[str]:
    """Why some steps cost more than the dense one, if any does."""
    dense = profile.dense
    costly = [
        row
        for row in profile.rows
        if row.seconds > dense.seconds or row.held.peak > dense.held.peak
    ]
    if not costly:
        return []
    return [
        "",
        "Some rows cost more than dense: there, keeping the active part apart costs "
        "more than freezing saves.",
        "This is usual near p = 1, in small models, and where little can be frozen; "
        "larger batches help.",
    ]


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Says what is going on: on a terminal in one line, elsewhere a line for each part.

    It is redrawn only when called: a thread that redraws it would distort the times.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _say_parts()
        return
    with Live("", console=console, auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(text, refresh=True)


def _say_parts() -> Callable[[str], None]:
    """Prints what is going on, but no repetitions."""
    said: set[str] = set()

    def say(text: str) -> None:
        part = re.sub(r": repetition \d.*", " …", text)
        if part not in said:
            print(part, file=sys.stderr, flush=True)  # noqa: T201  # the display
        said.add(part)

    return say


# How gradients were computed ----------------------------------------------------------

PATHS = {
    "native": "by compiled code",
    "chain": "by the fast path for small chains",
    "block": "only for the active block",
    "full": "in full, then cut down (small, little frozen, or without a kernel)",
    "whole": "in full, with neurons that are never frozen",
    "unused": "not at all",
}


def path_lines(profile: Profile, neurons: Neurons) -> list[str]:
    """How many gradients were computed in which way; names for all but fast ways."""
    fixed = {name: entry.reason for entry in neurons.fixed for name in entry.tensors}
    ways: dict[tuple[tuple[str, str], ...], list[StepSetting]] = {}
    for row in profile.rows:
        if row.setting.p < 1:
            ways.setdefault(tuple(row.paths.items()), []).append(row.setting)
    lines = ["", "Compiled code ran all steps."]
    if profile.why_not_native is not None:
        lines[-1] = (
            "PyTorch ran all steps (but perhaps norms), as compiled code has no "
            f"counterpart for a part of the model: {profile.why_not_native}."
        )
    for taken, settings in ways.items():
        lines += ["", f"How gradients were computed, {_settings(settings)}:"]
        for path, meaning in PATHS.items():
            names = [name for name, way in taken if way == path]
            line = f"{len(names):>4} {meaning}"
            if path not in ("native", "chain", "block"):
                line += f": {_few(names)}"
            reasons = dict.fromkeys(fixed[n] for n in names if n in fixed)
            if path == "whole" and reasons:
                line += f" ({', '.join(reasons)})"
            lines += [line] if names else []
    return lines


def _settings(settings: Sequence[StepSetting]) -> str:
    """Settings in words: each way with its p, or p once if all ways have the same."""
    ways: dict[str, list[str]] = {}
    for setting in settings:
        ways.setdefault(setting.way, []).append(f"{setting.p:g}")
    shares = {way: f"p = {', '.join(listed)}" for way, listed in ways.items()}
    if len(set(shares.values())) == 1:
        return f"{', '.join(shares)}, {next(iter(shares.values()))}"
    return "; ".join(f"{way}, {listed}" for way, listed in shares.items())


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# The largest p ------------------------------------------------------------------------


def choice_lines(choices: Iterable[Choice], budget: Budget) -> list[str]:
    """The largest p that fits the budget, in each mode."""
    limits = []
    if budget.num_bytes is not None:
        limits.append(size(budget.num_bytes))
    if budget.seconds is not None:
        limits.append(_time(budget.seconds))
    wanted = " and ".join(limits)
    return [_choice_line(choice, wanted) for choice in choices]


def _choice_line(choice: Choice, wanted: str) -> str:
    setting = choice.setting
    costs = f"peak {size(choice.peak)}"
    if choice.seconds is not None:
        costs += f", {_time(choice.seconds)}"
    way, p = setting.way, f"p = {setting.p:g}"
    if not choice.fits:
        return f"{way}: no p fits {wanted}, not even {p} ({costs})"
    if setting.p == 1:
        return f"{way}: {p} fits {wanted}; nothing needs to be frozen ({costs})"
    return f"{way}: {p} is the largest that fits {wanted} ({costs})"


def how_found(budget: Budget) -> str:
    """How the largest p was found."""
    if budget.seconds is None:
        return "Found to within 0.01; every p that was tried was measured."
    return (
        "Found to within 0.05; every p that was tried was measured. Times vary from "
        "run to run, so leave some room."
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


# For scripts --------------------------------------------------------------------------


def as_json(profile: Profile, budget: Budget | None) -> dict[str, Any]:
    """Everything that was measured, in bytes and seconds."""
    return {
        "clock": profile.clock,
        "steps": profile.steps,
        "repetitions": profile.repetitions,
        "why_not_native": profile.why_not_native,
        "dense": _costs(profile.dense),
        "rows": [
            {
                **asdict(row.setting),
                "time_ratio": row.seconds / profile.dense.seconds,
                **_costs(row),
                "paths": row.paths,
            }
            for row in profile.rows
        ],
        "budget": None if budget is None else asdict(budget),
        "choices": [
            {
                **asdict(choice.setting),
                "fits": choice.fits,
                "peak_bytes": choice.peak,
                "seconds": choice.seconds,
            }
            for choice in profile.choices
        ],
    }


def _costs(costs: Costs) -> dict[str, Any]:
    return {
        "seconds": costs.seconds,
        "flop_limit": costs.flop_limit,
        "bytes": {**asdict(costs.held), "held": costs.held.total},
        "paper_bytes": costs.paper_bytes,
    }
