"""Charts as SVG, to stand inside a page: its style sheet gives colours and fonts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from fedspu.reports.page.chart import Chart, Heatmap, Point, Series, span, ticks

SLOTS = 8
"""Colours; a ninth method has the colour of the first, and another dash."""

DASHES = ("", "7 4", "2 3", "9 3 2 3")
SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-5L5 0L0 5L-5 0z",
    "M0-4.6L4.6 3.6H-4.6z",
    "M0 4.6L4.6-3.6H-4.6z",
)
LETTER = 7.3
"""The width of a letter of a label."""

LABEL_GAP = 17.0
LONGEST_LABEL = 18


def colour(slot: int) -> str:
    """The class of a series' colour."""
    return f"c{slot % SLOTS}"


def shape(slot: int) -> str:
    """The name of the shape of a series' marks; see ``shapes``."""
    return f"s{slot % len(SHAPES)}"


def shapes() -> str:
    """The outlines of all marks, once for a whole page."""
    listed = "".join(f'<path id="s{i}" d="{d}"/>' for i, d in enumerate(SHAPES))
    return f'<svg width="0" height="0" aria-hidden="true"><defs>{listed}</defs></svg>'


def shortened(name: str) -> str:
    """A name that fits beside a chart."""
    return name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 1]}…"


@dataclass(frozen=True)
class Frame:
    """Where the plot is within the picture, and the values at its edges."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> Point:
        """Where a value is."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return (
            self.left + across * (self.right - self.left),
            self.bottom - up * (self.bottom - self.top),
        )


def svg(picture: Chart | Heatmap) -> str:
    """A picture as an SVG element."""
    return _heatmap(picture) if isinstance(picture, Heatmap) else _chart(picture)


def _chart(chart: Chart) -> str:
    frame = _frame(chart)
    parts = [
        *_grid(chart, frame),
        *_front(chart, frame),
        *(part for series in chart.series for part in _series(series, frame)),
        *_labels(chart, frame),
    ]
    return _svg(frame.width, frame.height, f"{chart.title}. {chart.about}", parts)


def _svg(width: float, height: float, about: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(about)}">{"".join(parts)}</svg>'
    )


def _frame(chart: Chart) -> Frame:
    width, height = (400.0, 285.0) if chart.is_small else (560.0, 330.0)
    points = chart.points
    y = span([point[1] for point in points], chart.y)
    x = span([point[0] for point in points], chart.x)
    marks = chart.y.bands or [chart.y.show(tick) for tick in ticks(*y)]
    left = 14 + LETTER * max((len(text) for text in marks), default=2)
    names = [shortened(s.name) for s in chart.series if s.line and chart.has_labels]
    right = 16 + LETTER * max(map(len, names), default=0)
    return Frame(width, height, left, width - right, 34, height - 46, x, y)


def _grid(chart: Chart, frame: Frame) -> Iterator[str]:
    """Lines, the numbers beside them, and the titles of both axes."""
    for value, text in _stops(chart.y.bands, chart.y.show, frame.y, 5):
        _, y = frame.at(0, value)
        yield f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>'
        yield _text(frame.left - 8, y + 4.5, text, "end")
    for value, text in _stops(chart.x.bands, chart.x.show, frame.x, 5):
        x, _ = frame.at(value, 0)
        yield _text(x, frame.bottom + 19, text, "middle")
    yield (
        f'<path class="axis" d="M{frame.left:.1f} {frame.bottom:.1f}'
        f'H{frame.right:.1f}"/>'
    )
    yield _text(0, 15, chart.y.title, "start", "title")
    yield _text(frame.right, frame.height - 5, chart.x.title, "end", "title")


def _stops(
    bands: Sequence[str], show: object, edges: tuple[float, float], most: int
) -> Iterator[tuple[float, str]]:
    if bands:
        yield from enumerate(bands)
        return
    assert callable(show)
    last = ""
    for value in ticks(*edges, most):
        if (text := show(value)) != last:
            yield value, text
        last = text


def _front(chart: Chart, frame: Frame) -> Iterator[str]:
    """The best trade-offs, joined by steps."""
    if not chart.front:
        return
    points = [frame.at(*point) for point in chart.front]
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    path += "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:])
    yield f'<path class="front" d="{path}H{frame.right:.1f}"/>'


