"""The rivals' ``paper`` readings and the anchors, against slow ones written by hand."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedspu
from fedspu.errors import SettingsError
from fedspu.federation import client as client_module
from fedspu.federation.plan import Build
from fedspu.methods.sub_model.hermes import hermes
from tests.methods.checks import (
    CLOSE,
    NETS,
    assert_same_rounds,
    assert_same_sub_models,
    in_float64,
    listed,
)
from tests.oracles import methods as slow
from tests.oracles.federation import (
    ConvNet,
    distance,
    examples,
    folder_content,
    mlp,
    named,
    plan_for,
    play_all,
    prepared_for,
    run_for,
    same_bits,
    wide_mlp,
)
from tests.oracles.methods import (
    CONV,
    DROP,
    JOINED,
    RESIDUAL,
    FedAvg,
    FedDrop,
    FedMP,
    FedRolex,
    FedSelect,
    Finetuned,
    FjORD,
    Hermes,
    HeteroFL,
    Joined,
    PruneFL,
    Residual,
    Small,
    drop_mlp,
)

SLOW: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "feddrop": FedDrop,
    "fjord": FjORD,
    "hermes": Hermes,
    "fedmp": FedMP,
    "prunefl": PruneFL,
    "fedselect": FedSelect,
    "fedrolex": FedRolex,
}
KEEPERS = ("hermes", "fedmp", "prunefl", "fedselect")

READINGS: dict[str, dict[str, Any]] = {
    **{name: {"method__name": name} for name in SLOW},
    "small": {"method__name": "small"},
    "finetuned": {"method__name": "fedavg", "method__finetune": 1},
    "fjord original": {"method__name": "fjord", "method__reading": "original"},
    "heterofl": {"method__name": "heterofl"},
}

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
    "mlp, stopping, lean": (
        "mlp",
        {"seed": 4, "early_stopping": True, "rounds": 6, "train__saves": "lean"},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", SLOW)
def test_a_rival_is_what_its_definition_says(method: str, case: str) -> None:
    build, net = NETS[CASES[case][0]]
    ready = in_float64(method, build, **CASES[case][1])
    played, slow = play_all(ready), SLOW[method](ready, net)
    assert_same_rounds(ready, played, slow.play(), net)
    if method in KEEPERS:
        assert_same_sub_models(played, slow)
    else:
        memories = map(played.memory, played.federation.last)
        assert all(memory.own is None for memory in memories)


def test_those_cases_have_stopped_clients_and_clients_who_never_took_part() -> None:
    build, net = NETS["mlp"]
    stopping = Hermes(
        in_float64("hermes", build, **CASES["mlp, stopping, lean"][1]), net
    )
    stopping.play()
    assert stopping.stopped
    plain = FedAvg(in_float64("fedavg", ConvNet, **CASES["conv"][1]), CONV)
    plain.play()
    assert len(plain.own) < plain.number


# The anchors -------------------------------------------------------------------------


@pytest.mark.parametrize("net", NETS)
def test_small_is_federated_averaging_of_the_first_neurons_of_w0(net: str) -> None:
    build, by_hand = NETS[net]
    given = {"seed": 2, "early_stopping": True, "clients__capacities": [1.0, 0.5]}
    ready = in_float64("small", build, **given)
    w0 = in_float64("fedavg", build, **given).plan.initial
    slow = Small(ready, by_hand, w0)
    assert distance({n: ready.plan.initial[n] for n in slow.w0}, slow.w0) == 0
    assert_same_rounds(ready, play_all(ready), slow.play(), slow.net)


@pytest.mark.parametrize(
    ("build", "net"), [(ConvNet, CONV), (drop_mlp, DROP)], ids=["conv", "dropout"]
)
def test_fine_tuning_is_local_epochs_on_the_global_model_before_it_is_judged(
    build: Build, net: Any
) -> None:
    given: dict[str, Any] = {"seed": 3, "train__momentum": 0.5, "judge__every": 1}
    ready = in_float64("fedavg", build, method__finetune=2, **given)
    slow = Finetuned(ready, net)
    rounds = slow.play()
    assert_same_rounds(ready, play_all(ready), rounds, net)
    plain = FedAvg(ready, net).play()
    assert [r.personal for r in plain] != [r.personal for r in rounds]
    assert [r.global_accuracy for r in plain] == [r.global_accuracy for r in rounds]


@pytest.mark.parametrize("method", ["hermes", "fedselect", "feddrop", "heterofl"])
def test_layers_that_are_read_together_are_cut_each_for_itself(method: str) -> None:
    ready = in_float64(method, Joined, seed=2)
    slow = {**SLOW, "heterofl": HeteroFL}[method](ready, JOINED)
    assert_same_rounds(ready, play_all(ready), slow.play(), JOINED)


# Scoring -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hermes", "fedmp", "prunefl", "fedselect"])
def test_layers_whose_neurons_are_one_group_are_scored_together(method: str) -> None:
    ready = in_float64(method, Residual, seed=2)
    played, slow = play_all(ready), SLOW[method](ready, RESIDUAL)
    assert_same_rounds(ready, played, slow.play(), RESIDUAL)
    assert_same_sub_models(played, slow)


@pytest.mark.parametrize("method", ["hermes", "prunefl", "feddrop", "fjord"])
def test_dropout_has_one_stream_in_scoring_and_another_in_training(method: str) -> None:
    ready = in_float64(method, drop_mlp, seed=2, train__lr=0.3)
    slow = SLOW[method](ready, DROP)
    assert_same_rounds(ready, play_all(ready), slow.play(), DROP)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients that have scored their neurons so far."""
    clients: list[int] = []

    def noted(seed: int, purpose: str, round: int = 0, client: int = 0) -> Any:
        if purpose == "scoring":
            clients.append(client)
        return fedspu.stream(seed, purpose, round, client)

    monkeypatch.setattr(client_module, "stream", noted)
    return clients


