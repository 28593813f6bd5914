from dataclasses import replace
from fractions import Fraction
from math import ceil, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspu import State
from fedspu.federation.guards.rules import Cohort, Ruled, clip, find_rule, krum
from fedspu.federation.guards.steps import distances
from fedspu.methods import CATALOGUE, Entry
from fedspu.neurons.average import Average, Update, average_by_clients
from fedspu.neurons.table import Blocks
from fedspu.settings import GuardSettings
from tests.oracles.federation import (
    distance,
    play_all,
    prepared_for,
    run_for,
    same_bits,
)
from tests.oracles.guards import (
    STATISTICS,
    first_state,
    moved,
    rounds_of_updates,
    slow_clip,
    slow_distance,
    slow_krum,
    slow_mean,
    slow_median,
    slow_trimmed_mean,
    step_of,
)

RULES = ("clip", "trimmed-mean", "median", "krum")
STATE = first_state()


def ruled(updates: list[Update], rule: str, share: float = 0.2) -> State:
    given = {"share": share} if rule in ("trimmed-mean", "krum") else {}
    found = find_rule(GuardSettings.model_validate({"rule": rule, **given}))
    combined = Ruled(found, STATE, STATISTICS, Average(STATE))
    for update in updates:
        combined.add(update)
    return combined.result()


def whole(state: State, *values: float, num_examples: int = 1) -> Update:
    """An update of a state of one tensor, ``w``, to these values."""
    payload = {"w": torch.tensor(values, dtype=state["w"].dtype)}
    return Update({"w": (None,)}, payload, num_examples)


def one_tensor(rule: str, *updates: Update, size: int = 1) -> list[float]:
    """What a rule makes of updates of a tensor of zeros."""
    state = {"w": torch.zeros(size, dtype=torch.float64)}
    combined = Ruled(
        find_rule(GuardSettings.model_validate({"rule": rule})),
        state,
        frozenset(),
        Average(state),
    )
    for update in updates:
        combined.add(update)
    values: list[float] = combined.result()["w"].tolist()
    return values


# Slow twins ---------------------------------------------------------------------------


@settings(max_examples=40)
@given(rounds_of_updates())
def test_clip_is_its_slow_twin(updates: list[Update]) -> None:
    steps = slow_clip([step_of(STATE, update) for update in updates])
    assert distance(ruled(updates, "clip"), moved(STATE, slow_mean(steps))) < 1e-10


@settings(max_examples=40)
@given(rounds_of_updates(), st.integers(1, 4))
def test_the_trimmed_mean_is_its_slow_twin(updates: list[Update], tenths: int) -> None:
    steps = slow_clip([step_of(STATE, update) for update in updates])
    found = ruled(updates, "trimmed-mean", tenths / 10)
    assert distance(found, moved(STATE, slow_trimmed_mean(steps, tenths))) < 1e-10


@settings(max_examples=40)
@given(rounds_of_updates())
def test_the_median_is_its_slow_twin(updates: list[Update]) -> None:
    steps = slow_clip([step_of(STATE, update) for update in updates])
    assert distance(ruled(updates, "median"), moved(STATE, slow_median(steps))) < 1e-10


@settings(max_examples=40)
@given(rounds_of_updates())
def test_krum_is_its_slow_twin(updates: list[Update]) -> None:
    steps = [step_of(STATE, update) for update in updates]
    kept = sorted(range(len(steps)))
    if len(steps) >= 3:
        ranked = slow_krum(steps, 0.2)
        number = len(steps) - ceil(0.2 * len(steps))
        if abs(ranked[number - 1][1] - ranked[number][1]) < 1e-9:
            return  # a tie, which rounding decides
        kept = sorted(client for client, _ in ranked[:number])
    clipped = slow_clip(steps)
    wanted = slow_mean([clipped[client] for client in kept])
    assert distance(ruled(updates, "krum"), moved(STATE, wanted)) < 1e-10