def _series(series: Series, frame: Frame) -> Iterator[str]:
    yield f'<g class="{colour(series.slot)}">'
    if series.band:
        upper = [frame.at(x, high) for x, _, high in series.band]
        lower = [frame.at(x, low) for x, low, _ in reversed(series.band)]
        yield f'<path class="band" d="{_path([*upper, *lower])}z"/>'
    if series.is_level:
        _, y = frame.at(0, series.line[-1][1])
        yield f'<path class="level" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>'
    elif len(series.line) > 1:
        dash = DASHES[series.slot // SLOTS % len(DASHES)]
        style = f' stroke-dasharray="{dash}"' if dash else ""
        points = [frame.at(*point) for point in series.line]
        yield f'<path class="line"{style} d="{_path(points)}"/>'
    for mark in series.marks:
        x, y = frame.at(mark.x, mark.y)
        if mark.ends is not None:
            _, low = frame.at(mark.x, mark.ends[0])
            _, high = frame.at(mark.x, mark.ends[1])
            yield f'<path class="half" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'
        kind = ("ring" if mark.is_open else "dot") if series.has_dots else "spot"
        yield (
            f'<use class="{kind}" href="#{shape(series.slot)}" x="{x:.1f}" '
            f'y="{y:.1f}"><title>{escape(mark.tip)}</title></use>'
        )
    yield "</g>"


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _labels(chart: Chart, frame: Frame) -> Iterator[str]:
    """The name of each line at its end, and of each lone mark beside it."""
    if not chart.has_labels:
        return
    lines = [series for series in chart.series if series.line]
    lines.sort(key=lambda series: frame.at(*series.line[-1])[1])
    wanted = [frame.at(*series.line[-1])[1] for series in lines]
    places = apart(wanted, frame.top + 4, frame.bottom)
    for y, series in zip(places, lines, strict=True):
        yield _name(series, frame.right + 7, y)
    alone = [series for series in chart.series if series.marks and not series.line]
    yield from _beside(alone, frame)


def _beside(alone: Sequence[Series], frame: Frame) -> Iterator[str]:
    """Names beside marks, on the side that has room, below names that are there."""
    taken: list[tuple[float, float, float]] = []  # left, right, y
    for series in sorted(alone, key=lambda s: frame.at(0, s.marks[-1].y)[1]):
        x, y = frame.at(series.marks[-1].x, series.marks[-1].y)
        wide = LETTER * len(shortened(series.name)) + 10
        is_left = x + wide > frame.width
        left, right = (x - wide, x) if is_left else (x, x + wide)
        for other_left, other_right, other in sorted(taken, key=lambda t: t[2]):
            overlaps = left < other_right and other_left < right
            if overlaps and abs(other - y) < LABEL_GAP - 2:
                y = other + LABEL_GAP - 2
        taken.append((left, right, y))
        yield _name(series, x - 9 if is_left else x + 9, y, "end" if is_left else "")


def _name(series: Series, x: float, y: float, anchor: str = "") -> str:
    end = f' text-anchor="{anchor}"' if anchor else ""
    return (
        f'<text class="name {colour(series.slot)}" x="{x:.1f}" y="{y + 4.5:.1f}"{end}>'
        f"{escape(shortened(series.name))}</text>"
    )


def apart(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """Sorted places, moved so that neighbours are ``LABEL_GAP`` apart, if they fit."""
    gap = LABEL_GAP
    if len(wanted) > 1:
        gap = min(gap, (high - low) / (len(wanted) - 1))
    found = [max(low, min(high, y)) for y in wanted]
    for i in range(1, len(found)):
        found[i] = max(found[i], found[i - 1] + gap)
    for i in reversed(range(len(found))):
        limit = high if i == len(found) - 1 else found[i + 1] - gap
        found[i] = min(found[i], limit)
    assert all(b >= a for a, b in pairwise(found))
    return found


def _text(
    x: float, y: float, text: str, anchor: str = "start", kind: str = "tick"
) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


# Shades -------------------------------------------------------------------------------

SHADES = 8


def _heatmap(picture: Heatmap) -> str:
    """Cells of one shade are one path, so that large maps stay small."""
    width = 560.0
    labels = max((len(name) for name in picture.rows), default=1)
    left, top = 14 + LETTER * labels, 34.0
    wide = (width - left - 4) / max(1, len(picture.columns))
    tall = max(5.0, min(18.0, 420 / max(1, len(picture.rows))))
    height = top + tall * len(picture.rows) + 46
    paths: dict[int, list[str]] = {}
    for i, row in enumerate(picture.shares):
        for j, share in enumerate(row):
            if share > 0:
                shade = min(SHADES, 1 + int(share * SHADES))
                paths.setdefault(shade, []).append(
                    f"M{left + j * wide:.1f} {top + i * tall:.1f}"
                    f"h{wide - 1:.1f}v{tall - 1:.1f}h{1 - wide:.1f}z"
                )
    parts = [
        f'<path class="shade" opacity="{shade / SHADES:.2f}" d="{"".join(listed)}"/>'
        for shade, listed in sorted(paths.items())
    ]
    parts += [
        _text(left - 8, top + (i + 0.5) * tall + 4, picture.rows[i], "end")
        for i in _some(len(picture.rows), tall, 15)
    ]
    bottom = height - 46
    widest = max((len(name) for name in picture.columns), default=1) * LETTER + 6
    parts += [
        _text(left + (j + 0.5) * wide, bottom + 16, picture.columns[j], "middle")
        for j in _some(len(picture.columns), wide, widest)
    ]
    parts += _scale_of_shades(width)
    parts += [
        _text(0, 15, picture.row_title, "start", "title"),
        _text(width - 4, height - 5, picture.column_title, "end", "title"),
    ]
    drawn = _svg(width, height, f"{picture.title}. {picture.about}", parts)
    cells = f"{left:.1f} {top:.1f} {wide:.3f} {tall:.3f}"
    return drawn.replace("<svg ", f'<svg data-cells="{cells}" ', 1)


def _scale_of_shades(width: float) -> Iterator[str]:
    """What each shade stands for, in the corner."""
    left = width - 48 - 12 * SHADES
    yield _text(left - 6, 15, "0 %", "end")
    for shade in range(1, SHADES + 1):
        yield (
            f'<path class="shade" opacity="{shade / SHADES:.2f}" '
            f'd="M{left + 12 * (shade - 1):.1f} 5h11v11h-11z"/>'
        )
    yield _text(width, 15, "100 %", "end")


def _some(number: int, step: float, room: float) -> range:
    """Every label, every second one …: as many as have room."""
    return range(0, number, max(1, -int(-room // step)))
