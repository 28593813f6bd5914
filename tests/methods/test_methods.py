from dataclasses import replace
from fractions import Fraction
from math import floor
from typing import Any, NoReturn

import pytest
import torch

from fedspu import map_neurons, state_of
from fedspu.errors import SettingsError
from fedspu.methods import METHODS, READINGS, find_method
from fedspu.methods.method import (
    Held,
    Offer,
    Own,
    Situation,
    all_neurons,
    global_model,
    nothing,
    own_model,
    own_state,
    random_neurons,
    what_was_offered,
)
from fedspu.models import EMNISTNet
from tests.oracles.federation import ConvNet, plan_for

SITUATION = plan_for().situation(round=2, client=3)  # p = .5 of 4 and of 6 neurons


def no_scores() -> NoReturn:
    raise AssertionError("scored without need")


OWN = Own(torch.tensor([0, 1, 1]), no_scores)


def chosen(offer: Offer | None) -> dict[str, list[int]]:
    assert offer is not None
    return {name: indices.tolist() for name, indices in offer.active.items()}


def test_the_methods_of_the_walking_path_are_there() -> None:
    assert set(METHODS) >= {"fedspu", "fedavg", "local"}
    assert all(method.name == name for name, method in METHODS.items())


def test_a_reading_is_there_once_and_found_by_its_name() -> None:
    known = [(method.name, method.reading) for method in READINGS]
    assert len(set(known)) == len(known)
    for method in READINGS:
        assert find_method(method.name, method.reading) is method


def test_without_a_reading_the_paper_s_is_meant_where_there_is_one() -> None:
    readings = {name: find_method(name).reading for name in METHODS}
    assert readings["fjord"] == "paper"
    assert {name for name, r in readings.items() if r == "original"} == {"heterofl"}


@pytest.mark.parametrize(
    ("name", "reading"), [("heterofl", "paper"), ("fedspu", "original")]
)
def test_a_reading_that_is_not_there_is_refused(name: str, reading: str) -> None:
    with pytest.raises(SettingsError, match=rf"method\.reading = '{reading}': {name}"):
        find_method(name, reading)


@pytest.mark.parametrize(
    "option", [{"method__finetune": 2}, {"method__distillation": True}]
)
def test_an_option_that_a_method_does_not_have_is_refused(
    option: dict[str, Any],
) -> None:
    (name,) = option
    with pytest.raises(SettingsError, match=name.replace("__", r"\.")):
        plan_for(method="local", **option)


def test_an_unknown_method_is_refused_with_all_names_and_the_nearest() -> None:
    with pytest.raises(SettingsError) as caught:
        find_method("fedspoo")
    message = str(caught.value)
    assert message.startswith("method = 'fedspoo': expected one of ")
    assert all(name in message for name in METHODS)
    assert message.endswith("(did you mean fedspu?)")


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_says_where_it_is_from_and_what_it_does(name: str) -> None:
    method = METHODS[name]
    assert method.reference
    assert len(method.in_words) == 4
    assert all(method.in_words)


# FedSPU ------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.01, 0.2, 0.35, 0.5, 0.7, 0.99, 1.0])
def test_the_server_offers_floor_p_n_neurons_of_each_group_at_least_one(
    p: float,
) -> None:
    neurons = map_neurons(EMNISTNet(), torch.zeros(2, 1, 28, 28))
    now = replace(SITUATION, neurons=neurons, capacity=Fraction(str(p)))
    for indices in chosen(METHODS["fedspu"].offer(now)).values():
        assert len(indices) == len(set(indices)) == max(1, floor(round(20 * p, 9)))
        assert indices == sorted(indices)
        assert set(indices) <= set(range(20))


def test_an_offer_depends_on_seed_round_and_client_and_on_nothing_else() -> None:
    def draws(now: Situation) -> list[dict[str, list[int]]]:
        return [chosen(random_neurons(replace(now, round=t))) for t in range(1, 9)]

    first = draws(SITUATION)
    assert draws(replace(SITUATION, rounds=77)) == first
    assert draws(replace(SITUATION, client=4)) != first
    assert draws(replace(SITUATION, seed=1)) != first
    assert len({str(draw) for draw in first}) > 1  # new each round


def test_every_neuron_is_offered_about_equally_often() -> None:
    counts = torch.zeros(6)
    for t in range(1, 601):
        counts[chosen(random_neurons(replace(SITUATION, round=t)))["conv2"]] += 1
    # 600 rounds, 3 of 6: 300 times each; four standard deviations are 49.
    assert ((counts - 300).abs() < 49).all()


def test_groups_are_drawn_independently() -> None:
    together = sum(
        0 in draw["conv1"] and 0 in draw["conv2"]
        for draw in (
            chosen(random_neurons(replace(SITUATION, round=t))) for t in range(1, 601)
        )
    )
    assert abs(together - 150) < 43  # a quarter of 600, four standard deviations


def test_the_client_trains_what_it_was_offered() -> None:
    offer = random_neurons(SITUATION)
    assert METHODS["fedspu"].keep(SITUATION, offer, OWN) is offer.active


# Anchors -----------------------------------------------------------------------------


def test_fedavg_offers_everything_whatever_the_capacity() -> None:
    weak = plan_for().situation(1, 0)  # p = .3
    assert chosen(all_neurons(weak)) == {"conv1": [*range(4)], "conv2": [*range(6)]}
    assert METHODS["fedavg"].offer is all_neurons
    assert not METHODS["fedavg"].keeps_own


def test_local_offers_nothing_and_trains_everything() -> None:
    local = METHODS["local"]
    assert local.offer(SITUATION) is None
    assert not local.exchanges
    active = local.keep(SITUATION, None, OWN)
    assert {name: len(indices) for name, indices in active.items()} == {
        "conv1": 4,
        "conv2": 6,
    }
    own = state_of(ConvNet())
    assert local.start(own, {}, {}) is own


def test_who_exchanges_is_who_offers() -> None:
    assert {name for name, m in METHODS.items() if not m.exchanges} == {"local"}
    assert METHODS["local"].offer is nothing
    assert METHODS["local"].start is own_state
    assert METHODS["local"].keep is what_was_offered


def test_each_method_is_judged_by_its_own_model() -> None:
    ours, theirs = Held(state_of(ConvNet())), state_of(ConvNet())
    assert own_model(SITUATION, theirs, ours) is ours
    assert global_model(SITUATION, theirs, ours).state is theirs
    assert {name for name, m in METHODS.items() if m.judges_own} == {
        *("fedspu", "local", "hermes", "fedmp", "prunefl", "fedselect"),
    }
    assert {name for name, m in METHODS.items() if m.judge is global_model} == {
        *("fedavg", "feddrop", "small"),
    }
    # The others are judged by a client's slice of the global model.
