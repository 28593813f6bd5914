"""Charts as SVG: scales, labels, and shapes."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspu.reports.page.chart import (
    Axis,
    Chart,
    Heatmap,
    Mark,
    Series,
    bytes_up_to,
    seconds_up_to,
    span,
    thinned,
    ticks,
)
from fedspu.reports.page.draw import LABEL_GAP, apart, svg

NUMBER = Axis("n", lambda v: f"{v:g}")


def a_chart(*series: Series, **more: object) -> Chart:
    return Chart("c", "C", "about", NUMBER, NUMBER, series, **more)  # type: ignore[arg-type]  # names of fields


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_and_within(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert all(low - width / 1e6 <= tick <= low + width for tick in found)
    assert len(found) <= 8
    assert sorted(set(found)) == found


@given(st.lists(st.floats(-1e9, 1e9)), st.booleans())
def test_a_span_is_never_empty_and_holds_all(values: list[float], zero: bool) -> None:
    low, high = span(values, Axis("x", str, from_zero=zero))
    assert low < high
    assert all(low <= value <= high for value in values)


@given(st.lists(st.floats(0, 300), max_size=12))
def test_labels_are_moved_apart_in_their_order(wanted: list[float]) -> None:
    found = apart(sorted(wanted), 20, 280)
    assert len(found) == len(wanted)
    gap = min(LABEL_GAP, 260 / max(1, len(wanted) - 1))
    assert all(b - a >= gap - 1e-6 for a, b in pairwise(found))
    assert all(20 - 1e-6 <= place <= 280 + 1e-6 for place in found)


@given(st.integers(1, 5000), st.integers(2, 300))
def test_thinning_keeps_both_ends(number: int, most: int) -> None:
    found = thinned(number, most)
    assert (found[0], found[-1]) == (0, number - 1)
    assert len(found) <= max(most, 1)
    assert found == sorted(set(found))


def test_a_chart_is_xml_with_a_tip_for_each_mark() -> None:
    marks = tuple(Mark(i, i * i, f"<{i}>", is_open=i == 1) for i in range(3))
    chart = a_chart(Series("a & b", 9, marks, line=((0, 0), (2, 4))))
    drawn = ElementTree.fromstring(svg(chart))
    assert [e.text for e in drawn.iter("title")] == ["<0>", "<1>", "<2>"]
    kinds = [e.get("class") for e in drawn.iter("use")]
    assert kinds == ["dot", "ring", "dot"]
    assert any(e.text == "a & b" for e in drawn.iter("text"))
    line = next(e for e in drawn.iter("path") if e.get("class") == "line")
    assert line.get("stroke-dasharray")  # the ninth colour is the first, dashed


def test_marks_lie_where_their_values_are() -> None:
    marks = (Mark(0, 0, "low"), Mark(10, 5, "high"))
    drawn = ElementTree.fromstring(svg(a_chart(Series("a", 0, marks))))
    (x0, y0), (x1, y1) = (
        (float(e.get("x", "")), float(e.get("y", ""))) for e in drawn.iter("use")
    )
    assert x0 < x1
    assert y0 > y1


def test_names_of_lone_marks_do_not_overlap() -> None:
    series = [Series(f"name-{i}", i, (Mark(5, 1 + i / 1000, ""),)) for i in range(4)]
    series.append(Series("far", 5, (Mark(0, 9, ""),)))
    drawn = svg(a_chart(*series))
    places = sorted(
        float(y)
        for y in re.findall(r'class="name c[0-3]" x="[\d.]+" y="([\d.]+)"', drawn)
    )
    assert all(b - a > 12 for a, b in pairwise(places))


def test_a_chart_without_values_is_drawn_empty() -> None:
    ElementTree.fromstring(svg(a_chart(Series("a", 0, ()))))


def test_cells_of_a_map_are_drawn_by_shade() -> None:
    shares = ((0.0, 1.0), (0.5, 0.5))
    picture = Heatmap("m", "M", "about", "r", "c", ("0", "1"), ("x", "y"), shares)
    drawn = ElementTree.fromstring(svg(picture))
    cells = [e for e in drawn.iter("path") if "M" in (e.get("d") or "")]
    shades = {e.get("opacity"): (e.get("d") or "").count("M") for e in cells[:2]}
    assert shades == {"0.62": 2, "1.00": 1}
    assert drawn.get("data-cells")


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (bytes_up_to(3e6), 1.5e6, "1.5 MB"),
        (bytes_up_to(100), 20, "20 B"),
        (seconds_up_to(7300), 3600, "1 h"),
        (seconds_up_to(0.5), 0.25, "250 ms"),
        (seconds_up_to(0), 0, "0 µs"),
    ],
)
def test_values_beside_an_axis_share_a_unit(show, value: float, text: str) -> None:  # type: ignore[no-untyped-def]  # a function of each case
    assert show(value) == text
