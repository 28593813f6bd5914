"""The memory in a comparison is that of the step which a client takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fedspu
from fedspu.neurons.slim import slim_model
from fedspu.profile.peak_memory import step_bytes
from fedspu.sweeps.step_costs import StepCosts
from tests.oracles.federation import examples, mlp


def costs(run: fedspu.Run, given: Any) -> dict[str, int]:
    return StepCosts(given).by_capacity(run.plan, run.last.federation)


def run_of(method: str, given: dict[str, Any], **more: Any) -> fedspu.Run:
    own = {n: v for n, v in given.items() if n not in ("model", "data.name")}
    return fedspu.simulate(
        {**own, **more, "method.name": method, "train.kernels": "torch"},
        model=mlp,
        data=examples(),
    )


def dense_peak(run: fedspu.Run) -> int:
    x, y = (torch.as_tensor(part[:8]) for part in examples())
    model = run.plan.build().train()
    return step_bytes(model, model.parameters(), x.float(), y, F.cross_entropy).peak


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_methods_that_train_whole_models_hold_a_dense_step(
    method: str, given: dict[str, Any]
) -> None:
    run = run_of(method, given, **{"train.batch_size": 8})
    found = costs(run, examples())
    assert set(found) == {"0.3", "0.5", "1.0"}
    assert set(found.values()) == {found["1.0"]}
    assert found["1.0"] == pytest.approx(dense_peak(run), rel=0.1)


def test_frozen_neurons_cost_less_and_dropped_ones_still_less(
    given: dict[str, Any],
) -> None:
    frozen, dropped = (
        costs(run_of(method, given), examples()) for method in ("fedspu", "feddrop")
    )
    for found in (frozen, dropped):
        assert found["0.3"] < found["0.5"] < found["1.0"]
    assert dropped["0.3"] < frozen["0.3"]


def test_a_slim_step_is_that_of_the_slim_model(given: dict[str, Any]) -> None:
    run = run_of("hermes", given, **{"train.batch_size": 8, "clients.per_round": 6})
    kept = run.last.federation.kept
    client = next(k for k in kept if float(run.plan.capacity(k)) == 0.3)
    slim = slim_model(run.plan.build().train(), run.plan.neurons, kept[client])
    x, y = (torch.as_tensor(part[:8]) for part in examples())
    peak = step_bytes(slim, slim.parameters(), x.float(), y, F.cross_entropy).peak
    assert costs(run, examples())["0.3"] == pytest.approx(peak, rel=0.1)


def test_each_kind_of_step_is_measured_once(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def count(self: StepCosts, plan: Any, active: Any) -> int:
        measured.append(1)
        return 1

    monkeypatch.setattr(StepCosts, "_measured", count)
    shared = StepCosts(examples())
    for seed in (0, 1):
        run = run_of("fedspu", given, seed=seed)
        shared.by_capacity(run.plan, run.last.federation)
    assert len(measured) == 3


def test_a_comparison_shows_it(tmp_path: Path, given: dict[str, Any]) -> None:
    found = fedspu.compare(
        ["fedspu", "hermes"], given, out=tmp_path / "out", seeds=[0], parallel=1
    )
    spu, hermes = found.records
    assert 0 < spu["step_bytes_at_p_0.3"] < spu["step_bytes_at_p_1.0"]
    assert hermes["step_bytes_at_p_0.3"] < spu["step_bytes_at_p_0.3"]
    assert "trains the whole model once" in str(found)
