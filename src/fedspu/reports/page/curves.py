"""The metric over rounds, over bytes and over time."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from fedspu.reports.intervals import mean
from fedspu.reports.page.chart import (
    Axis,
    Chart,
    Mark,
    Section,
    Series,
    Show,
    Table,
    bytes_up_to,
    seconds_up_to,
    thinned,
)
from fedspu.reports.page.facts import CaseFacts, PlayedRun, Unfinished, known
from fedspu.units import digits, duration, size

POINTS = (30, 240)
MARKS = (10, 40)
ROWS = (6, 25)
"""The fewest and the most of a line, by how many lines a page has."""


@dataclass(frozen=True)
class Step:
    """A method after one round: means over seeds, and the range of the metric."""

    round: int
    num_bytes: float
    cpu_seconds: float
    score: float
    low: float
    high: float


def steps(runs: list[PlayedRun], metric: str) -> list[Step]:
    """A method after each round; a run that ended early stays where it ended."""
    each = [_of_run(run, metric) for run in runs]
    each = [listed for listed in each if listed]
    if not each:
        return []
    longest = max(each, key=lambda listed: listed[-1][0])
    found = []
    places = [0] * len(each)
    for t, *_ in longest:
        now = []
        for i, listed in enumerate(each):
            while places[i] + 1 < len(listed) and listed[places[i] + 1][0] <= t:
                places[i] += 1
            now.append(listed[places[i]])
        scores = [score for *_, score in now]
        found.append(
            Step(
                t,
                mean([num_bytes for _, num_bytes, _, _ in now]),
                mean([seconds for _, _, seconds, _ in now]),
                mean(scores),
                min(scores),
                max(scores),
            )
        )
    return found


def _of_run(run: PlayedRun, metric: str) -> list[tuple[int, float, float, float]]:
    """Round, bytes so far, CPU seconds so far, score; rounds without one are left out.

    The last round has the score of the summary, in which every client is judged.
    """
    sent = accumulate(line["bytes_down"] + line["bytes_up"] for line in run.rounds)
    cpu = dict(
        zip(
            (line["round"] for line in run.times),
            accumulate(line["train_cpu_seconds"] for line in run.times),
            strict=True,
        )
    )
    found = []
    for line, num_bytes in zip(run.rounds, sent, strict=True):
        score = known(line[f"personal_{metric}"])
        if score is not None:
            t = int(line["round"])
            found.append((t, float(num_bytes), float(cpu.get(t, 0.0)), score))
    return found


def curves(facts: CaseFacts, slots: dict[str, int], num_lines: int) -> Section:
    """Three charts: the same scores over rounds, bytes and CPU time.

    ``num_lines`` is how many a whole page has: with many, each has fewer points.
    """
    metric = facts.case.metric
    found = {m: steps(facts.of(m), metric) for m in facts.methods}
    found = {method: listed for method, listed in found.items() if listed}
    longest = max((listed[-1].cpu_seconds for listed in found.values()), default=0.0)
    largest = max((listed[-1].num_bytes for listed in found.values()), default=0.0)
    ways: list[tuple[str, str, str, Callable[[Step], float], Show]] = [
        ("rounds", "Over rounds", "round", lambda s: s.round, lambda v: f"{v:g}"),
        (
            *("bytes", "Over bytes", "exchanged, both ways"),
            lambda s: s.num_bytes,
            bytes_up_to(largest),
        ),
        (
            *("time", "Over time", "CPU time of clients' training"),
            lambda s: s.cpu_seconds,
            seconds_up_to(longest),
        ),
    ]
    charts = tuple(
        Chart(
            name=f"score-over-{name}",
            title=title,
            about=_ends(facts, found),
            x=Axis(what, show, from_zero=name != "rounds"),
            y=Axis(f"personal {facts.metric}", facts.tick),
            series=tuple(
                _series(facts, method, slots[method], listed, at, show, num_lines)
                for method, listed in found.items()
            ),
            is_small=True,
        )
        for name, title, what, at, show in ways
    )
    num_seeds = facts.case.num_seeds
    band = (
        " Lines are means over seeds, shades go from the lowest seed to the highest."
        if num_seeds > 1
        else ""
    )
    if any(series.is_level for chart in charts for series in chart.series):
        band += (
            " A dotted line from edge to edge is the last score of a method that sends "
            "nothing."
        )
    return Section(
        "How clients' own models improve",
        f"The mean over clients, each judged on its own test examples.{band}",
        charts,
        _table(facts, found, num_lines),
    )


def _series(
    facts: CaseFacts,
    method: str,
    slot: int,
    listed: list[Step],
    at: Callable[[Step], float],
    show: Show,
    num_lines: int,
) -> Series:
    drawn = _some(listed, POINTS, num_lines)
    marked = _some(listed, MARKS, num_lines)
    is_level = at(listed[-1]) == 0.0
    if is_level:
        drawn = marked = listed[-1:]
    has_range = any(step.low < step.high for step in listed) and not is_level
    return Series(
        method,
        slot,
        tuple(
            Mark(at(s), s.score, _tip(facts, method, s, at, show, is_level))
            for s in marked
        ),
        line=tuple((at(s), s.score) for s in drawn),
        band=tuple((at(s), s.low, s.high) for s in drawn) if has_range else (),
        has_dots=False,
        is_level=is_level,
    )


def _tip(
    facts: CaseFacts,
    method: str,
    step: Step,
    at: Callable[[Step], float],
    show: Show,
    is_level: bool,
) -> str:
    what = f"{method}, round {step.round}: {facts.said(step.score)}"
    if is_level:
        return f"{what}; it sends nothing"
    return what if at(step) == step.round else f"{what} after {show(at(step))}"


def _ends(facts: CaseFacts, found: dict[str, list[Step]]) -> str:
    parts = [f"{m} {facts.said(listed[-1].score)}" for m, listed in found.items()]
    return f"At the end: {', '.join(parts)}."


def _some(listed: list[Step], bounds: tuple[int, int], num_lines: int) -> list[Step]:
    fewest, most = bounds
    number = max(fewest, min(most, most * FULL // num_lines))
    return [listed[i] for i in thinned(len(listed), number)]


FULL = 12
"""So many lines have all their points; more lines have fewer."""


def _table(facts: CaseFacts, found: dict[str, list[Step]], num_lines: int) -> Table:
    rows = []
    for method, listed in found.items():
        rows += [
            (
                method,
                str(step.round),
                facts.show(step.score),
                facts.show(step.low),
                facts.show(step.high),
                size(step.num_bytes),
                duration(step.cpu_seconds),
            )
            for step in _some(listed, ROWS, num_lines)
        ]
    is_part = any(len(_some(s, ROWS, num_lines)) < len(s) for s in found.values())
    return Table(
        (
            *("method", "round", facts.metric, "lowest seed", "highest seed"),
            *("exchanged", "CPU time"),
        ),
        tuple(rows),
        "Evenly spaced rounds; rounds.jsonl of each run has all." if is_part else "",
    )


def unfinished_section(
    found: tuple[Unfinished, ...], has_others: bool = True
) -> Section:
    """Runs that are not finished: how far, and their scores so far."""
    apart = "These runs have no part in the numbers above. " if has_others else ""
    rows = tuple(
        (
            run.path,
            run.method,
            str(run.seed),
            f"{run.played[-1][0] if run.played else 0} of {run.rounds}",
            _score(run, run.played[-1][1]) if run.played else "-",
        )
        for run in found
    )
    drawn = [run for run in found if run.played]
    same = {(run.metric, run.is_share) for run in drawn}
    charts: tuple[Chart, ...] = ()
    if len(same) == 1 and len(drawn) <= MOST_UNFINISHED:
        first = drawn[0]
        charts = (_so_far(drawn, first),)
    return Section(
        "Not finished yet",
        f"{apart}To go on: the same `fedspu compare` for a comparison, and "
        f"`{_resume(found[0])}` for a single run. `fedspu report --watch` shows how "
        "far a comparison is.",
        charts,
        Table(("run", "method", "seed", "round", "personal score so far"), rows),
    )


def _resume(run: Unfinished) -> str:
    trust = " --trust" if run.names_code else ""
    return f"fedspu run --resume {run.path}{trust}"


MOST_UNFINISHED = 16


def _so_far(drawn: list[Unfinished], first: Unfinished) -> Chart:
    scale = 100 if first.is_share else 1
    unit = f"{first.metric}, %" if first.is_share else first.metric
    return Chart(
        name="unfinished",
        title="So far",
        about=f"{len(drawn)} runs.",
        x=Axis("round", lambda v: f"{v:g}"),
        y=Axis(f"personal {unit}", lambda v: f"{scale * v:.4g}"),
        series=tuple(
            Series(
                f"{run.method}, seed {run.seed}",
                slot,
                tuple(
                    Mark(t, score, f"{run.path}, round {t}: {_score(run, score)}")
                    for t, score in (
                        run.played[i] for i in thinned(len(run.played), MARKS[1])
                    )
                ),
                line=tuple(
                    (float(t), score)
                    for t, score in (
                        run.played[i] for i in thinned(len(run.played), POINTS[1])
                    )
                ),
                has_dots=False,
            )
            for slot, run in enumerate(drawn)
        ),
    )


def _score(run: Unfinished, score: float) -> str:
    return f"{100 * score:.1f} %" if run.is_share else digits(score, 4)
