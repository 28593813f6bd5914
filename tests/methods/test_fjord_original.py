"""FjORD's original reading against a slow one written by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedspu import State
from fedspu.federation.plan import Build
from fedspu.prepare import Prepared
from tests.methods.checks import CLOSE, NETS, assert_same_rounds, in_float64
from tests.oracles.federation import (
    ConvNet,
    Played,
    play_all,
    prepared_for,
    run_for,
    same_bits,
)
from tests.oracles.methods import JOINED, FjORDOriginal, Joined, Net, is_statistic

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "conv": ("conv", {"seed": 1}),
    "conv, none of full width": (
        "conv",
        {"seed": 5, "clients__capacities": [0.8, 0.3], "early_stopping": True},
    ),
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
    "conv, distilled, lean": (
        "conv",
        {"seed": 3, "method__distillation": True, "train__saves": "lean"},
    ),
    "mlp, momentum": ("mlp", {"seed": 4, "train__momentum": 0.9, "train__lr": 0.03}),
    "mlp, distilled, stopping": (
        "mlp",
        {
            "seed": 6,
            "method__distillation": True,
            "early_stopping": True,
            "train__momentum": 0.5,
        },
    ),
}


def original(build: Build, **given: Any) -> Prepared:
    return in_float64("fjord", build, method__reading="original", **given)


def by_hand(ready: Prepared, build: Build, net: Net) -> FjORDOriginal:
    seed = ready.plan.settings.seed
    w0 = in_float64("fedavg", build, seed=seed).plan.initial
    return FjORDOriginal(ready, net, w0)


def row(state: State, i: int) -> State:
    """A state with the statistics of one width; they have a row for each."""
    return {
        name: values[i] if is_statistic(name) else values
        for name, values in state.items()
    }


def at_last_width(played: Played) -> Played:
    """The same, its global states with the statistics of the last width alone."""
    rounds = [
        replace(
            each,
            federation=replace(
                each.federation, global_state=row(each.federation.global_state, -1)
            ),
        )
        for each in played.rounds
    ]
    return replace(played, rounds=rounds)


@pytest.mark.parametrize("case", CASES)
def test_fjord_original_is_what_its_definition_says(case: str) -> None:
    build, net = NETS[CASES[case][0]]
    ready = original(build, **CASES[case][1])
    played, slow = play_all(ready), by_hand(ready, build, net)
    assert_same_rounds(ready, at_last_width(played), slow.play(), net)

    for each, statistics in zip(played.rounds, slow.history, strict=True):
        for i, expected in enumerate(statistics):
            found = row(each.federation.global_state, i)
            for name, values in expected.items():
                there, beyond = found[name].split(
                    [len(values), len(found[name]) - len(values)]
                )
                assert float((there - values).abs().max()) < CLOSE
                # What that width does not have is as in w0.
                assert bool((beyond == ("var" in name)).all())
        for client, reply in each.replies():
            assert reply.active is not None
            widths = reply.active.get("(widths)", torch.arange(0)).tolist()
            up_to = sum(p <= ready.plan.capacity(client) for p in slow.widths)
            assert widths == (list(range(up_to)) if statistics[0] else [])


def test_widths_have_statistics_of_their_own() -> None:
    ready = original(ConvNet, seed=1)
    means = play_all(ready).federation.global_state["bn1.running_mean"]
    assert means.shape == (3, 4)
    assert len({float(mean) for mean in means[:, 0]}) == 3


def test_a_width_that_nobody_drew_keeps_its_statistics() -> None:
    weak = original(ConvNet, rounds=1, clients__per_round=1, seed=1)
    (only,) = play_all(weak).rounds
    (client,) = only.answers
    up_to = sum(p <= weak.plan.capacity(client) for p in (0.3, 0.5, 1.0))
    means = only.federation.global_state["bn2.running_mean"]
    assert up_to < 3
    assert bool((means[up_to:] == 0).all())
    assert bool((means[:up_to, 0] != 0).all())


@pytest.mark.parametrize("distillation", [False, True])
def test_of_one_width_both_readings_are_the_same(distillation: bool) -> None:
    given: dict[str, Any] = {
        "method__name": "fjord",
        "clients__capacities": [0.5],
        "rounds": 2,
    }
    one = play_all(prepared_for(**given))
    given |= {"method__reading": "original", "method__distillation": distillation}
    two = play_all(prepared_for(**given))
    assert same_bits(one.federation.global_state, two.federation.global_state)


def test_a_width_is_cut_from_layers_that_are_read_together() -> None:
    ready = original(Joined, seed=1, method__distillation=True, train__momentum=0.5)
    slow = by_hand(ready, Joined, JOINED)
    assert_same_rounds(ready, play_all(ready), slow.play(), JOINED)


def grouped() -> nn.Module:
    """A convolution whose two groups of neurons are cut alike."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 12, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * 16, 3),
    )


def test_a_width_may_be_cut_from_a_slice_of_grouped_convolutions() -> None:
    # At p = .5 the second has as many inputs as groups, as a depthwise one has.
    run = run_for(
        grouped,
        method__name="fjord",
        method__reading="original",
        clients__capacities=[0.34, 0.5, 1.0],
        clients__per_round=6,
        rounds=1,
    )
    sizes = [
        tuple(model.get_parameter("3.weight").shape)
        for model in map(run.personal_model, (0, 2, 4))
    ]
    assert sizes == [(4, 1, 3, 3), (6, 1, 3, 3), (12, 3, 3, 3)]
