"""What methods cost: memory and time by capacity, and the metric against cost."""

from collections.abc import Callable, Iterator
from statistics import median

from fedspu.reports.comparison.blocks import value
from fedspu.reports.comparison.statistics import Case, Row
from fedspu.reports.page.chart import (
    Axis,
    Chart,
    Mark,
    Point,
    Section,
    Series,
    Show,
    Table,
    bytes_up_to,
    seconds_up_to,
)
from fedspu.reports.page.facts import CaseFacts, PlayedRun
from fedspu.units import digits, duration, size, titled

Cost = Callable[[Row], float | None]


def by_capacity(facts: CaseFacts, slots: dict[str, int]) -> Section | None:
    """Memory of a step and CPU time of an example, by p; None if neither is known."""
    memory = {row.method: _floats(row.step_bytes) for row in facts.case.rows}
    times = {m: seconds_by_capacity(facts.of(m)) for m in facts.methods}
    pictures = []
    if any(memory.values()):
        pictures.append(
            _lines(
                "memory-by-p",
                "Memory of a training step",
                "The most that one step holds on a device, as fedspu profile measures "
                "it.",
                "memory",
                size,
                bytes_up_to,
                memory,
                slots,
            )
        )
    if any(times.values()):
        pictures.append(
            _lines(
                "time-by-p",
                "CPU time of training",
                "Per thousand examples that a client passes over; the median turn.",
                "CPU time per 1,000 examples",
                _span,
                seconds_up_to,
                {m: {p: 1000 * s for p, s in t.items()} for m, t in times.items()},
                slots,
            )
        )
    if not pictures:
        return None
    rows = [
        (
            method,
            f"{p:g}",
            size(memory[method][p]) if p in memory[method] else "-",
            _span(1000 * times[method][p]) if p in times[method] else "-",
        )
        for method in facts.methods
        for p in sorted({*memory[method], *times[method]})
    ]
    chooses = [row.method for row in facts.case.rows if row.chooses and row.step_bytes]
    note = (
        f"Before that, clients of {', '.join(chooses)} train the whole model once, to "
        "choose their neurons, and need the memory of p = 1."
        if chooses
        else ""
    )
    return Section(
        "What it costs a device",
        "By capacity p: the share of neurons that a client trains.",
        tuple(pictures),
        Table(
            ("method", "p", "memory of a step", "CPU time per 1,000 examples"),
            tuple(rows),
            note,
        ),
    )


def seconds_by_capacity(runs: list[PlayedRun]) -> dict[float, float]:
    """CPU seconds of an example that a client passes over, by p: the median turn's."""
    found: dict[float, list[float]] = {}
    for run in runs:
        times = {int(line["round"]): line.get("turn_cpu_seconds") for line in run.times}
        epochs = float(run.settings.get("train.epochs") or 1)
        for turn in run.turns:
            seconds = (times.get(int(turn["round"])) or {}).get(str(turn["client"]))
            if seconds is not None and turn["num_examples"]:
                each = float(seconds) / (epochs * turn["num_examples"])
                found.setdefault(float(turn["capacity"]), []).append(each)
    return {p: median(found[p]) for p in sorted(found)}


def _floats(found: dict[str, int]) -> dict[float, float]:
    return {float(p): float(n) for p, n in found.items()}


def _span(seconds: float) -> str:
    if seconds >= 1:
        return duration(seconds)
    return f"{digits(1e3 * seconds, 3)} ms" if seconds else "0"


def _lines(
    name: str,
    title: str,
    about: str,
    what: str,
    show: Show,
    axis: Callable[[float], Show],
    found: dict[str, dict[float, float]],
    slots: dict[str, int],
) -> Chart:
    most = max(v for values in found.values() for v in values.values())
    return Chart(
        name=name,
        title=title,
        about=about,
        x=Axis("capacity p", lambda v: f"{v:g}", from_zero=True),
        y=Axis(what, axis(most), from_zero=True),
        series=tuple(
            Series(
                method,
                slots[method],
                tuple(
                    Mark(p, v, f"{method}, p = {p:g}: {show(v)}")
                    for p, v in sorted(values.items())
                ),
                line=tuple(sorted(values.items())),
            )
            for method, values in found.items()
            if values
        ),
    )


