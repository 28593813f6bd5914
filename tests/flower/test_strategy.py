"""FedSPU as a strategy in a Flower app of one's own."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, MetricRecord

from fedspu.errors import SettingsError
from fedspu.flower import FedSPUStrategy
from fedspu.runs import simulate
from tests.flower.fleet import SETTINGS, House


def strategy_for(house: House, **given: Any) -> FedSPUStrategy:
    own = {n: v for n, v in house.config.items() if not n.startswith("deploy.")}
    return FedSPUStrategy(own, **{"devices": 3, "wait": 5.0, **given})


def test_a_strategy_plays_a_whole_run(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.start(0, 1, 2)
    seen: list[int] = []

    def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(t)
        return MetricRecord({"tensors": len(arrays)})

    result = strategy_for(house).start(house.grid, evaluate_fn=evaluate)
    alone = simulate(SETTINGS)
    state = alone.last.federation.global_state
    assert {n: a.numpy().tobytes() for n, a in result.arrays.items()} == {
        n: w.numpy().tobytes() for n, w in state.items()
    }
    for name in ("personal_accuracy", "personal_val_accuracy"):
        scores = [m[name] for m in result.evaluate_metrics_clientapp.values()]
        assert scores == [line[name] for line in alone.rounds]
    losses = [m["train_loss"] for m in result.train_metrics_clientapp.values()]
    assert losses == [line["train_loss"] for line in alone.rounds]
    assert seen == [1, 2, 3] == sorted(result.evaluate_metrics_serverapp)


def test_a_strategy_saves_its_run_and_goes_on(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.start(0, 1, 2)
    out = tmp_path / "own"
    strategy_for(house, out=out).start(house.grid, num_rounds=2)
    result = strategy_for(house, out=out).start(house.grid, num_rounds=3)
    assert list(result.evaluate_metrics_clientapp) == [3]


def test_what_has_no_effect_is_refused(tmp_path: Path) -> None:
    house = House(tmp_path)
    with pytest.raises(ValueError, match="initial_arrays: has no effect"):
        strategy_for(house).start(house.grid, initial_arrays=ArrayRecord())
    with pytest.raises(SettingsError, match=r"deploy.devices = 0: expected"):
        strategy_for(house, devices=0).start(house.grid)
    with pytest.raises(NotImplementedError, match="call start"):
        strategy_for(house).aggregate_train(1, [])
