"""Other programs that show runs: each is an extra, and has a file of its own here.

A tracker is begun with the first round, so that a run that cannot begin leaves nothing.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedspu.errors import SettingsError, how_to_install
from fedspu.settings_text import flatten, nearest

if TYPE_CHECKING:
    from fedspu.federation.plan import Plan
    from fedspu.federation.rounds import Round

TRACKERS = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
"""Name, which is also its extra -> the library that it needs."""


HOW_TO_LOOK = {
    "tensorboard": "TensorBoard: `tensorboard --logdir {folder}/tensorboard`",
    "mlflow": "MLflow: `mlflow ui` here, or the server that MLFLOW_TRACKING_URI names",
}
"""What to type to see a run; Weights & Biases says it by itself."""


class Tracker(Protocol):
    """Where a run's numbers go."""

    def log(self, t: int, values: Mapping[str, float]) -> None:
        """The numbers of round t."""

    def close(self, summary: Mapping[str, float]) -> None:
        """The run has finished with these numbers."""


def check_tracker(name: str) -> None:
    """Refuse a tracker that is not known or not installed."""
    if name not in TRACKERS:
        raise SettingsError(
            f"--log {name}: expected one of {', '.join(TRACKERS)}"
            f"{nearest(name, list(TRACKERS))}"
        )
    if find_spec(TRACKERS[name]) is None:
        raise SettingsError(
            f"--log {name}: {TRACKERS[name]} is not installed; install it with: "
            f"{how_to_install(name)}"
        )


class Tracking:
    """Hands a run's numbers to a tracker; pass ``watch`` to the run."""

    def __init__(self, name: str, folder: Path) -> None:
        check_tracker(name)
        self.name, self.folder = name, folder
        self._tracker: Tracker | None = None

    def watch(self, plan: "Plan", played: "Round") -> None:
        """Hand in one round."""
        from fedspu.federation.record import record_round

        if self._tracker is None:
            begin: Callable[..., Tracker] = import_module(
                f"fedspu.reports.trackers.as_{self.name}"
            ).begin
            given = dict(flatten(plan.settings.model_dump(mode="json")))
            self._tracker = begin(self.folder, given)
        line = record_round(plan, played, {})["rounds.jsonl"][0]
        self._tracker.log(line["round"], numbers(line))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Hand in the summary of a finished run."""
        if self._tracker is not None:
            self._tracker.close(numbers(summary))
            self._tracker = None


def how_to_look(name: str | None, folder: Path) -> str:
    """What to type to see a run in a tracker; empty if there is none to tell of."""
    return HOW_TO_LOOK.get(name or "", "").format(folder=folder)


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record; lists, texts and what is not known are left out."""
    return {
        name: float(value)
        for name, value in line.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name not in ("round", "seed")
    }
