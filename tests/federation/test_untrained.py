"""What never trains (a frozen base, below adapters) reaches a client once."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedspu
from fedspu.federation.messages import pack_state, unpack_state
from fedspu.prepare import prepare


class Adapted(nn.Module):
    """A layer that is fixed, beside a small product that trains, as in LoRA."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


class AdaptedNet(nn.Module):
    """A fixed base with adapters, a fixed table of numbers, and a head that trains."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = Adapted(nn.Linear(64, 32), 4)
        self.second = Adapted(nn.Linear(32, 32), 4)
        self.register_buffer("scale", torch.rand(32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.flatten(1))) * self.scale
        out: Tensor = self.head(torch.relu(self.second(hidden)))
        return out


BASE = {
    "first.layer.weight",
    "first.layer.bias",
    "second.layer.weight",
    "second.layer.bias",
    "scale",
}
GIVEN: dict[str, Any] = {
    "data.name": "digits",
    "clients.number": 4,
    "clients.per_round": 4,
    "clients.capacities": (0.5, 1.0),
    "rounds": 3,
    "train.epochs": 1,
    "train.lr": 0.1,
    "workers": 1,
}


def run_of(method: str) -> fedspu.Run:
    return fedspu.simulate({**GIVEN, "method.name": method}, model=AdaptedNet)


def nbytes(state: Mapping[str, Tensor], names: set[str]) -> int:
    return sum(state[name].nbytes for name in names)


@pytest.mark.parametrize("method", ["fedspu", "fedavg", "hermes", "feddrop", "local"])
def test_a_fixed_base_reaches_each_client_once_and_never_again(method: str) -> None:
    run = run_of(method)
    w0 = run.plan.initial
    trained = set(w0) - BASE
    keeps_own = method in ("fedspu", "local")
    first = nbytes(w0, BASE | trained if keeps_own else BASE)
    sent = [line["bytes_initial"] for line in run.rounds]
    assert sent == [4 * first, 0, 0]
    most = 4 * nbytes(w0, trained)
    assert all(max(line["bytes_down"], line["bytes_up"]) <= most for line in run.rounds)


def test_a_personal_model_has_the_base_as_it_was() -> None:
    run = run_of("fedspu")
    state = run.personal_model(1).state_dict()
    for name in BASE:
        assert torch.equal(state[name], run.plan.initial[name])
    assert not torch.equal(state["head.weight"], run.plan.initial["head.weight"])


def test_the_servers_model_is_sent_without_what_never_trains() -> None:
    plan = prepare(GIVEN, model=AdaptedNet).plan
    state = {name: values.clone() for name, values in plan.initial.items()}
    state["head.bias"] += 1
    packed = pack_state(plan, state)
    assert len(packed) == nbytes(state, set(state) - BASE)
    found = unpack_state(plan, packed)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_model_in_which_everything_trains_has_nothing_else_to_send() -> None:
    plan = prepare(GIVEN).plan
    assert plan.untrained == ()
    assert set(plan.sent_initially) == set(plan.neurons.shapes)
    slim = replace(plan, method=prepare({**GIVEN, "method.name": "hermes"}).plan.method)
    assert not slim.sends_initial
