"""Plots: the only module that imports matplotlib, and only when a plot is made."""

import re
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedspu.data.partition import LabelCounts
from fedspu.errors import SettingsError, how_to_install
from fedspu.profile.measure import Costs, Profile
from fedspu.reports.label_counts import sample
from fedspu.reports.page.chart import Chart, Heatmap, Picture, Series, Show, span
from fedspu.reports.profile import clock_of, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
            f"--plot {path}: matplotlib is not installed; install it with: "
            f"{how_to_install('plots')}"
        )


def check_folder(folder: Path) -> None:
    """Refuse a folder that no plots could be written to, before anything is read."""
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"--plots {folder}: is a file; expected a folder")
    if find_spec("matplotlib") is None:
        raise SettingsError(
            f"--plots {folder}: matplotlib is not installed; install it with: "
            f"{how_to_install('plots')}"
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
    _save(figure, path)


def plot_label_counts(
    found: LabelCounts, names: Sequence[str], title: str, path: Path
) -> None:
    """Plot which client has which classes: a bar per client, a colour per class."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    figure.suptitle(title)
    sizes, mixes = figure.subplots(2, 1, sharex=True)
    shown = sample(len(found.sizes), MAX_BARS)
    counts = found.counts[shown]
    totals = counts.sum(1, keepdims=True)
    _bars(sizes, counts)
    _bars(mixes, 100 * counts / np.maximum(totals, 1))
    what = "client"
    mixes.locator_params(axis="x", integer=True)
    if len(shown) < len(found.sizes):
        what = f"{len(shown)} of {len(found.sizes):,} clients, evenly spaced"
        ticks = sample(len(shown), 11)
        mixes.set_xticks(ticks, [f"{shown[i]:,}" for i in ticks])
    sizes.set(ylabel="examples")
    mixes.set(ylabel="% of the client's examples", ylim=(0, 100), xlabel=what)
    for axes in (sizes, mixes):
        axes.set_xlim(-0.5, len(shown) - 0.5)
        axes.spines[["top", "right"]].set_visible(False)
    _class_key(figure, [sizes, mixes], counts.shape[1], names)
    _save(figure, path)


MAX_BARS = 200
MAX_NAMES = 20


def _bars(axes: "Axes", heights: NDArray[Any]) -> None:
    """Stacked bars, one for each row of ``heights``; one outline per class is fast."""
    num_bars, num_classes = heights.shape
    tops = np.cumsum(heights, axis=1)
    # Every bar is followed by a gap, where every class has height 0.
    edges = (np.arange(num_bars)[:, None] + [-0.42, 0.42]).ravel()
    for c, color in enumerate(_colors(num_classes)):
        top = np.zeros(2 * num_bars - 1)
        bottom = np.zeros(2 * num_bars - 1)
        top[::2], bottom[::2] = tops[:, c], tops[:, c] - heights[:, c]
        axes.stairs(top, edges, baseline=bottom, fill=True, color=color, linewidth=0)


def _colors(number: int) -> list[Any]:
    from matplotlib import colormaps

    if number <= 20:
        listed = colormaps["tab10" if number <= 10 else "tab20"]
        return list(listed(np.arange(number)))
    return list(colormaps["turbo"](np.linspace(0.02, 0.98, number)))


def _class_key(
    figure: "Figure", axes: "list[Axes]", num_classes: int, names: Sequence[str]
) -> None:
    """Which colour is which class: a legend for few classes, a scale for many."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    colors = _colors(num_classes)
    labels = list(names) or [str(number) for number in range(num_classes)]
    if num_classes <= MAX_NAMES:
        patches = [Patch(color=c, label=n) for c, n in zip(colors, labels, strict=True)]
        figure.legend(handles=patches[::-1], loc="outside right center", title="class")
        return
    norm = BoundaryNorm(np.arange(num_classes + 1) - 0.5, num_classes)
    scale = ScalarMappable(norm, ListedColormap(colors))
    ticks = sample(num_classes, MAX_NAMES)
    bar = figure.colorbar(scale, ax=axes, ticks=ticks, label="class", aspect=40)
    bar.ax.set_yticklabels([labels[i] for i in ticks])
    bar.ax.tick_params(which="minor", length=0)


def _save(figure: "Figure", path: Path) -> None:
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


# The pictures of a report, for papers -------------------------------------------------

COLOURS = (
    *("#0b6bb5", "#d4570a", "#0b8a63", "#b0418b"),
    *("#a87900", "#3b9fd1", "#5b6270", "#6a50bd"),
)
"""Those of the page in the light."""

MARKERS = ("o", "s", "D", "^", "v")
DASHES = ("-", "--", ":", "-.")


def plot_pictures(found: Iterable[tuple[str, Picture]], folder: Path) -> int:
    """Write each picture as .png and .svg; how many there are."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--plots {folder}: cannot be made ({error})") from None
    names: dict[str, int] = {}
    for name, picture in found:
        file = re.sub(r"[^\w.=@-]+", "-", name).lstrip(".")[:MAX_NAME] or "plot"
        names[file] = names.get(file, 0) + 1
        if names[file] > 1:
            file += f"-{names[file]}"
        is_small = isinstance(picture, Chart) and picture.is_small
        # Text in SVG stays text, and the same runs give the same file.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedspu"}):
            size = (4.0, 2.9) if is_small else (5.6, 3.6)
            figure = Figure(figsize=size, layout="constrained")
            axes = figure.subplots()
            axes.set_title(picture.title.replace("$", r"\$"), loc="left", fontsize=10)
            if isinstance(picture, Chart):
                _draw_chart(axes, picture)
            else:
                _draw_heatmap(axes, picture)
            for suffix in (".png", ".svg"):
                _save_plot(figure, folder / f"{file}{suffix}")
    return sum(names.values())


MAX_NAME = 120


def _save_plot(figure: "Figure", path: Path) -> None:
    try:
        without_date = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=200, metadata=without_date)
    except OSError as error:
        raise SettingsError(f"--plots {path}: cannot be written ({error})") from None


def _draw_chart(axes: "Axes", chart: Chart) -> None:
    for series in chart.series:
        _draw_series(axes, chart, series)
    if chart.front:
        xs, ys = zip(*chart.front, strict=True)
        axes.step(xs, ys, "--", where="post", color="0.5", linewidth=0.9, zorder=1)
    for axis, set_ticks, label in (
        (chart.x, axes.set_xticks, axes.set_xlabel),
        (chart.y, axes.set_yticks, axes.set_ylabel),
    ):
        label(axis.title)
        if axis.bands:
            set_ticks(range(len(axis.bands)), axis.bands)
    _, y = zip(*(chart.points or [(0.0, 0.0)]), strict=True)
    axes.set_ylim(*span(y, chart.y))
    for axis, way in ((chart.x, axes.xaxis), (chart.y, axes.yaxis)):
        if not axis.bands:
            way.set_major_locator(_locator())
            way.set_major_formatter(_formatter(axis.show))
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    named = [series for series in chart.series if series.name]
    if len(named) > 1:
        axes.legend(fontsize="x-small", framealpha=0.7)


def _formatter(show: Show) -> Callable[[float, Any], str]:
    return lambda value, place: show(value)


def _locator() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(5, steps=[1, 2, 5, 10])


def _draw_series(axes: "Axes", chart: Chart, series: Series) -> None:
    colour = COLOURS[series.slot % len(COLOURS)]
    dash = DASHES[series.slot // len(COLOURS) % len(DASHES)]
    marker = MARKERS[series.slot % len(MARKERS)]
    label = series.name.replace("$", r"\$") or None
    if series.band:
        x, low, high = zip(*series.band, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
    if series.is_level:
        axes.axhline(series.line[-1][1], color=colour, linestyle=":", label=label)
        return
    if series.line:
        x, y = zip(*series.line, strict=True)
        axes.plot(x, y, dash, color=colour, linewidth=1.5, label=label)
        label = None
    if not series.has_dots:
        return
    for is_open in (False, True):
        marks = [mark for mark in series.marks if mark.is_open is is_open]
        if not marks:
            continue
        for mark in marks:
            if mark.ends is not None:
                axes.vlines(mark.x, *mark.ends, color=colour, alpha=0.5)
        face = "white" if is_open else colour
        size = 9 if chart.is_small and not chart.has_labels else 16
        axes.scatter(
            [mark.x for mark in marks],
            [mark.y for mark in marks],
            size,
            marker=marker,
            facecolors=face,
            edgecolors=colour,
            linewidths=0.8,
            label=label,
            zorder=3,
        )
        label = None


def _draw_heatmap(axes: "Axes", picture: Heatmap) -> None:
    drawn = axes.imshow(
        np.array(picture.shares), cmap="Blues", vmin=0, vmax=1, aspect="auto"
    )
    for names, set_ticks, label, title in (
        (picture.columns, axes.set_xticks, axes.set_xlabel, picture.column_title),
        (picture.rows, axes.set_yticks, axes.set_ylabel, picture.row_title),
    ):
        ticks = sample(len(names), 11)
        set_ticks(ticks, [names[i].replace("$", r"\$") for i in ticks])
        label(title)
    figure = axes.figure
    figure.colorbar(drawn, ax=axes, label="share of a client's examples")
