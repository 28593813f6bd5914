from dataclasses import replace
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspu import map_neurons
from fedspu.errors import SettingsError, TrainingError
from fedspu.methods import (
    CATALOGUE,
    METHODS,
    Entry,
    all_methods,
    check_options,
    find_entry,
    make_method,
)
from fedspu.methods.method import (
    ClientRound,
    Method,
    Offer,
    Trained,
    Turn,
    all_neurons,
    random_neurons,
)
from fedspu.methods.options import Options
from fedspu.models.paper import EMNISTNet
from fedspu.neurons.blocks import state_of
from fedspu.settings import MethodSettings, setting
from fedspu.training.epochs import LocalTraining, train
from tests.oracles.federation import plan_for, run_for, same_bits

NOW = plan_for().client_round(round=2, client=3)  # p = .5 of 4 and of 6 neurons

RECORDS = {
    entry.name: make_method(MethodSettings(name=entry.name)) for entry in CATALOGUE
}


def chosen(offer: Offer | None) -> dict[str, list[int]]:
    assert offer is not None
    return {name: indices.tolist() for name, indices in offer.active.items()}


# The catalogue -----------------------------------------------------------------------


def test_a_reading_is_there_once_and_its_record_says_so() -> None:
    known = [(entry.name, entry.reading) for entry in CATALOGUE]
    assert len(set(known)) == len(known)
    for entry, method in all_methods().items():
        assert (method.name, method.reading) == (entry.name, entry.reading)
        assert find_entry(entry.name, entry.reading) is entry


def test_without_a_reading_the_paper_s_is_meant_where_there_is_one() -> None:
    of_the_paper = {e.name for e in CATALOGUE if e.reading == "paper"}
    for name in METHODS:
        expected = "paper" if name in of_the_paper else "original"
        assert find_entry(name).reading == expected


@pytest.mark.parametrize(
    ("name", "reading"), [("heterofl", "paper"), ("fedspu", "original")]
)
def test_a_reading_that_is_not_there_is_refused(name: str, reading: str) -> None:
    with pytest.raises(SettingsError, match=rf"method\.reading = '{reading}': {name}"):
        find_entry(name, reading)


def test_an_unknown_method_is_refused_with_all_names_and_the_nearest() -> None:
    with pytest.raises(SettingsError) as caught:
        find_entry("fedspoo")
    message = str(caught.value)
    assert message.startswith("method = 'fedspoo': expected one of ")
    assert all(name in message for name in METHODS)
    assert message.endswith("(did you mean fedspu?)")


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda e: f"{e.name}-{e.reading}")
def test_a_method_says_where_it_is_from_and_what_it_does(entry: Entry) -> None:
    method = all_methods()[entry]
    assert method.reference
    assert len(method.in_words) == 4
    assert all(method.in_words)
    assert all(field.description for field in entry.options.model_fields.values())


# Options -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option", [{"method__finetune": 2}, {"method__distillation": True}]
)
def test_an_option_that_a_method_does_not_have_is_refused(
    option: dict[str, Any],
) -> None:
    (name,) = option
    with pytest.raises(SettingsError, match=name.replace("__", r"\.")):
        plan_for(method="local", **option)


def test_an_option_is_taken_in_its_own_type() -> None:
    given = MethodSettings.model_validate({"name": "fedavg", "finetune": "3"})
    assert check_options(given).options == {"finetune": 3}


class Pace(Options):
    """Of the method below."""

    factor: float = setting(1.0, "What every trained entry is multiplied by.")


def paced(options: Pace) -> Method:
    def scaled_epochs(turn: Turn, local: LocalTraining) -> Trained:
        loss = train(local)
        with torch.no_grad():
            for parameter in local.model.parameters():
                parameter.mul_(options.factor)
        state = state_of(local.model)
        return Trained(loss, sent=state, own=state)

    return replace(RECORDS["fedavg"], name="paced", train=scaled_epochs)


PLACE = "tests.methods.test_methods:paced"


def test_a_method_of_ones_own_may_have_options() -> None:
    given: dict[str, Any] = {"method": PLACE, "rounds": 1, "judge__clients": 1}
    plain, shrunk = (run_for(method__factor=f, **given) for f in (1.0, 0.5))
    expected = {
        name: 0.5 * values
        if name in dict(plain.global_model().named_parameters())
        else values
        for name, values in plain.last.federation.global_state.items()
    }
    # A half is exact, and so is its average.
    assert same_bits(shrunk.last.federation.global_state, expected)
    assert shrunk.summary["label"] == f"{PLACE}@factor=0.5"


def test_a_wrong_option_of_a_method_of_ones_own_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"method\.factor = 'much': expected"):
        run_for(method=PLACE, method__factor="much")
    with pytest.raises(
        SettingsError, match=r"method\.speed = 2: .* has no such option"
    ):
        run_for(method=PLACE, method__speed=2)


# Records -----------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["keep", "train", "stays", "combine"])
def test_a_record_that_lacks_an_answer_is_refused(answer: str) -> None:
    lacking: dict[str, Any] = {answer: None}
    with pytest.raises(SettingsError, match=rf"method 'fedspu': its {answer} is None"):
        replace(RECORDS["fedspu"], **lacking)


