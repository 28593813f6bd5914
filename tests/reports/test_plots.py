import re
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from fedspu.data.partition import LabelCounts
from fedspu.errors import SettingsError
from fedspu.reports.page.chart import Axis, Chart, Heatmap, Mark, Picture, Series
from fedspu.reports.plots import (
    COLOURS,
    _bars,
    _colors,
    check_plot,
    plot_label_counts,
    plot_pictures,
    plot_profile,
)
from tests.reports.measured import PROFILE


def test_a_plot_has_each_way_the_limits_and_the_paper_s_formula(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_profile(PROFILE, "a model", tmp_path / "plot.svg")
    drawn = re.findall("<!-- (.*?) -->", (tmp_path / "plot.svg").read_text())
    ways = {"dense", "exact fast", "truncated lean"}
    limits = {"FLOP limit, exact", "FLOP limit, truncated", "the paper's formula"}
    axes = {"a model", "time of a step", "ms (CPU time, median)", "MB"}
    assert ways | limits | axes <= set(drawn)


@pytest.mark.parametrize("name", ["plot.png", "plot.pdf", "plot.SVG"])
def test_a_plot_is_written_in_the_format_of_its_name(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    check_plot(tmp_path / name)
    plot_profile(PROFILE, "a model", tmp_path / name)
    starts = {"png": b"\x89PNG", "pdf": b"%PDF", "SVG": b"<?xml"}
    kind = name.rpartition(".")[2]
    assert (tmp_path / name).read_bytes().startswith(starts[kind])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plot.jpg", r"plot\.jpg: expected a file that ends in \.png, \.svg, \.pdf"),
        ("plot", "expected a file that ends in"),
        ("nowhere/plot.png", r"there is no folder .*nowhere"),
        ("folder.png", "is a folder"),
    ],
)
def test_a_file_that_cannot_be_drawn_to_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SettingsError, match=message):
        check_plot(tmp_path / name)


def test_without_matplotlib_the_command_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        SettingsError, match=r"pip install .* '\.\[plots\]' in the folder of fedspu$"
    ):
        check_plot(Path("plot.png"))


def test_a_disk_that_refuses_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SettingsError, match=r"plot\.png: cannot be written"):
        plot_profile(PROFILE, "a model", tmp_path / "nowhere" / "plot.png")


def drawn_shares(shares: LabelCounts, names: tuple[str, ...], path: Path) -> list[str]:
    pytest.importorskip("matplotlib")
    plot_label_counts(shares, names, "who has what", path)
    return re.findall("<!-- (.*?) -->", path.read_text())


def test_who_has_what_is_drawn_with_the_names_of_the_classes(tmp_path: Path) -> None:
    shares = LabelCounts(np.array([[80, 15, 5], [96, 4, 0]]))
    drawn = drawn_shares(shares, ("cat", "dog", "bird"), tmp_path / "shares.svg")
    texts = {"who has what", "client", "examples", "class", "cat", "dog", "bird"}
    assert texts <= set(drawn)


def test_many_classes_have_a_scale_and_many_clients_are_a_sample(
    tmp_path: Path,
) -> None:
    shares = LabelCounts(np.ones((5000, 62), dtype=np.int64))
    drawn = drawn_shares(shares, (), tmp_path / "shares.svg")
    assert "200 of 5,000 clients, evenly spaced" in drawn
    assert {"0", "61", "class"} <= set(drawn)


def test_bars_are_stacked_as_high_as_the_counts() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    _bars(axes, np.array([[3, 2], [0, 7]]))
    lower, upper = (patch.get_data() for patch in axes.patches)
    assert lower.values.tolist() == [3, 0, 0]  # the second is the gap between bars
    assert upper.values.tolist() == [5, 0, 7]
    assert np.asarray(upper.baseline).tolist() == [3, 0, 0]


@pytest.mark.parametrize("num_classes", [1, 10, 11, 20, 21, 62])
def test_every_class_has_a_colour_of_its_own(num_classes: int) -> None:
    pytest.importorskip("matplotlib")
    assert len({tuple(color) for color in _colors(num_classes)}) == num_classes


def test_pictures_of_a_report_are_written_under_safe_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    marks = (Mark(0.0, 0.5, "", ends=(0.4, 0.6)), Mark(1.0, 0.7, "", is_open=True))
    axis = Axis("cost $x$", lambda value: f"{value:g}")
    series = (
        Series("a_$b", 0, marks, line=((0, 0.5), (1, 0.7)), band=((0, 0.4, 0.6),)),
        Series("level", 9, (), line=((0, 0.6),), is_level=True),
    )
    bands = Axis("capacity p", str, bands=("0.2", "1"))
    charts = [
        Chart("c", "t", "", axis, axis, series, front=((0, 0.5), (1, 0.7))),
        Chart("c", "t", "", bands, axis, series[:1], is_small=True, has_labels=False),
    ]
    shades = Heatmap("h", "t", "", "r", "c", ("0", "1"), ("$a", "b"), ((0, 1), (1, 0)))
    named: list[tuple[str, Picture]] = [
        ("../../x:y/z", charts[0]),
        ("..", charts[1]),
        ("..", shades),
    ]
    assert plot_pictures(named, tmp_path / "new") == 3
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == sorted(
        f"{n}{s}" for n in ("-..-x-y-z", "plot", "plot-2") for s in (".png", ".svg")
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]


def test_plots_have_the_colours_of_the_page() -> None:
    style = files("fedspu.reports.page").joinpath("page.css").read_text()
    for i, colour in enumerate(COLOURS):
        assert f"--c{i}: {colour};" in style.split("@media")[0]
