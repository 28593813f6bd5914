"""The personalization methods against slow ones written by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedspu
from fedspu.neurons.table import Neurons
from fedspu.training.last_layer import last_layers
from tests.methods.checks import (
    CLOSE,
    NETS,
    assert_same_personal_models,
    assert_same_rounds,
    in_float64,
)
from tests.oracles.federation import (
    ConvNet,
    examples,
    mlp,
    play_all,
    prepared_for,
    run_for,
    same_bits,
)
from tests.oracles.personalized import APFL, SLOW, FedALA

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "conv": ("conv", {"seed": 1}),
    "conv, stopping, momentum and decay": (
        "conv",
        {
            "seed": 2,
            "rounds": 5,
            "early_stopping": True,
            "train__momentum": 0.5,
            "train__weight_decay": 0.2,
        },
    ),
    "mlp, momentum": ("mlp", {"seed": 3, "train__momentum": 0.9, "train__lr": 0.03}),
}

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "a weak pull": ("ditto", {"method__pull": 0.1}),
    "nearly all its own": ("apfl", {"method__mix": 0.9}),
    "a share that stays": ("apfl", {"method__adaptive": False}),
    "a long head": ("fedrep", {"method__head_epochs": 4}),
    "a slow mix of half": ("fedala", {"method__mix_lr": 0.2, "method__share": 0.5}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", SLOW)
def test_a_method_is_what_its_definition_says(method: str, case: str) -> None:
    build, net = NETS[CASES[case][0]]
    ready = in_float64(method, build, **CASES[case][1])
    played, slow = play_all(ready), SLOW[method](ready, net)
    assert_same_rounds(ready, played, slow.play(), net)
    assert_same_personal_models(played, slow)


@pytest.mark.parametrize("name", OPTIONS)
def test_its_options_are_what_they_say(name: str) -> None:
    method, given = OPTIONS[name]
    build, net = NETS["conv"]
    ready = in_float64(method, build, seed=1, rounds=4, **given)
    played, slow = play_all(ready), SLOW[method](ready, net)
    assert_same_rounds(ready, played, slow.play(), net)
    assert_same_personal_models(played, slow)
    plain = play_all(in_float64(method, build, seed=1, rounds=4))
    assert any(
        not same_bits(played.own(k), plain.own(k)) for k in played.federation.last
    )


def test_apfl_remembers_its_own_weights_and_their_share() -> None:
    build, net = NETS["mlp"]
    ready = in_float64("apfl", build, seed=3)
    played, slow = play_all(ready), APFL(ready, net)
    slow.play()
    assert len(slow.shares) > 2
    for client, share in slow.shares.items():
        extra = played.memory(client).extra
        assert float(extra["share"]) == pytest.approx(share, abs=CLOSE)
        assert 0 < share < 1
        for name, values in slow.weights[client].items():
            found = extra[f"own:{name}"]
            assert float((found - values).abs().max()) < CLOSE


def test_fedala_remembers_how_it_mixes() -> None:
    build, net = NETS["mlp"]
    ready = in_float64("fedala", build, seed=1, rounds=5)
    played, slow = play_all(ready), FedALA(ready, net)
    slow.play()
    assert slow.mix  # someone took part twice
    for client in played.federation.last:
        extra = played.memory(client).extra
        assert extra.keys() == slow.mix.get(client, {}).keys()
        for name, values in slow.mix.get(client, {}).items():
            assert float((extra[name] - values).abs().max()) < CLOSE
            assert bool(((values >= 0) & (values <= 1)).all())
    assert any(bool((v < 1).any()) for mix in slow.mix.values() for v in mix.values())


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbn"])
def test_what_stays_is_never_sent(method: str) -> None:
    ready = prepared_for(method=method)
    w0, played = ready.plan.initial, play_all(ready)
    stays = ready.plan.method.stays(ready.plan.neurons)
    assert stays
    for name in stays:
        assert torch.equal(played.federation.global_state[name], w0[name])
        is_trained = [
            not torch.equal(played.own(k)[name], w0[name])
            for k in played.federation.last
        ]
        assert all(is_trained)
    blocks = ready.plan.travelling(ready.plan.neurons.everything())
    assert not stays & blocks.keys()


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbn"])
def test_a_server_without_a_whole_model_is_not_judged(method: str) -> None:
    run = run_for(method=method, rounds=2)
    assert run.summary["global_accuracy"] is None
    assert run.summary["personal_accuracy"] is not None


def table(**shapes: tuple[int, ...]) -> Neurons:
    return Neurons(
        groups=(), shapes={n.replace("_", "."): s for n, s in shapes.items()}
    )


def test_a_head_is_the_last_layers_with_weights_and_what_follows_them() -> None:
    net = table(
        a_weight=(4, 3), a_bias=(4,), n_weight=(4,), b_weight=(5, 4), m_weight=(5,)
    )
    assert last_layers(net, 1) == {"b.weight", "m.weight"}
    assert last_layers(net, 2) == set(net.shapes)
    assert last_layers(net, 9) == set(net.shapes)


class OneLayer(nn.Module):
    """A model that is all head."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(x.flatten(1))
        return scores


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_a_model_of_one_layer_has_nothing_to_share(method: str) -> None:
    given: dict[str, Any] = {"rounds": 2, "train__epochs": 2, "judge__clients": 6}
    run = run_for(OneLayer, method=method, **given)
    assert run.summary["bytes_up"] == 0
    if method == "fedper":
        alone = run_for(OneLayer, method="local", **given)
        for client in range(6):
            ours, theirs = (r.personal_model(client) for r in (run, alone))
            assert same_bits(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("method", SLOW)
def test_extra_memory_survives_a_run_folder(method: str, tmp_path: Any) -> None:
    run = run_for(method=method, out=tmp_path / "run", rounds=3, seed=1)
    for client in range(6):
        loaded = fedspu.load_personal(tmp_path / "run", client, ConvNet, examples())
        assert same_bits(loaded.state_dict(), run.personal_model(client).state_dict())


def test_a_share_of_nothing_is_federated_averaging() -> None:
    """By PyTorch: compiled epochs round differently than APFL's own loop does."""
    same: dict[str, Any] = {"rounds": 2, "train__kernels": "torch"}
    given: dict[str, Any] = {"method__mix": 0.0, "method__adaptive": False}
    mixed, plain = (
        play_all(prepared_for(mlp, **same, **g))
        for g in ({"method": "apfl", **given}, {"method": "fedavg"})
    )
    state = plain.federation.global_state
    assert same_bits(mixed.federation.global_state, state)