@settings(max_examples=40)
@given(rounds_of_updates())
def test_distances_are_on_shared_entries_alone(updates: list[Update]) -> None:
    steps = [step_of(STATE, update) for update in updates]
    learned = [name for name in STATE if name not in STATISTICS]
    found = distances(STATE, updates, learned)
    found += distances(STATE, updates, sorted(STATISTICS))
    for i, a in enumerate(steps):
        for j, b in enumerate(steps):
            if i != j:
                assert abs(float(found[i, j]) - slow_distance(a, b)) < 1e-9


# By hand ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "trimmed", "middle"),
    [
        ([1.0], 1.0, 1.0),  # nobody to compare with
        ([1.0, 0.5], 0.5, 0.5),  # both are as long as the shorter: clipped to it
        ([1.0, -1.0], 0.0, 0.0),
        ([1.0, 0.5, -1.0], 0.5, 0.5),  # the middle one
        ([1.0, 1.0, 1.0, -1.0, -1.0], 1 / 3, 1.0),
    ],
)
def test_one_two_three_and_five_trainers(
    steps: list[float], trimmed: float, middle: float
) -> None:
    state = {"w": torch.zeros(1)}
    updates = [whole(state, step) for step in steps]
    assert one_tensor("trimmed-mean", *updates) == pytest.approx([trimmed])
    assert one_tensor("median", *updates) == pytest.approx([middle])


def test_an_update_ten_times_as_long_is_cut_to_the_median_length() -> None:
    state = {"w": torch.zeros(1)}
    updates = [whole(state, value) for value in (1.0, 2.0, -20.0)]
    assert one_tensor("clip", *updates) == pytest.approx([(1 + 2 - 2) / 3])


@pytest.mark.parametrize("rule", RULES)
def test_a_count_that_a_client_claims_is_no_weight(rule: str) -> None:
    state = {"w": torch.zeros(1)}
    values = (1.0, 1.5, -1.2, 1.1)
    honest = [whole(state, value) for value in values]
    greedy = [
        replace(u, num_examples=2**32 - 1) if i == 2 else u
        for i, u in enumerate(honest)
    ]
    assert one_tensor(rule, *honest) == one_tensor(rule, *greedy)


def test_krum_leaves_out_the_one_that_points_elsewhere() -> None:
    cohort = Cohort(
        state := {"w": torch.zeros(2, dtype=torch.float64)},
        [whole(state, 1, 0.1), whole(state, -1, 0), whole(state, 1, 0.2)],
        (("w",), ()),
    )
    kept = krum(Fraction(1, 5), cohort)
    assert [float(update.payload["w"][0]) > 0 for update in kept] == [True, True]


def test_clients_that_share_nothing_count_as_neither_near_nor_far() -> None:
    state = {"w": torch.zeros(4, dtype=torch.float64)}
    blocks: list[Blocks] = [{"w": (torch.tensor([i, i + 1]),)} for i in (0, 2, 0)]
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    updates = [Update(where, {"w": values}, 1) for where in blocks]
    updates[2] = replace(updates[2], payload={"w": -values})
    found = distances(state, updates, ["w"]).tolist()
    assert found[0][1:] == [1.0, 2.0]
    assert found[1][2] == 1.0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [3e38, -3e38])
def test_the_largest_numbers_do_no_harm(rule: str, value: float) -> None:
    state = {"w": torch.zeros(2)}
    updates = [whole(state, 1, 1) for _ in range(3)] + [whole(state, value, value)]
    found = one_tensor(rule, *updates, size=2)
    assert all(abs(entry) <= 1 + 1e-6 for entry in found)


