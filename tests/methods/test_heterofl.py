"""HeteroFL against a slow one written by hand."""

from typing import Any

import pytest
import torch

from fedspu.federation.server import Federation
from fedspu.methods.method import Memory
from tests.methods.checks import NETS, assert_same_rounds, in_float64
from tests.oracles.federation import (
    ConvNet,
    client_of,
    play_all,
    request_for,
    run_for,
)
from tests.oracles.methods import HeteroFL

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "conv": ("conv", {"seed": 1}),
    "conv, stopping, momentum and decay": (
        "conv",
        {
            "seed": 2,
            "rounds": 4,
            "early_stopping": True,
            "train__momentum": 0.5,
            "train__weight_decay": 0.1,
        },
    ),
    "conv, batches of three": ("conv", {"seed": 3, "train__batch_size": 3}),
    "mlp, momentum": ("mlp", {"seed": 4, "train__momentum": 0.9, "train__lr": 0.03}),
    "mlp, stopping, decay, lean": (
        "mlp",
        {
            "seed": 5,
            "early_stopping": True,
            "train__weight_decay": 0.1,
            "train__saves": "lean",
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_heterofl_is_what_its_definition_says(case: str) -> None:
    build, net = NETS[CASES[case][0]]
    ready = in_float64("heterofl", build, data__alpha=0.3, **CASES[case][1])
    played, slow = play_all(ready), HeteroFL(ready, net)
    assert_same_rounds(ready, played, slow.play(), net)
    lacking = set()
    for each in played.rounds:
        for client, reply in each.replies():
            assert reply.active is not None
            rows = reply.active["(labels)"].tolist()
            assert rows == slow.labels(client)
            if len(rows) < 3:
                lacking.add(client)
    assert lacking  # or nothing was shown of the rows


def test_statistics_never_travel() -> None:
    ready = in_float64("heterofl", ConvNet, early_stopping=True)
    request = request_for(ready.plan, Federation(0, ready.plan.initial), 1, 0)
    reply, _ = client_of(ready).take_turn(request, Memory())
    for payload in (request.payload, reply.payload):
        assert "bn1.weight" in payload
        assert not any("running" in name for name in payload)
    for each in play_all(ready).rounds:
        state = each.federation.global_state
        assert bool((state["bn1.running_mean"] == 0).all())
        assert bool((state["bn1.running_var"] == 1).all())


def test_a_client_judges_the_global_model_with_statistics_of_its_own() -> None:
    run = run_for(method="heterofl", rounds=1)
    one, two = (run.global_model(client).state_dict() for client in (0, 1))
    assert torch.equal(one["conv1.weight"], two["conv1.weight"])
    assert not torch.equal(one["bn1.running_mean"], two["bn1.running_mean"])
    x, _ = run.examples.part(0, "train")
    with torch.no_grad():
        maps = run.global_model(0).get_submodule("conv1")(x)
    # 4x4 places in each example; batches of four, of equal weight.
    means = torch.stack([part.mean((0, 2, 3)) for part in cut_in_fours(maps)])
    assert torch.allclose(one["bn1.running_mean"], means.mean(0), atol=1e-6)


def cut_in_fours(values: torch.Tensor) -> list[torch.Tensor]:
    parts = list(values.split(4))
    if len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
