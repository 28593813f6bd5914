import re
import sys
from pathlib import Path

import pytest

from fedspu.errors import SettingsError
from fedspu.reports.plots import check_plot, plot_profile
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
    with pytest.raises(SettingsError, match=r"pip install 'fedspu\[plots\]'"):
        check_plot(Path("plot.png"))


def test_a_disk_that_refuses_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SettingsError, match=r"plot\.png: cannot be written"):
        plot_profile(PROFILE, "a model", tmp_path / "nowhere" / "plot.png")
