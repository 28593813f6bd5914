from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import erfc, exp, log, sqrt
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fedspu import State
from fedspu.errors import SettingsError, TrainingError
from fedspu.federation.guards import accountant
from fedspu.federation.guards.accountant import epsilon
from fedspu.federation.guards.noisy_sum import NoisySum, most_turns
from fedspu.federation.server import Federation, TrainRequests, next_federation
from fedspu.methods import make_method
from fedspu.neurons.average import Average, Update
from fedspu.neurons.blocks import extract
from fedspu.random_streams import stream
from fedspu.reports.tables import run_table
from fedspu.settings import MethodSettings
from tests.oracles.federation import (
    plan_for,
    play_all,
    prepared_for,
    run_for,
    same_bits,
    wide_mlp,
)

PRIVATE: dict[str, Any] = {"guard__noise": 2.0, "guard__clip": 0.5}
PLAN = plan_for(clients__number=8, clients__per_round=4, **PRIVATE)


def requests_in(t: int = 1) -> TrainRequests:
    return TrainRequests(Federation(t - 1, PLAN.initial), PLAN, t)


def update_from(requests: TrainRequests, client: int, seed: int, far: float) -> Update:
    """What a client might reply: its blocks, moved at random, this far."""
    offer = requests.offer(client)
    assert offer is not None
    where = PLAN.travelling(offer.active)
    rng = stream(seed, "made up", client)
    payload = {
        name: block + far * torch.from_numpy(rng.normal(size=block.shape)).to(block)
        for name, block in extract(PLAN.initial, where).items()
    }
    return Update(where, payload, 1 + seed)


def summed(requests: TrainRequests, updates: list[Update], clip: float) -> NoisySum:
    total = NoisySum(requests, clip, noise=0.0)
    for update in updates:
        total.add(update)
    return total


def apart(a: NoisySum, b: NoisySum) -> float:
    """The norm of the difference of two sums, over all entries of the model."""
    return sqrt(sum(float((a.total[n] - b.total[n]).square().sum()) for n in a.total))


# Sensitivity --------------------------------------------------------------------------

FAR = st.sampled_from([0.0, 1e-4, 0.1, 10.0, 1e8])


@settings(max_examples=25)
@given(
    t=st.integers(1, 50),
    seed=st.integers(0, 1000),
    far=st.lists(FAR, min_size=5, max_size=5),
    who=st.integers(0, 3),
    clip=st.sampled_from([0.01, 0.5, 20.0]),
)
def test_one_client_moves_the_sum_by_no_more_than_the_limit(
    t: int, seed: int, far: list[float], who: int, clip: float
) -> None:
    requests = requests_in(t)
    updates = [
        update_from(requests, client, seed, far[i]) for i, client in enumerate(requests)
    ]
    whole = summed(requests, updates, clip)
    others = updates[:who] + updates[who + 1 :]
    assert apart(whole, summed(requests, others, clip)) <= clip * (1 + 1e-9)
    # Other data instead of none: at most twice the limit.
    client = list(requests)[who]
    other = update_from(requests, client, seed + 1, far[4])
    replaced = summed(requests, [*others, other], clip)
    assert apart(whole, replaced) <= 2 * clip * (1 + 1e-9)


def test_the_limit_is_reached() -> None:
    requests = requests_in()
    update = update_from(requests, next(iter(requests)), 1, far=10.0)
    found = apart(summed(requests, [update], 0.5), summed(requests, [], 0.5))
    assert found == pytest.approx(0.5)


def test_what_the_sum_is_divided_by_does_not_depend_on_replies() -> None:
    requests = requests_in()
    updates = [update_from(requests, client, 1, 1.0) for client in requests]
    without = summed(requests, updates[:1], 1.0).offered()
    assert same_bits(without, summed(requests, updates, 1.0).offered())


def test_a_count_that_a_client_claims_changes_nothing() -> None:
    requests = requests_in()
    update = update_from(requests, next(iter(requests)), 1, 1.0)
    greedy = replace(update, num_examples=2**32 - 1)
    found = [summed(requests, [u], 1.0).result() for u in (update, greedy)]
    assert same_bits(*found)