@pytest.mark.parametrize("rule", RULES)
def test_a_hostile_variance_is_limited_and_never_negative(rule: str) -> None:
    name = "norm.running_var"
    state = {name: torch.ones(1)}
    combined = Ruled(
        find_rule(GuardSettings.model_validate({"rule": rule})),
        state,
        frozenset(state),
        Average(state),
    )
    for value in (-1e30, -1e30, 1e30):
        combined.add(Update({name: (None,)}, {name: torch.tensor([value])}, 1))
    assert 0 <= float(combined.result()[name]) <= 1


def test_statistics_do_not_hide_a_long_step_of_what_is_learned() -> None:
    state = {"w": torch.zeros(1), "m": torch.zeros(1)}
    where: Blocks = {"w": (None,), "m": (None,)}
    updates = [
        Update(where, {"w": torch.tensor([w]), "m": torch.tensor([1000.0])}, 1)
        for w in (1.0, 1.0, 100.0)
    ]
    clipped = clip(Cohort(state, updates, (("w",), ("m",))))
    assert [float(update.payload["w"]) for update in clipped] == [1.0, 1.0, 1.0]
    assert [float(update.payload["m"]) for update in clipped] == [1000.0] * 3


# Laws ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_round_in_which_nobody_replies_changes_nothing(rule: str) -> None:
    assert same_bits(ruled([], rule), STATE)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(rounds_of_updates())
def test_no_rule_moves_what_nobody_trained(rule: str, updates: list[Update]) -> None:
    after = ruled(updates, rule)
    trained = {entry for update in updates for entry in step_of(STATE, update)}
    for name, before in STATE.items():
        for place in torch.ones_like(before).nonzero().tolist():
            if (name, tuple(place)) not in trained:
                assert float(after[name][tuple(place)]) == float(before[tuple(place)])


@pytest.mark.parametrize("entry", [e for e in CATALOGUE if e.name != "local"], ids=str)
def test_every_method_plays_with_a_rule_and_partial_payloads(entry: Entry) -> None:
    ready = prepared_for(
        method__name=entry.name,
        method__reading=entry.reading,
        rounds=1,
        train__epochs=1,
        guard__rule="krum" if entry.reading == "paper" else "trimmed-mean",
    )
    played = play_all(ready)
    assert not any(done.refused for done in played.rounds)
    assert not same_bits(played.federation.global_state, ready.plan.initial)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_server_s_optimizer_works_on_what_the_rule_gives(optimizer: str) -> None:
    plain = play_all(prepared_for(rounds=1, guard__rule="median"))
    moved_by = play_all(
        prepared_for(rounds=1, guard__rule="median", server__optimizer=optimizer)
    )
    first = plain.federation.global_state["fc.weight"]
    second = moved_by.federation.global_state["fc.weight"]
    initial = prepared_for().plan.initial["fc.weight"]
    assert torch.equal((first - initial).sign(), (second - initial).sign())


def test_a_guarded_run_has_the_same_bits_with_two_workers() -> None:
    states = [
        run_for(workers=workers, guard__rule="krum").last.federation.global_state
        for workers in (1, 2)
    ]
    assert same_bits(*states)


def test_heterofl_s_own_average_gives_the_same_as_any_other() -> None:
    updates = [Update({"w": (None, None)}, {"w": STATE["w"] + i}, i) for i in (1, 2, 5)]
    rule = find_rule(GuardSettings(rule="trimmed-mean"))
    found = []
    for combine in (average_by_clients, Average):
        combined = Ruled(rule, STATE, STATISTICS, combine(STATE))
        for update in updates:
            combined.add(update)
        found.append(combined.result())
    assert same_bits(*found)


def test_a_clipped_update_keeps_its_direction() -> None:
    state = {"w": torch.zeros(2, dtype=torch.float64)}
    updates = [whole(state, 0.0, 1.0), whole(state, 30.0, 40.0)]
    long = clip(Cohort(state, updates, (("w",), ())))[1].payload["w"].tolist()
    assert long == pytest.approx([0.6, 0.8])
    assert sqrt(sum(v * v for v in long)) == pytest.approx(1)