@pytest.mark.parametrize("method", ["hermes", "fedmp", "prunefl"])
def test_a_client_scores_once_and_never_if_it_keeps_everything(
    method: str, scored: list[int]
) -> None:
    play_all(prepared_for(mlp, method=method, clients__per_round=6, rounds=2))
    assert scored == [0, 1, 2, 3]  # the other two have capacity 1


@pytest.mark.parametrize("method", ["hermes", "fedmp", "prunefl"])
def test_strong_clients_that_keep_everything_are_federated_averaging(
    method: str,
) -> None:
    given: dict[str, Any] = {"clients__capacities": [1.0], "rounds": 2}
    one, two = (play_all(prepared_for(method=m, **given)) for m in (method, "fedavg"))
    assert same_bits(one.federation.global_state, two.federation.global_state)


def test_hermes_fedmp_and_prunefl_differ_in_the_neurons_they_keep() -> None:
    kept = {}
    for method in ("hermes", "fedmp", "prunefl"):
        played = play_all(prepared_for(mlp, method=method, seed=3))
        owns = [played.memory(k).own for k in sorted(played.federation.last)]
        kept[method] = [listed(own.active or {}) for own in owns if own]
    assert kept["hermes"] != kept["fedmp"] != kept["prunefl"] != kept["hermes"]


# FedSelect ---------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2, 9])
def test_fedselect_grows_from_a_quarter_to_a_half_and_never_lets_go(
    rounds: int,
) -> None:
    ready = prepared_for(
        wide_mlp, method="fedselect", clients__per_round=6, rounds=rounds, seed=1
    )
    had: dict[int, set[int]] = {}
    for played in play_all(ready).rounds:
        t = played.federation.round
        p = Fraction(1, 4) + Fraction(t - 1, 4 * max(1, rounds - 1))
        for client, reply in played.replies():
            assert reply.active is not None
            kept = set(reply.active["1"].tolist())
            assert len(kept) == 200 * p // 1
            assert kept >= had.get(client, set())
            had[client] = kept


