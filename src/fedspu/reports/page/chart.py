"""What a picture shows, whoever draws it: ``draw.py`` for the page, or matplotlib."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10

Show = Callable[[float], str]
"""How a value of an axis is written."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Table:
    """The numbers behind a picture."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Axis:
    """One direction of a chart: what it is, and how its values are written.

    An axis with ``bands`` has names in place of numbers: band i is at i.
    """

    title: str
    show: Show
    from_zero: bool = False
    bands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mark:
    """One value: where it is, and what is said about it."""

    x: float
    y: float
    tip: str
    is_open: bool = False  # drawn as a ring
    ends: Point | None = None  # of its interval along y


@dataclass(frozen=True)
class Series:
    """What belongs to one method: a line, marks, or both."""

    name: str
    slot: int  # its colour and shape
    marks: tuple[Mark, ...]
    line: tuple[Point, ...] = ()
    band: tuple[tuple[float, float, float], ...] = ()  # x, lowest, highest
    has_dots: bool = True  # whether marks are drawn, or only found by the pointer
    is_level: bool = False  # a line from edge to edge, of a value that has no x


@dataclass(frozen=True)
class Chart:
    """Values along two axes."""

    name: str  # of its file
    title: str
    about: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    front: tuple[Point, ...] = ()  # steps between the best trade-offs
    is_small: bool = False  # three beside each other, not two
    has_labels: bool = True  # whether series are labelled where they are
    edges: Point | None = None  # of y, whatever the values are

    @property
    def points(self) -> list[Point]:
        """Everything that must be inside."""
        found: list[Point] = []
        for series in self.series:
            found += series.line
            found += [(m.x, y) for m in series.marks for y in m.ends or (m.y,)]
            found += [(x, y) for x, *both in series.band for y in both]
        found += [(found[0][0], y) for y in self.edges or () if found]
        return found


@dataclass(frozen=True)
class Heatmap:
    """A share for each row and column, drawn as a shade."""

    name: str
    title: str
    about: str
    row_title: str
    column_title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...]


Picture = Chart | Heatmap


@dataclass(frozen=True)
class Section:
    """Pictures that belong together, and one table with their numbers."""

    title: str
    about: str
    pictures: tuple[Picture, ...]
    table: Table | None = None


def bytes_up_to(most: float) -> Show:
    """How sizes beside an axis are written: all in one unit."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, scale = next((u for u in units if most >= u[1]), ("B", 1.0))
    return lambda value: f"{value / scale:.4g} {unit}"


def seconds_up_to(most: float) -> Show:
    """How times beside an axis are written: all in one unit."""
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
    unit, scale = next((u for u in units if most >= 2 * u[1]), ("µs", 1e-6))
    return lambda value: f"{value / scale:.4g} {unit}"


# Scales -------------------------------------------------------------------------------


def span(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    """The lowest and the highest value of an axis, with a little room."""
    if axis.bands:
        return -0.5, len(axis.bands) - 0.5
    known = [value for value in values if isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    if axis.from_zero:
        low = min(0.0, low)
    if high == low:
        room = abs(high) * 0.1 or 1.0
        return (low if axis.from_zero else low - room), high + room
    room = 0.04 * (high - low)
    return (low if axis.from_zero and low == 0 else low - room), high + room


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values within a span: steps of 1, 2 or 5 and zeros."""
    raw = (high - low) / most
    power = 10.0 ** floor(log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = floor(low / step)
    listed = [round((first + i) * step, 12) for i in range(most + 3)]
    return [value for value in listed if low - 1e-9 * step <= value <= high]


def thinned(number: int, most: int) -> list[int]:
    """All of 0, 1, …, or ``most`` of them, evenly spaced; the ends are among them."""
    if number <= most:
        return list(range(number))
    return sorted({round(i * (number - 1) / (most - 1)) for i in range(most)})