# The metric against cost --------------------------------------------------------------


def trade_offs(facts: CaseFacts, slots: dict[str, int]) -> Section | None:
    """The metric against bytes, CPU time and memory; None for a single method."""
    if len(facts.case.rows) < 2:
        return None
    ways: list[tuple[str, str, str, Cost, Show, Callable[[float], Show]]] = [
        (
            *("bytes", "Against bytes", "exchanged, both ways"),
            lambda row: row.num_bytes.mean,
            size,
            bytes_up_to,
        ),
        (
            *("cpu", "Against CPU time", "CPU time of clients' training"),
            lambda row: row.cpu_seconds.mean,
            duration,
            seconds_up_to,
        ),
        (
            *("memory", "Against memory", "memory of a step at the lowest p"),
            _lowest_memory,
            size,
            bytes_up_to,
        ),
    ]
    charts = tuple(
        _trade_off(facts, slots, name, title, what, cost, show, axis)
        for name, title, what, cost, show, axis in ways
        if sum(cost(row) is not None for row in facts.case.rows) > 1
    )
    rows = tuple(
        (
            row.method,
            value(row.personal, facts.case.is_share),
            size(row.num_bytes.mean),
            duration(row.cpu_seconds.mean),
            "-" if (found := _lowest_memory(row)) is None else size(found),
        )
        for row in facts.case.rows
    )
    return Section(
        f"{titled(facts.case.metric).capitalize()} against cost",
        "Better is higher, and cheaper is further left. The dashed line joins methods "
        "that no other beats on both."
        if facts.case.higher_is_better
        else "Better is lower, and cheaper is further left. The dashed line joins "
        "methods that no other beats on both.",
        charts,
        Table(
            (
                *("method", f"personal {facts.metric}", "exchanged", "CPU time"),
                "memory of a step at the lowest p",
            ),
            rows,
        ),
    )


def _lowest_memory(row: Row) -> float | None:
    if not row.step_bytes:
        return None
    steps = _floats(row.step_bytes)
    # Who chooses by training the whole model needs room for that.
    return max(steps.values()) if row.chooses else steps[min(steps)]


def _trade_off(
    facts: CaseFacts,
    slots: dict[str, int],
    name: str,
    title: str,
    what: str,
    cost: Cost,
    show: Show,
    axis: Callable[[float], Show],
) -> Chart:
    points = {
        row.method: (float(found), row.personal.mean)
        for row in facts.case.rows
        if (found := cost(row)) is not None
    }
    best = front(list(points.values()), facts.case.higher_is_better)
    names = [method for method, point in points.items() if point in best]
    return Chart(
        name=f"score-against-{name}",
        title=title,
        about=f"Not beaten on both: {', '.join(names)}.",
        x=Axis(what, axis(max(x for x, _ in points.values())), from_zero=True),
        y=Axis(f"personal {facts.metric}", facts.tick),
        series=tuple(
            Series(
                row.method,
                slots[row.method],
                (
                    Mark(
                        *points[row.method],
                        f"{row.method}: {_value(facts.case, row)}, "
                        f"{show(points[row.method][0])}",
                        ends=_ends(facts.case, row),
                    ),
                ),
            )
            for row in facts.case.rows
            if row.method in points
        ),
        front=tuple(best),
        is_small=True,
    )


def _ends(case: Case, row: Row) -> Point | None:
    """The interval of a mean; that of a share is drawn as far as shares go."""
    if row.personal.half is None:
        return None
    low = row.personal.mean - row.personal.half
    high = row.personal.mean + row.personal.half
    return (max(0.0, low), min(1.0, high)) if case.is_share else (low, high)


def _value(case: Case, row: Row) -> str:
    return f"{value(row.personal, case.is_share)}{' %' if case.is_share else ''}"


def front(points: list[Point], higher_is_better: bool) -> list[Point]:
    """The points that no other beats on both cost and score, from the cheapest on."""
    sign = 1 if higher_is_better else -1

    def rising() -> Iterator[Point]:
        best = float("-inf")
        for x, y in sorted(points, key=lambda point: (point[0], -sign * point[1])):
            if sign * y > best:
                best = sign * y
                yield x, y

    return list(rising())
