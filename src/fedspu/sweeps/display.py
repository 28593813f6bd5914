"""A comparison while it is played: which runs, how far, and how long it still takes."""

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedspu.errors import StorageError
from fedspu.sweeps.cells import Cell
from fedspu.sweeps.compare import Watcher
from fedspu.sweeps.play import Planned
from fedspu.sweeps.progress import Following, Progress, RunProgress, Watched
from fedspu.sweeps.tuning import words
from fedspu.tasks.classification import classification
from fedspu.tasks.segmentation import segmentation
from fedspu.units import duration, shown

SHARES = {classification.metric.name, segmentation.metric.name}
"""Metrics that are shown in percent."""

REFRESH = 1.0
"""Seconds between two looks at the folder."""


NOBODY = "nobody is playing it: the same command resumes it"


class SweepDisplay(Watcher):
    """Shows a comparison: live on a terminal, else a line for each run that ends."""

    def __init__(self, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self.console = Console(stderr=True)
        self._following: Following | None = None
        self._live: Live | None = None
        self._what = ""
        self._last: RenderableType = Text()

    def __enter__(self) -> "SweepDisplay":
        """Show nothing until there is a plan."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def plan(self, out: Path, runs: Sequence[Planned], what: str) -> None:
        """Begin to show these runs."""
        self._stop()
        names = [self.part, "" if what == "comparison" else what]
        self._what, self._following = ", ".join(filter(None, names)), Following(out)
        if self.is_quiet or self._following.read().is_over:
            self._following = None
        elif self.console.is_terminal:
            self._live = Live(
                get_renderable=self._shown,
                console=self.console,
                refresh_per_second=1 / REFRESH,
                transient=True,
            )
            self._live.start(refresh=True)
        else:
            self._say(headline(self._following.read(), self._what, self.later))

    def begin(self, run: Planned) -> None:
        """A run is being prepared: there is no sign of it in the folder yet."""
        if self._following is not None:
            self._following.begin(run.path)

    def end(self, run: Planned, why: str | None) -> None:
        """Say that a run has ended, where nothing is shown live."""
        if self._following is None or self._live is not None:
            return
        became = "done" if why is None else f"failed: {why}"
        found = self._following.read()
        name = title(run.cell, [one.run.cell for one in found.runs])
        self._say(f"{name}: {became}; {headline(found, self._what, self.later)}")

    def finish(self, what: str) -> None:
        """Say what is done once all runs have ended."""
        if self._live is not None:
            self._what = what.removesuffix(" …")
        elif not self.is_quiet:
            self._say(what)

    def _shown(self) -> RenderableType:
        assert self._following is not None
        with suppress(StorageError):  # it is being removed; playing will say more
            self._last = picture(self._following.read(), self._what, self.later)
        return self._last

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # this is the display


def headline(found: Progress, what: str = "", later: float = 0.0) -> str:
    """How far it is, in a line: ``run 7 of 24, 2 at once, about 13:20 min left``.

    ``what`` is played comes first, if it is not simply a comparison. ``later``: so many
    rounds more take all parts after this one.
    """
    done, failed = found.count("finished"), found.count("failed")
    playing, number = found.count("playing"), len(found.runs)
    what = what or ("tuning" if found.is_tuning else "")
    parts = [what] if what else []
    if found.is_over or is_dead(found):
        parts.append(f"{done} of {number} runs finished")
    else:
        parts.append(f"run {min(done + failed + max(1, playing), number)} of {number}")
    if playing > 1:
        parts.append(f"{playing} at once")
    if failed:
        parts.append(f"{failed} failed")
    if is_dead(found):
        return f"{', '.join(parts)}; {NOBODY}"
    if not found.is_over:
        left = found.seconds_left
        if left is None:
            parts.append("time left: known after some rounds")
        else:
            most = "at most" if found.is_most else "about"
            total = left + later * _seconds_per_round(found)
            until = time.strftime("%H:%M", time.localtime(time.time() + total))
            end = " in all" if found.later else ""
            here = f", {duration(left)} for this part" if later else ""
            parts.append(f"{most} {duration(total)} left{end} (until {until}){here}")
    return ", ".join(parts)


def _seconds_per_round(found: Progress) -> float:
    """What a round of these runs took so far, with so many at once.

    The first ones are left out, if there are others: they may compile code.
    """
    played = [(run.round - 1, run.seconds - run.first) for run in found.runs]
    others = [one for one in played if one[0] > 0]
    listed = others or [(run.round, run.seconds) for run in found.runs]
    rounds = sum(number for number, _ in listed)
    seconds = sum(took for _, took in listed)
    return seconds / max(1, rounds) / max(1, found.parallel)


def is_dead(found: Progress) -> bool:
    """Whether there is something left to play, and nobody plays it."""
    return not found.is_played and (found.is_tuning or not found.is_over)


def picture(found: Progress, what: str = "", later: float = 0.0) -> RenderableType:
    """The headline, and a bar for each run that is being played."""
    table = Table.grid(padding=(0, 1))
    table.add_column(overflow="ellipsis", no_wrap=True, max_width=34)
    table.add_column(width=16)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    cells = [run.run.cell for run in found.runs]
    for run in found.runs:
        if run.state == "playing":
            table.add_row(title(run.run.cell, cells), *_row(run))
    return Group(Text(headline(found, what, later)), table)


def _row(run: RunProgress) -> tuple[RenderableType, ...]:
    is_share = run.metric in SHARES
    score = "" if run.score is None else f"personal {shown(run.score, is_share)}"
    if run.starting is not None:
        score = "starting: model, data …"
    bar = ProgressBar(total=max(1, run.run.rounds), completed=run.round, width=16)
    return bar, f"{run.round}/{run.run.rounds}", score


def title(cell: Cell, others: Iterable[Cell]) -> str:
    """A run in words, also what is tried, if that alone tells it from others."""
    if [other.title for other in others].count(cell.title) < 2:
        return cell.title
    return cell.title.replace(cell.method, f"{cell.method}, {words(cell.tuned)}", 1)


def watch_folder(out: Path) -> None:
    """On a terminal, show a comparison while another process plays it."""
    watched, console = Watched(out), Console()
    if not console.is_terminal:
        return
    with Live(console=console, refresh_per_second=1 / REFRESH, transient=True) as live:
        while (found := watched.read()).is_played:
            live.update(picture(found), refresh=True)
            time.sleep(REFRESH)
