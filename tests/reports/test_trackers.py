"""Trackers: TensorBoard and MLflow for real where they are installed."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedspu.errors import SettingsError
from fedspu.reports.trackers import TRACKERS, Tracking, check_tracker, numbers
from fedspu.runs import Run, simulate
from tests.oracles.federation import examples, mlp, named


def tracked(name: str, folder: Path) -> Run:
    """A small run that is followed by this tracker."""
    tracking = Tracking(name, folder)
    run = simulate(named(rounds=2), model=mlp, data=examples(), watch=tracking.watch)
    tracking.close(run.summary)
    return run


@pytest.mark.filterwarnings("ignore")  # of libraries that are not ours
def test_tensorboard_has_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked("tensorboard", tmp_path)
    events: Any = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = events.Scalars("round/personal_accuracy")
    assert [event.step for event in found] == [1, 2]
    wanted = [line["personal_accuracy"] for line in run.rounds]
    assert [event.value for event in found] == pytest.approx(wanted)
    (last,) = events.Scalars("summary/personal_accuracy")
    assert last.value == pytest.approx(run.summary["personal_accuracy"])


@pytest.mark.filterwarnings("ignore")  # of libraries that are not ours
def test_mlflow_has_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    run = tracked("mlflow", tmp_path / "mine")
    client = mlflow.MlflowClient()
    (found,) = client.search_runs(["0"])
    assert found.info.run_name == "mine"
    assert found.data.params["rounds"] == "2"
    history = client.get_metric_history(found.info.run_id, "personal_accuracy")
    wanted = [line["personal_accuracy"] for line in run.rounds]
    assert [metric.value for metric in history] == pytest.approx(wanted)
    assert [metric.step for metric in history] == [1, 2]
    assert found.info.status == "FINISHED"


def test_wandb_is_called_as_it_wants_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    summary: dict[str, float] = {}
    ends: list[bool] = []
    begun: dict[str, Any] = {}

    def init(**given: Any) -> Any:
        begun.update(given)
        return SimpleNamespace(
            log=lambda values, step: logged.append((step, values)),
            summary=summary,
            finish=lambda: ends.append(True),
        )

    stand_in = ModuleType("wandb")
    stand_in.__spec__ = SimpleNamespace()  # type: ignore[assignment]  # it is installed
    stand_in.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.delitem(sys.modules, "fedspu.reports.trackers.as_wandb", raising=False)
    run = tracked("wandb", tmp_path / "mine")
    assert (begun["project"], begun["name"]) == ("fedspu", "mine")
    assert begun["config"]["rounds"] == 2
    assert [t for t, _ in logged] == [1, 2]
    assert logged[1][1]["personal_accuracy"] == run.rounds[1]["personal_accuracy"]
    assert summary["personal_accuracy"] == run.summary["personal_accuracy"]
    assert ends == [True]
    sys.modules.pop("fedspu.reports.trackers.as_wandb", None)


def test_numbers_alone_are_handed_in() -> None:
    line = {"round": 3, "seed": 0, "a": 1, "b": 0.5, "c": None, "d": [1], "e": True}
    assert numbers(line) == {"a": 1.0, "b": 0.5}


def test_a_tracker_that_is_not_known_or_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SettingsError, match=r"--log tensorbord: .*did you mean tens"):
        check_tracker("tensorbord")
    monkeypatch.setattr("fedspu.reports.trackers.find_spec", lambda name: None)
    for name in TRACKERS:
        with pytest.raises(SettingsError, match=rf"is not installed; .*\.\[{name}\]"):
            check_tracker(name)
