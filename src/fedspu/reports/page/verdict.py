"""What runs say, in plain sentences: the first thing in a report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedspu.reports.comparison.blocks import heading, value
from fedspu.reports.comparison.statistics import Case, Row
from fedspu.units import duration, percent, shown, size, titled


@dataclass(frozen=True)
class Tile:
    """One number, large."""

    value: str
    what: str
    more: str = ""


def headline(cases: Sequence[Case]) -> str:
    """The whole report in a sentence."""
    if not cases:
        return "No run has finished yet"
    if len(cases) == 1:
        return _headline(cases[0])
    wins: dict[str, int] = {}
    for case in cases:
        wins[case.best.method] = wins.get(case.best.method, 0) + 1
    method = max(wins, key=lambda name: wins[name])
    if wins[method] == len(cases):
        every = "both" if len(cases) == 2 else f"all {len(cases)}"
        return f"{method} has the best mean in {every} cases"
    return f"{method} has the best mean in {wins[method]} of {len(cases)} cases"


def _headline(case: Case) -> str:
    best = case.best.method
    score = shown(case.best.personal.mean, case.is_share)
    what = f"{score} personal {titled(case.metric)}"
    if len(case.rows) == 1:
        return f"{best} reaches {what}"
    if case.num_seeds < 2:
        return f"{best} is ahead with {what}, of one seed"
    if even := _even(case):
        return f"{best} is ahead, but {_and(even)} cannot be told from it"
    return f"{best} does best: {what}"


def sentences(case: Case) -> Iterator[str]:
    """What to know about a case besides its headline."""
    best = case.best
    behind = [row for row in case.rows if row.gap is not None and row.gap.is_clear]
    if behind:
        listed = [f"{row.method} by {_gap(case, row)}" for row in behind]
        yield f"Clearly behind {best.method}, on the same clients: {_and(listed)}."
    even = [row for row in case.rows if row.gap and row.gap.is_clear is False]
    if even:
        listed = [f"{row.method} ({_gap(case, row)} behind)" for row in even]
        yield (
            f"No clear difference from {best.method} with {case.num_seeds} seeds: "
            f"{_and(listed)}. More seeds might tell."
        )
    if case.num_seeds < 2 and len(case.rows) > 1:
        yield (
            "One seed cannot tell a difference from chance: compare with at least "
            "three, as in --seeds 0,1,2."
        )
    yield from _server(case, best)
    if best.worst_tenth is not None:
        yield (
            f"With {best.method}, the tenth of clients that fare worst has "
            f"{shown(best.worst_tenth.mean, case.is_share)} on average."
        )


def _server(case: Case, best: Row) -> Iterator[str]:
    """How the server's one model does beside clients' own."""
    if best.global_ is None:
        return
    ours, theirs = best.personal, best.global_
    is_better = (ours.mean > theirs.mean) == case.higher_is_better
    score = f"{value(theirs, case.is_share)}{' %' if case.is_share else ''}"
    far = abs(ours.mean - theirs.mean)
    if ours.half is None or theirs.half is None:
        yield (
            f"The server's single model has {score} on the same examples; one seed "
            "cannot tell whether clients' own models are better."
        )
    elif far < ours.half + theirs.half:
        yield (
            f"The server's single model has {score} on the same examples: with "
            f"{case.num_seeds} seeds, no clear difference from clients' own models."
        )
    elif is_better:
        yield (
            f"Clients' own models do better than the server's single model, which has "
            f"{score} on the same examples."
        )
    else:
        yield (
            f"The server's single model does better than clients' own: {score} on the "
            "same examples."
        )


def tiles(case: Case) -> Iterator[Tile]:
    """The numbers of the best method."""
    best, share = case.best, case.is_share
    what = f"personal {titled(case.metric)}"
    half = best.personal.half
    spread = "" if half is None else f"± {_points(half, share)}, 95 % interval"
    yield Tile(shown(best.personal.mean, share), what, spread)
    rivals = [row for row in case.rows if row.gap is not None]
    if rivals:
        near = min(rivals, key=lambda row: abs(row.gap.estimate.mean if row.gap else 0))
        gap = near.gap.estimate if near.gap else best.personal
        about = "" if gap.half is None else f"± {_points(gap.half, share)}; "
        yield Tile(
            _signed(-gap.mean, share),
            f"against {near.method}",
            f"{about}the next best, on the same clients",
        )
    if best.worst_tenth is not None:
        yield Tile(
            shown(best.worst_tenth.mean, share), "worst tenth", "of its clients, mean"
        )
    sent = best.num_bytes.mean
    yield Tile(
        size(sent) if sent else "nothing",
        "exchanged",
        f"in {best.rounds.mean:.0f} rounds, both ways",
    )
    if best.step_bytes:
        steps = {float(p): n for p, n in best.step_bytes.items()}
        low, most = min(steps), max(steps.values())
        yield Tile(
            size(steps[low]),
            f"memory at p = {low:g}",
            f"of a training step; {percent(steps[low] / most)} of the largest",
        )
    else:
        yield Tile(
            duration(best.cpu_seconds.mean), "CPU time", "of clients' training, in all"
        )


def _gap(case: Case, row: Row) -> str:
    assert row.gap is not None
    estimate = row.gap.estimate
    far = _points(abs(estimate.mean), case.is_share)
    half = (
        "" if estimate.half is None else f" ± {_points(estimate.half, case.is_share)}"
    )
    return f"{far}{half} points" if case.is_share else f"{far}{half}"


def _points(found: float, is_share: bool) -> str:
    return f"{100 * found:.1f}" if is_share else f"{found:.3g}"


def _signed(found: float, is_share: bool) -> str:
    return f"{100 * found:+.1f} points" if is_share else f"{found:+.3g}"


def _even(case: Case) -> list[str]:
    return [row.method for row in case.rows if row.gap and row.gap.is_clear is False]


def _and(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def title(cases: Sequence[Case]) -> str:
    """The name of the page."""
    if not cases:
        return "fedspu report"
    if len(cases) == 1:
        return f"fedspu report: {heading(cases[0])}"
    return f"fedspu report: {len(cases)} cases"