@pytest.mark.parametrize("answer", ["offer", "ready", "server", "remodel"])
def test_an_answer_that_is_no_function_is_refused(answer: str) -> None:
    wrong: dict[str, Any] = {answer: 7}
    with pytest.raises(SettingsError, match=rf"its {answer} is 7; expected a function"):
        replace(RECORDS["fedspu"], **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": ""}, "a method's name is ''"),
        ({"in_words": ("a",)}, "expected four texts: what it sends, trains, keeps"),
        ({"tasks": "classification"}, "expected a set of names"),
        ({"judged_by": "slice", "server": dict}, "without knowing what the server"),
        ({"judged_by": "slice", "is_choice": True}, "without knowing what the server"),
    ],
)
def test_a_record_that_cannot_be_right_is_refused(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        replace(RECORDS["fedspu"], **wrong)


@pytest.mark.parametrize(
    ("name", "answer", "wanted"),
    [
        ("offer", lambda now: None, "a NoneType; expected an Offer"),
        ("keep", lambda turn: [1], "a list; expected a dict"),
        ("train", lambda turn, local: None, "a NoneType; expected a Trained"),
        ("stays", lambda neurons: ["fc.weight"], "a list; expected a frozenset"),
        ("combine", lambda state: 3, "an int; expected an Accumulator"),
        ("server", lambda extra, replies: None, "a NoneType; expected a dict"),
    ],
)
def test_a_function_that_returns_something_else_is_refused(
    name: str, answer: Any, wanted: str
) -> None:
    change: dict[str, Any] = {"name": "mine", name: answer}
    method = replace(RECORDS["fedspu"], **change)
    with pytest.raises(SettingsError, match=f"'mine': its {name} returned {wanted}"):
        run_for(method_record=method, rounds=1)


def no_number(turn: Turn, local: LocalTraining) -> Trained:
    state = state_of(local.model)
    return Trained(float("nan"), sent=state, own=state)


def test_a_run_without_any_reply_that_can_be_used_has_no_result() -> None:
    method = replace(RECORDS["fedspu"], train=no_number)
    wanted = r"in any round; .*client \d: its training loss is nan"
    with pytest.raises(TrainingError, match=wanted):
        run_for(method_record=method, rounds=2)


def test_an_overflow_on_the_server_is_said_and_nothing_is_saved(tmp_path: Path) -> None:
    given: Any = {
        "server__optimizer": "adam",
        "server__lr": 1e300,
        "out": str(tmp_path / "r"),
    }
    with pytest.raises(TrainingError, match=r"round 1: .*lower server\.lr"):
        run_for(rounds=2, **given)
    assert not (tmp_path / "r").exists()


def test_a_record_is_judged_by_something_that_is_there() -> None:
    wrong: dict[str, Any] = {"judged_by": "mine"}
    with pytest.raises(SettingsError, match="judged_by = 'mine'; expected one of own"):
        replace(RECORDS["fedspu"], **wrong)
    with pytest.raises(SettingsError, match="nothing is exchanged"):
        replace(RECORDS["local"], judged_by="global")


def retyped(now: ClientRound) -> Offer:
    """What FedSPU offers, by a function of another name."""
    return random_neurons(now)


def test_which_function_answers_makes_no_difference() -> None:
    given: dict[str, Any] = {"rounds": 2, "judge__every": 10}
    ours = run_for(method="fedspu", **given)
    theirs = run_for(method_record=replace(RECORDS["fedspu"], offer=retyped), **given)
    assert theirs.rounds == ours.rounds
    assert theirs.last.scores == ours.last.scores


# FedSPU ------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.01, 0.2, 0.35, 0.5, 0.7, 0.99, 1.0])
def test_the_server_offers_floor_p_n_neurons_of_each_group_at_least_one(
    p: float,
) -> None:
    neurons = map_neurons(EMNISTNet(), torch.zeros(2, 1, 28, 28))
    now = replace(NOW, neurons=neurons, capacity=Fraction(str(p)))
    offer = RECORDS["fedspu"].offer
    assert offer is not None
    for indices in chosen(offer(now)).values():
        assert len(indices) == len(set(indices)) == max(1, floor(round(20 * p, 9)))
        assert indices == sorted(indices)
        assert set(indices) <= set(range(20))


def test_an_offer_depends_on_seed_round_and_client_and_on_nothing_else() -> None:
    def draws(now: ClientRound) -> list[dict[str, list[int]]]:
        return [chosen(random_neurons(replace(now, round=t))) for t in range(1, 9)]

    first = draws(NOW)
    assert draws(replace(NOW, rounds=77)) == first
    assert draws(replace(NOW, client=4)) != first
    assert draws(replace(NOW, seed=1)) != first
    assert len({str(draw) for draw in first}) > 1  # new each round


def test_every_neuron_is_offered_about_equally_often() -> None:
    counts = torch.zeros(6)
    for t in range(1, 601):
        counts[chosen(random_neurons(replace(NOW, round=t)))["conv2"]] += 1
    # 600 rounds, 3 of 6: 300 times each; four standard deviations are 49.
    assert ((counts - 300).abs() < 49).all()


def test_groups_are_drawn_independently() -> None:
    together = sum(
        0 in draw["conv1"] and 0 in draw["conv2"]
        for draw in (
            chosen(random_neurons(replace(NOW, round=t))) for t in range(1, 601)
        )
    )
    assert abs(together - 150) < 43  # a quarter of 600, four standard deviations


# Who does what -----------------------------------------------------------------------


def test_fedavg_offers_everything_whatever_the_capacity() -> None:
    weak = plan_for().client_round(1, 0)  # p = .3
    assert chosen(all_neurons(weak)) == {"conv1": [*range(4)], "conv2": [*range(6)]}


def test_all_but_local_exchange() -> None:
    assert {name for name, m in RECORDS.items() if not m.exchanges} == {"local"}


def test_clients_are_judged_by_what_they_would_use() -> None:
    by = {
        kind: {name for name, m in RECORDS.items() if m.judged_by == kind}
        for kind in ("slice", "global")
    }
    assert by["slice"] == {"fjord", "heterofl"}
    assert by["global"] == {"fedavg", "feddrop", "small", "fedrolex"}
