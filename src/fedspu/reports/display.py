"""A run's progress while it is played: a live bar on a terminal, else plain lines."""

import sys
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Round
from fedspu.units import size

BAR, TIME_LEFT, GAPS = 12, 7, 4
"""Columns of the bar, of the time left, and between the five parts of a line."""


class Display:
    """Shows a run's progress; use it as a context, and pass ``watch`` to the run."""

    def __init__(self, label: str, is_quiet: bool = False) -> None:
        self.label, self.is_quiet = label, is_quiet
        self.console = Console(stderr=True)
        self.exchanged = 0
        self._task = TaskID(0)
        self._begun: TaskID | None = None
        self._bar: Progress | None = None
        if self.console.is_terminal and not is_quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=BAR),
                TextColumn("{task.fields[place]}"),
                TextColumn("{task.fields[news]}"),
                TimeRemainingColumn(),
                console=self.console,
            )

    def __enter__(self) -> "Display":
        if self._bar:
            self._task = self._bar.add_task(
                f"{self.label} preparing".lstrip(),
                total=None,
                news="data, model",
                place="",
            )
            self._bar.start()
        elif not self.is_quiet:
            self._say(f"{self.label} preparing: data, model".lstrip())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            if kind is not None and self._begun is None:
                self._bar.update(self._task, visible=False)
            self._bar.stop()

    def note(self, text: str) -> None:
        """Say something, above the bar if there is one."""
        if self._bar:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self.is_quiet:
            self._say(text)

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # this is the display

    def watch(self, plan: Plan, played: Round) -> None:
        """Show one round."""
        costs = [answer.cost for answer in played.answers.values()]
        self.exchanged += sum(cost.bytes_down + cost.bytes_up for cost in costs)
        stopped = len(played.federation.stopped)
        going = plan.num_clients - stopped
        scores, show = played.scores, plan.task.metric.show
        personal, global_ = scores.personal_mean, scores.global_
        shown = (
            f"personal {show(personal and personal.test)}",
            f"global {show(global_ and global_.test)}",
            size(self.exchanged),
            f"{going} on, {stopped} stopped",
        )
        t, rounds = played.federation.round, plan.settings.rounds
        label, place = f"{self.label} round".lstrip(), f"{t}/{rounds}"
        if played.federation.is_finished:
            label, place = f"{self.label} last models".lstrip(), ""
        if self._bar:
            if self._begun is None:
                self._bar.update(self._task, visible=False)
                self._begun = self._bar.add_task(
                    label, total=rounds, completed=t - 1, news="", place=""
                )
            self._bar.update(
                self._begun,
                completed=min(t, rounds),
                news=_fitting(shown, self.console.width - len(label + place)),
                place=place,
            )
        elif not self.is_quiet:
            line = "  ".join((*shown[:2], f"clients {shown[3]}", shown[2]))
            self._say(f"{label} {place}  {line}")


def _fitting(news: Sequence[str], width: int) -> str:
    """As much news as fits beside the bar and the time left; the first first."""
    room = width - BAR - TIME_LEFT - GAPS
    while len(news) > 1 and len("  ".join(news)) > room:
        news = news[:-1]
    return "  ".join(news)