def test_fedselect_scores_anew_only_when_it_needs_more_neurons(
    scored: list[int],
) -> None:
    p = [Fraction(1, 4) + Fraction(t, 28) for t in range(8)]
    wanted = [[8 * q // 1, 5 * q // 1] for q in p]  # 2 1, 2 1, 2 1, 2 1, 3 1, 3 2, ...
    ready = prepared_for(mlp, method="fedselect", rounds=8, clients__per_round=6)
    found = []
    for played in play_all(ready).rounds:
        active = dict(played.replies())[5].active
        assert active is not None
        found.append([len(kept) for kept in active.values()])
    assert found == wanted
    changes = 1 + sum(a != b for a, b in pairwise(wanted))
    assert scored == changes * [0, 1, 2, 3, 4, 5]


# Norms that stay with the client -----------------------------------------------------


@pytest.mark.parametrize("method", KEEPERS)
def test_with_local_norms_a_client_keeps_those_of_its_neurons(method: str) -> None:
    ready = in_float64(
        method, ConvNet, norm__policy="local", seed=2, rounds=4, early_stopping=True
    )
    played, slow = play_all(ready), SLOW[method](ready, CONV)
    assert_same_rounds(ready, played, slow.play(), CONV)
    assert_same_sub_models(played, slow)


@pytest.mark.parametrize("reading", sorted(set(READINGS) - set(KEEPERS)))
def test_local_norms_are_refused_where_clients_keep_no_model(reading: str) -> None:
    with pytest.raises(SettingsError, match=r"norm\.policy = 'local': clients of \w+ "):
        plan_for(norm__policy="local", **READINGS[reading])


# The model that was judged -----------------------------------------------------------


def accuracy(model: nn.Module, run: fedspu.Run, client: int, part: str) -> float:
    x, y = run.examples.part(client, part)
    with torch.no_grad():
        return int((model(x).argmax(1) == y).sum()) / len(y)


@pytest.mark.parametrize("reading", READINGS)
def test_a_personal_model_is_the_one_that_was_judged(
    reading: str, tmp_path: Path
) -> None:
    given = {"seed": 1, "rounds": 2, "train__epochs": 1, **READINGS[reading]}
    run = run_for(out=tmp_path / "run", **given)
    recorded = run.last.scores.personal
    for client in range(6):
        model = run.personal_model(client)
        assert not any(layer.training for layer in model.modules())
        assert accuracy(model, run, client, "test") == recorded[client].test
        assert accuracy(model, run, client, "val") == recorded[client].val
        if client % 3:  # enough to see it
            continue
        loaded = fedspu.load_personal(tmp_path / "run", client, ConvNet, examples())
        assert not any(layer.training for layer in loaded.modules())
        assert same_bits(loaded.state_dict(), model.state_dict())
    test, val = (sum(values) / 6 for values in zip(*recorded.values(), strict=True))
    assert run.summary["personal_accuracy"] == test
    assert run.summary["personal_val_accuracy"] == val


BY_CAPACITY = [[1, 1], [1, 1], [2, 3], [2, 3], [4, 6], [4, 6]]  # p = .3, .5, 1


@pytest.mark.parametrize(
    ("reading", "sizes"),
    [
        ("hermes", BY_CAPACITY),
        ("fedselect", [[1, 1]] * 6),  # p = .25, as this is the first round
        ("fjord", BY_CAPACITY),
        ("fjord original", BY_CAPACITY),
        ("heterofl", BY_CAPACITY),
        ("small", [[1, 1]] * 6),
        ("feddrop", [[4, 6]] * 6),
    ],
)
def test_a_personal_model_has_the_neurons_of_its_client_and_no_others(
    reading: str, sizes: list[list[int]]
) -> None:
    run = run_for(clients__per_round=6, rounds=1, train__epochs=1, **READINGS[reading])
    found = [
        [len(values) for name, values in model.state_dict().items() if name in CONVS]
        for model in map(run.personal_model, range(6))
    ]
    assert found == sizes


CONVS = ("conv1.bias", "conv2.bias")


def test_a_client_that_never_took_part_holds_the_whole_of_w0() -> None:
    run = run_for(method="hermes", clients__per_round=1, rounds=1)
    (taken,) = run.last.federation.last
    for client in set(range(6)) - {taken}:
        assert same_bits(run.personal_model(client).state_dict(), run.plan.initial)


def test_the_global_model_of_a_run_is_whole() -> None:
    run = run_for(method="hermes", rounds=1)
    assert same_bits(run.global_model().state_dict(), run.last.federation.global_state)


# Runs that were interrupted ----------------------------------------------------------


@pytest.mark.parametrize(
    "reading", ["hermes", "fedselect", "fjord original", "heterofl"]
)
def test_a_run_that_was_interrupted_ends_with_the_same_bytes(
    reading: str, tmp_path: Path
) -> None:
    given = {
        "seed": 1,
        "rounds": 4,
        "train__epochs": 1,
        "early_stopping": True,
        **READINGS[reading],
    }

    def stop(plan: Any, played: Any) -> None:
        if played.federation.round == 2:
            raise KeyboardInterrupt

    run_for(out=tmp_path / "whole", **given)
    with pytest.raises(KeyboardInterrupt):
        fedspu.simulate(
            named(out=tmp_path / "cut", **given),
            model=ConvNet,
            data=examples(),
            watch=stop,
        )
    fedspu.resume(tmp_path / "cut", model=ConvNet, data=examples())
    assert folder_content(tmp_path / "cut") == folder_content(tmp_path / "whole")


# Settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method__name": "hermes", "method__reading": "original"},
            "method.reading = 'original': hermes has only paper here",
        ),
        (
            {"method__name": "heterofl", "method__reading": "paper"},
            "method.reading = 'paper': heterofl has only original here",
        ),
        (
            {"method__name": "hermes", "method__finetune": 2},
            r"method.finetune = 2: hermes \(paper\) has no such option; fedavg",
        ),
        (
            {"method__name": "small", "method__finetune": 2},
            r"method.finetune = 2: small \(paper\) has no such option; fedavg",
        ),
        (
            {"method__name": "fjord", "method__distillation": True},
            r"method.distillation = True: fjord \(paper\) has no such option; fjord "
            r"\(original\)",
        ),
        (
            {"method__name": "fedspu", "method__distillation": True},
            r"method.distillation = True: fedspu \(paper\) has no such option",
        ),
        (
            {"method__name": "fedavg", "method__finetune": -1},
            "method.finetune = -1: ",
        ),
        (
            {"method__name": "fjord", "method__reading": "mine"},
            "method.reading = 'mine': ",
        ),
        (
            {"method__name": "tests.methods.test_rivals:nowhere"},
            "method = 'tests.methods.test_rivals:nowhere': .*rivals.py has no nowhere",
        ),
        (
            {"method__name": "tests.methods.test_rivals:READINGS"},
            "is a dict; expected a fedspu.methods.method.Method",
        ),
        (
            {
                "method__name": "tests.methods.test_rivals:mine",
                "method__reading": "original",
            },
            "method.reading = 'original': ",
        ),
    ],
)
def test_settings_that_a_method_does_not_have_are_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        plan_for(**given)