def test_a_client_that_is_missing_is_one_that_did_not_move() -> None:
    requests = requests_in()
    first, *others = (update_from(requests, client, 1, 1.0) for client in requests)
    still = replace(first, payload=extract(PLAN.initial, first.where))
    found = [summed(requests, u, 1.0).result() for u in (others, [still, *others])]
    assert same_bits(*found)


def test_without_noise_and_limit_it_is_the_mean_over_those_who_were_offered() -> None:
    requests = requests_in()
    updates = [update_from(requests, client, 1, 1.0) for client in requests]
    mean = Average(PLAN.initial, by_examples=False)
    for update in updates:
        mean.add(update)
    found = summed(requests, updates, clip=1e9).result()
    for name, wanted in mean.result().items():
        limited = wanted.clamp(min=0) if "running_var" in name else wanted
        assert torch.allclose(found[name], limited, atol=1e-6)


# Noise --------------------------------------------------------------------------------


def noise_alone(noise: float, clip: float, t: int = 1) -> tuple[State, NoisySum]:
    total = NoisySum(requests_in(t), clip, noise)
    return total.result(), total


def test_noise_has_the_standard_deviation_that_is_said() -> None:
    plan = plan_for(wide_mlp, **PRIVATE)
    drawn = []
    for t in range(1, 11):
        federation = Federation(t - 1, plan.initial)
        total = NoisySum(TrainRequests(federation, plan, t), clip=0.5, noise=2.0)
        after, number = total.result(), total.offered()
        for name, before in plan.initial.items():
            moved = (after[name].double() - before.double()) * number[name]
            drawn.append(moved[number[name] > 0])
    values = torch.cat(drawn)
    # Some 30,000 draws: the standard deviation varies by .4 %, the mean by .006.
    assert len(values) > 20_000
    assert float(values.std()) == pytest.approx(2.0 * 0.5, rel=0.02)
    assert abs(float(values.mean())) < 0.03


def test_every_entry_that_was_offered_has_noise_and_no_other() -> None:
    after, total = noise_alone(noise=1.0, clip=0.1)
    is_any_left_out = False
    for name, number in total.offered().items():
        is_moved = after[name] != PLAN.initial[name]
        assert torch.equal(is_moved, number > 0), name
        is_any_left_out |= bool((number == 0).any())
    assert is_any_left_out
    assert "bn1.running_mean" in after


def test_noise_is_new_in_every_round() -> None:
    first, second = noise_alone(1.0, 1.0, t=1)[0], noise_alone(1.0, 1.0, t=2)[0]
    a, b = (state["fc.bias"] - PLAN.initial["fc.bias"] for state in (first, second))
    assert not torch.equal(a * 4, b * 4)


def test_noise_never_makes_a_variance_negative() -> None:
    after, _ = noise_alone(noise=100.0, clip=10.0)
    assert float(after["bn1.running_var"].min()) == 0


def test_if_noise_ruins_the_model_the_error_names_the_settings_of_the_guard() -> None:
    plan = plan_for(guard__noise=1e6, guard__clip=1e6, train__lr=0.5)
    state = {**plan.initial, "fc.bias": plan.initial["fc.bias"] + torch.inf}
    wanted = (
        r"^round 1: the server's .* is no longer finite; lower guard\.noise \(it is "
        r"1000000\.0\) or guard\.clip \(it is 1000000\.0\) or train\.lr \(it is 0\.5\)$"
    )
    with pytest.raises(TrainingError, match=wanted):
        next_federation(plan, Federation(0, plan.initial), state, {})


def test_a_private_run_has_the_same_bits_when_it_is_played_again() -> None:
    states = [
        play_all(prepared_for(train__epochs=1, **PRIVATE)).federation.global_state
        for _ in range(2)
    ]
    assert same_bits(*states)


# Epsilon ------------------------------------------------------------------------------


