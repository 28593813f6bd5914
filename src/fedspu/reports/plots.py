"""Plots: the one place that imports matplotlib, and only once a plot is asked for."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fedspu.errors import SettingsError
from fedspu.profile import Costs, Profile
from fedspu.reports.profile import clock_of, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Refuse a file that no plot could be written to, before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        raise SettingsError(
            f"--plot {path}: expected a file that ends in {', '.join(SUFFIXES)}"
        )
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise SettingsError(f"--plot {path}: {what}; expected a file to write to")
    if find_spec("matplotlib") is None:
        raise SettingsError(
            f"--plot {path}: matplotlib is not installed; pip install 'fedspu[plots]'"
        )


def plot_profile(profile: Profile, title: str, path: Path) -> None:
    """Write time and memory against p to a file, one line for each way to train."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    figure.suptitle(title)
    times, held, peak = figure.subplots(1, 3)
    unit, num_bytes = unit_of(profile.dense.held.peak)
    _panel(times, profile, lambda row: 1e3 * row.seconds)
    _panel(held, profile, lambda row: row.held.total / num_bytes)
    _panel(peak, profile, lambda row: row.held.peak / num_bytes)
    _limits(times, profile)
    _paper(held, profile, num_bytes)
    clock = clock_of(profile)
    times.set(title="time of a step", ylabel=f"ms ({clock}, median)")
    held.set(title="held: weights, gradients, saved", ylabel=unit)
    peak.set(title="peak, temporary tensors included", ylabel=unit)
    for axes in (times, held, peak):
        axes.set(xlabel="p, the share of neurons that train", xlim=(0, 1.04))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", framealpha=0.6)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise SettingsError(f"--plot {path}: cannot be written ({error})") from None


def _panel(axes: "Axes", profile: Profile, value: Callable[[Costs], float]) -> None:
    """The dense step as a level line, and a line for each way to train."""
    axes.axhline(value(profile.dense), color="0.4", label="dense")
    ways: dict[str, dict[float, float]] = {}
    for row in profile.rows:
        ways.setdefault(row.setting.way, {})[row.setting.p] = value(row)
    for way, values in ways.items():
        axes.plot(list(values), list(values.values()), "o-", label=way)


def _limits(axes: "Axes", profile: Profile) -> None:
    """The FLOP limit of each mode, as a share of the dense step's time."""
    modes: dict[str, dict[float, float]] = {}
    for row in profile.rows:
        if row.flop_limit is not None:
            limit = 1e3 * profile.dense.seconds * row.flop_limit
            modes.setdefault(row.setting.mode, {})[row.setting.p] = limit
    for (mode, limits), color in zip(modes.items(), ("k", "0.5"), strict=False):
        label = f"FLOP limit, {mode}"
        axes.plot(list(limits), list(limits.values()), ":", color=color, label=label)


def _paper(axes: "Axes", profile: Profile, num_bytes: float) -> None:
    """The paper's formula, which is the same for every way."""
    values = {row.setting.p: row.paper_bytes / num_bytes for row in profile.rows}
    label = "the paper's formula"
    axes.plot(list(values), list(values.values()), "--", color="k", label=label)