mine = replace(hermes, name="mine")


def test_a_method_may_be_a_record_of_ones_own() -> None:
    own = run_for(method="tests.methods.test_rivals:mine", rounds=2)
    theirs = run_for(method="hermes", rounds=2)
    assert same_bits(
        own.last.federation.global_state, theirs.last.federation.global_state
    )
    assert own.plan.method.name == "mine"


def test_a_random_sub_model_may_travel_as_the_stream_it_was_drawn_from() -> None:
    ready = prepared_for(wide_mlp, method="feddrop")
    for played in play_all(ready).rounds:
        for client, reply in played.replies():
            rng = fedspu.stream(0, "neurons", played.federation.round, client)
            number = 200 * ready.plan.capacity(client) // 1
            assert reply.active is not None
            assert reply.active["1"].tolist() == sorted(
                rng.permutation(200)[:number].tolist()
            )
            # 15 and 32 of header, a letter and the key of 16, and "the same".
            cost = played.answers[client].cost
            assert cost.index_bytes == 15 + 17 + 32 + 1


def test_the_reference_is_not_the_code_it_checks() -> None:
    text = Path(slow.__file__).read_text()
    imported = {
        line for line in text.splitlines() if line.startswith(("from ", "import "))
    }
    assert {line for line in imported if "fedspu" in line} == {
        "from fedspu import State, stream",
        "from fedspu.random_streams import torch_stream",
        "from fedspu.prepare import Prepared",
    }
    assert CLOSE <= 1e-10