def gaussian_epsilon(noise: float, delta: float, turns: int) -> float:
    """By Theorem 8 of Balle and Wang, "Improving the Gaussian mechanism", ICML 2018."""
    mu = sqrt(turns) / noise

    def phi(x: float) -> float:
        return erfc(-x / sqrt(2)) / 2

    def delta_at(e: float) -> float:
        return phi(mu / 2 - e / mu) - exp(e) * phi(-mu / 2 - e / mu)

    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("noise", [0.7, 1.0, 4.0])
@pytest.mark.parametrize("turns", [1, 10])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_epsilon_is_that_of_the_gaussian_mechanism(
    noise: float, turns: int, delta: float
) -> None:
    found = epsilon(noise, delta, turns)
    assert found == pytest.approx(gaussian_epsilon(noise, delta, turns), rel=1e-3)
    # Renyi differential privacy (Mironov, 2017) bounds it from above.
    orders = [1 + x / 20 for x in range(1, 2000)]
    rho = turns / (2 * noise**2)
    assert found <= min(a * rho + log(1 / delta) / (a - 1) for a in orders)


def test_epsilon_is_what_an_accountant_of_whole_loss_distributions_finds() -> None:
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp_accounting.GaussianDpEvent(4.0), 3)
    found = accountant.get_epsilon(1e-5)
    assert epsilon(4.0, 1e-5, 3) == pytest.approx(found, rel=1e-3)


def test_epsilon_grows_with_rounds_and_falls_with_noise() -> None:
    by_turns = [epsilon(2.0, 1e-5, turns) for turns in (0, 1, 2, 10, 50)]
    assert by_turns[0] == 0
    assert all(a < b for a, b in pairwise(by_turns))
    assert epsilon(4.0, 1e-5, 5) < epsilon(2.0, 1e-5, 5)


def test_turns_are_those_of_the_client_that_took_part_most_often() -> None:
    played = play_all(prepared_for(rounds=5, train__epochs=1, **PRIVATE))
    for rounds in (1, 3, 5):
        turns = Counter(k for done in played.rounds[:rounds] for k in done.answers)
        assert most_turns(prepared_for(**PRIVATE).plan, rounds) == max(turns.values())


def test_a_summary_says_epsilon_and_delta_and_the_table_shows_them() -> None:
    run = run_for(**PRIVATE, guard__delta=1e-3)
    assert run.summary["delta"] == 1e-3
    turns = run.summary["most_turns"]
    assert run.summary["epsilon"] == epsilon(2.0, 1e-3, turns)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(run_table(run.summary))
    line = next(line for line in shown.get().splitlines() if "epsilon" in line)
    assert f"{run.summary['epsilon']:.2f}" in line
    assert "delta = 0.001" in line


def test_a_run_without_a_guard_says_nothing_about_one() -> None:
    assert not {"guard", "epsilon", "delta"} & run_for(rounds=1).summary.keys()


# What is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_values", "said"),
    [
        ({"early_stopping__on": True}, "with early_stopping.on, who takes part"),
        ({"method": "hermes"}, "clients of hermes choose their neurons by their data"),
        ({"method": "local"}, "clients of local send nothing"),
    ],
)
def test_runs_whose_epsilon_is_unknown_are_refused(
    given_values: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=rf"^guard\.noise = 2\.0: {said}"):
        prepared_for(**PRIVATE, **given_values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"combine": lambda state: Average(state)}, "combines updates in its own way"),
        ({"server": lambda extra, replies: {}}, "remembers replies without noise"),
    ],
)
def test_methods_that_use_replies_in_other_ways_are_refused(
    change: dict[str, Any], said: str
) -> None:
    own = replace(make_method(MethodSettings(name="fedspu")), **change)
    with pytest.raises(SettingsError, match=said):
        prepared_for(method_record=own, **PRIVATE)


def test_a_rule_for_clients_that_send_nothing_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^guard\.rule = krum: clients of local"):
        prepared_for(method="local", guard__rule="krum")


def test_without_the_library_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accountant, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"dp-accounting.*not installed.*privacy"):
        prepared_for(**PRIVATE)
