"""Every client as a dot, and who stopped when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedspu.reports.intervals import mean
from fedspu.reports.page.chart import (
    Axis,
    Chart,
    Mark,
    Point,
    Section,
    Series,
    Table,
    thinned,
)
from fedspu.reports.page.facts import CaseFacts, PlayedRun, known

MOST_ROWS = 600
"""Of a whole page."""


@dataclass(frozen=True)
class Dot:
    """One client at the end of a run."""

    client: int
    seed: int
    p: float
    score: float
    stopped: int | None  # the round in which it stopped


def dots_of(run: PlayedRun, metric: str) -> list[Dot]:
    """The clients of a run that were judged."""
    stops = {
        int(turn["client"]): int(turn["round"])
        for turn in run.turns
        if turn["has_stopped"]
    }
    found = []
    for line in run.clients:
        p, score = known(line["capacity"]), known(line[metric])
        if p is not None and score is not None:
            client = int(line["client"])
            stopped = stops.get(client) if line["has_stopped"] else None
            found.append(Dot(client, run.seed, p, score, stopped))
    return found


def clients(
    facts: CaseFacts, slots: dict[str, int], most_dots: int, most_rows: int
) -> Section:
    """A chart for each method; if clients are too many, only those of one seed."""
    by_method = {
        method: [d for run in facts.of(method) for d in dots_of(run, facts.case.metric)]
        for method in facts.methods
    }
    by_method = {method: dots for method, dots in by_method.items() if dots}
    everyone = [dot for dots in by_method.values() for dot in dots]
    drawn, note = _drawn(by_method, most_dots)
    low = min((dot.score for dot in everyone), default=0.0)
    high = max((dot.score for dot in everyone), default=1.0)
    bands = sorted({dot.p for dot in everyone})
    has_stopped = any(dot.stopped is not None for dot in everyone)
    rings = " A ring is a client that stopped early." if has_stopped else ""
    return Section(
        "Every client",
        f"A dot is a client's own model on its own test examples.{rings}{note} A line "
        "is the mean of a capacity.",
        tuple(
            _chart(facts, method, slots[method], drawn[method], bands, (low, high))
            for method in by_method
        ),
        _table(facts, by_method, most_rows),
    )


def _drawn(
    by_method: dict[str, list[Dot]], most: int
) -> tuple[dict[str, list[Dot]], str]:
    """What is drawn: everyone, or one seed's clients, or some of those."""
    if sum(map(len, by_method.values())) <= most:
        return by_method, ""
    seed = min(dot.seed for dots in by_method.values() for dot in dots)
    first = {
        method: [dot for dot in dots if dot.seed == seed] or dots
        for method, dots in by_method.items()
    }
    note = f" Drawn are clients of seed {seed}."
    each = max(1, most // max(1, len(first)))
    if max(map(len, first.values())) > each:
        note = f" Drawn are at most {each} clients of each method, of seed {seed}."
        step = max(-(-len(dots) // each) for dots in first.values())
        first = {method: dots[::step] for method, dots in first.items()}
    return first, note


def _chart(
    facts: CaseFacts,
    method: str,
    slot: int,
    dots: Sequence[Dot],
    bands: list[float],
    edges: Point,
) -> Chart:
    marks, lines = [], []
    for i, p in enumerate(bands):
        group = sorted(
            (dot for dot in dots if dot.p == p), key=lambda d: (d.score, d.client)
        )
        if not group:
            continue
        middle = mean([dot.score for dot in group])
        lines.append(Series("", slot, (), ((i - 0.36, middle), (i + 0.36, middle))))
        places = side_by_side([dot.score for dot in group], edges)
        marks += [
            Mark(
                i + place,
                dot.score,
                _tip(facts, method, dot),
                is_open=dot.stopped is not None,
            )
            for dot, place in zip(group, places, strict=True)
        ]
    return Chart(
        name=f"clients-{method}",
        title=method,
        about=f"{len(dots)} clients by capacity.",
        x=Axis("capacity p", lambda v: f"{v:g}", bands=tuple(f"{p:g}" for p in bands)),
        y=Axis(facts.metric, facts.tick),
        series=(Series(method, slot, tuple(marks)), *lines),
        is_small=True,
        has_labels=False,
        edges=edges,  # the same for all methods, so that they can be compared
    )


def side_by_side(
    values: Sequence[float], edges: Point, levels: int = 36
) -> list[float]:
    """Places within a band for sorted values: equal ones stand beside each other."""
    size = (edges[1] - edges[0]) / levels or 1.0
    row = [int((value - edges[0]) / size) for value in values]
    counts = {level: row.count(level) for level in set(row)}
    step = min(0.11, 0.8 / max(counts.values(), default=1))
    seen: dict[int, int] = {}
    places = []
    for level in row:
        i = seen.get(level, 0)
        seen[level] = i + 1
        places.append(step * (i - (counts[level] - 1) / 2))
    return places


def _tip(facts: CaseFacts, method: str, dot: Dot) -> str:
    stopped = "" if dot.stopped is None else f", stopped in round {dot.stopped}"
    return (
        f"{method}, client {dot.client}, p = {dot.p:g}, seed {dot.seed}: "
        f"{facts.said(dot.score)}{stopped}"
    )


def _table(facts: CaseFacts, by_method: dict[str, list[Dot]], most: int) -> Table:
    """A row for each client, beside each other what methods made of it."""
    rows: dict[tuple[int, int], dict[str, Dot]] = {}
    for method, dots in by_method.items():
        for dot in dots:
            rows.setdefault((dot.seed, dot.client), {})[method] = dot

    def cells(found: dict[str, Dot]) -> Iterator[str]:
        for method in by_method:
            dot = found.get(method)
            if dot is None:
                yield "-"
            else:
                stopped = "" if dot.stopped is None else f" (until {dot.stopped})"
                yield f"{facts.show(dot.score)}{stopped}"

    listed = sorted(rows.items())
    note = "In brackets: the last round of a client that stopped early."
    if len(listed) > most:
        note += (
            f" The first {most} of {len(listed):,}; fedspu.load_run(RUN).clients "
            "has all."
        )
    return Table(
        ("seed", "client", "p", *(f"{m}: {facts.metric}" for m in by_method)),
        tuple(
            (
                str(seed),
                str(client),
                f"{next(iter(found.values())).p:g}",
                *cells(found),
            )
            for (seed, client), found in listed[:most]
        ),
        note,
    )


def stops(facts: CaseFacts, slots: dict[str, int], most_dots: int) -> Section | None:
    """How many clients still take part, by round, and who stopped; None if nobody."""
    by_method = {
        method: [d for run in facts.of(method) for d in dots_of(run, facts.case.metric)]
        for method in facts.methods
    }
    if all(dot.stopped is None for dots in by_method.values() for dot in dots):
        return None
    stopped = {
        method: [dot for dot in dots if dot.stopped is not None]
        for method, dots in by_method.items()
    }
    drawn, note = _drawn(stopped, most_dots)
    last = max(int(run.summary["rounds_played"]) for run in facts.runs)
    left = Chart(
        name="clients-left",
        title="Clients that still take part",
        about="Of all clients, over all seeds.",
        x=Axis("round", lambda v: f"{v:g}"),
        y=Axis("clients, %", lambda v: f"{100 * v:.4g}", from_zero=True),
        series=tuple(
            _left(method, slots[method], dots, last)
            for method, dots in by_method.items()
            if dots
        ),
    )
    bands = sorted({dot.p for dots in by_method.values() for dot in dots})
    when = Chart(
        name="stops-by-capacity",
        title="Who stopped when",
        about=f"A mark is a client, in the row of its capacity.{note}",
        x=Axis("round in which it stopped", lambda v: f"{v:g}"),
        y=Axis("capacity p", lambda v: f"{v:g}", bands=tuple(f"{p:g}" for p in bands)),
        series=tuple(
            _when(method, slots[method], dots, bands, i, len(by_method))
            for i, (method, dots) in enumerate(drawn.items())
        ),
        has_labels=False,
    )
    return Section(
        "Who stopped when",
        "With early stopping, a client leaves once it no longer improves on its own "
        f"validation examples.{note}",
        (left, when),
        _stop_table(by_method, bands),
    )


def _left(method: str, slot: int, dots: Sequence[Dot], last: int) -> Series:
    counted = sorted(dot.stopped for dot in dots if dot.stopped is not None)
    points, marks = [(0.0, 1.0)], [Mark(0, 1.0, f"{method}, at first: all clients")]
    for t in sorted(set(counted)):
        share = 1 - sum(stop <= t for stop in counted) / len(dots)
        points += [(float(t), points[-1][1]), (float(t), share)]
        tip = f"{method}, after round {t}: {100 * share:.0f} % of clients left"
        marks.append(Mark(t, share, tip))
    points.append((float(last), points[-1][1]))
    marks = [marks[i] for i in thinned(len(marks), MOST_STEPS)]
    return Series(method, slot, tuple(marks), tuple(points), has_dots=False)


MOST_STEPS = 30


def _when(
    method: str, slot: int, dots: Sequence[Dot], bands: list[float], i: int, number: int
) -> Series:
    lane = 0.7 / number
    return Series(
        method,
        slot,
        tuple(
            Mark(
                dot.stopped,
                bands.index(dot.p) + lane * (i - (number - 1) / 2),
                f"{method}, client {dot.client}, p = {dot.p:g}, seed {dot.seed}: "
                f"stopped in round {dot.stopped}",
                is_open=True,
            )
            for dot in dots
            if dot.stopped is not None
        ),
    )


def _stop_table(by_method: dict[str, list[Dot]], bands: list[float]) -> Table:
    rows = []
    for method, dots in by_method.items():
        for p in bands:
            group = [dot for dot in dots if dot.p == p]
            found = sorted(dot.stopped for dot in group if dot.stopped is not None)
            rows.append(
                (
                    method,
                    f"{p:g}",
                    f"{len(found)} of {len(group)}",
                    *(
                        (str(found[0]), str(found[len(found) // 2]), str(found[-1]))
                        if found
                        else ("-", "-", "-")
                    ),
                )
            )
    titles = ("method", "p", "stopped", "first in round", "median", "last")
    return Table(titles, tuple(rows))
