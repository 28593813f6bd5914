from typing import Any

import pytest

from fedspu.engines.local import LocalEngine
from fedspu.federation.run import Accuracies, is_over, play
from fedspu.federation.server import Federation
from tests.federation.cases import (
    ConvNet,
    distance,
    in_double,
    plan_for,
    play_all,
    slow_federation,
)

# A whole federation against a slow one that was written from the paper ----------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="algorithm 1"),
        pytest.param(
            {"clients__per_round": 6, "train__momentum": 0.5}, id="all clients"
        ),
        pytest.param(
            {"early_stopping": True, "rounds": 8, "train__lr": 0.3}, id="algorithm 2"
        ),
    ],
)
def test_a_federation_reaches_the_states_of_the_slow_one(
    seed: int, given: dict[str, Any]
) -> None:
    plan = in_double(plan_for(seed=seed, data__min_examples=12, **given))
    slow, played = slow_federation(plan), play_all(plan)
    assert played.federation.round == slow.rounds
    assert played.federation.stopped == slow.stopped
    assert distance(played.federation.global_state, slow.global_state) < 1e-10
    assert played.engine.memories.keys() == slow.personal.keys()
    for client, state in slow.personal.items():
        assert distance(played.own(client), state) < 1e-10
        assert played.engine.memories[client].losses == pytest.approx(
            slow.losses.get(client, []), rel=1e-10
        )
    if "early_stopping" in given:
        assert slow.stopped  # else this shows nothing


# The loop ----------------------------------------------------------------------------


def test_a_run_is_over_after_its_rounds_or_with_its_last_client() -> None:
    plan = plan_for()
    everyone = frozenset(range(6))
    assert not is_over(Federation(2, plan.initial), plan)
    assert is_over(Federation(3, plan.initial), plan)
    assert not is_over(Federation(1, plan.initial, stopped=everyone - {4}), plan)
    assert is_over(Federation(1, plan.initial, stopped=everyone), plan)


def test_a_run_that_is_over_plays_no_round() -> None:
    plan = plan_for()
    engine = LocalEngine(plan)
    assert not list(play(plan, engine, Federation(3, plan.initial), Accuracies()))


# Judging -----------------------------------------------------------------------------


class Spy(LocalEngine):
    """An engine that notes what it is asked to judge."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[tuple[list[int], bool]] = []

    def judge(self, clients: Any, state: Any) -> Any:
        self.asked.append((list(clients), state is None))
        return super().judge(self.asked[-1][0], state)


def spied(**given: Any) -> tuple[Spy, list[Any]]:
    plan = plan_for(ConvNet, **given)
    engine = Spy(plan)
    return engine, list(play(plan, engine, Federation(0, plan.initial), Accuracies()))


def test_personal_models_are_judged_when_they_have_changed_and_only_then() -> None:
    engine, reports = spied(method="local", rounds=4)
    everyone = list(range(6))
    assert engine.asked[0] == (everyone, False)  # w0, once for all
    assert engine.asked[1:] == [(sorted(r.answers), True) for r in reports]


def test_the_global_model_is_judged_when_due_and_at_the_end() -> None:
    engine, reports = spied(rounds=5, judge__every=2)
    assert [report.is_global_judged for report in reports] == [
        *(False, True, False, True, True),
    ]
    whole = [clients for clients, is_own in engine.asked[1:] if not is_own]
    assert whole == [list(range(6))] * 3


def test_where_all_use_the_global_model_it_is_judged_once_for_both() -> None:
    engine, reports = spied(method="fedavg", rounds=3, judge__every=3)
    assert engine.asked == [(list(range(6)), False)] * 2
    assert reports[0].accuracies.personal == reports[1].accuracies.personal
    last = reports[-1].accuracies
    assert last.personal_mean == last.global_


def test_local_training_has_no_global_accuracy() -> None:
    _, reports = spied(method="local", rounds=2, judge__every=1)
    assert [report.accuracies.global_ for report in reports] == [None, None]


def test_only_a_seeded_sample_of_clients_is_judged_if_so_set() -> None:
    plan = plan_for(judge__clients=2)
    assert len(set(plan.judged_clients)) == 2
    assert plan.judged_clients == plan_for(judge__clients=2).judged_clients
    samples = {plan_for(judge__clients=2, seed=s).judged_clients for s in range(6)}
    assert len(samples) > 1
    engine, reports = spied(judge__clients=2)
    judged = {client for clients, _ in engine.asked for client in clients}
    assert judged == set(plan.judged_clients)
    assert reports[-1].accuracies.personal.keys() == judged
    assert reports[-1].accuracies.participating <= judged


def test_judging_a_sample_changes_no_model() -> None:
    whole, sampled = play_all(plan_for()), play_all(plan_for(judge__clients=1))
    assert distance(whole.federation.global_state, sampled.federation.global_state) == 0


def test_the_means_are_unweighted_over_clients() -> None:
    known = Accuracies({0: 0.5, 1: 1.0, 4: 0.0}, frozenset({0, 1}), None)
    assert known.personal_mean == 0.5
    assert known.participating_mean == 0.75
    assert Accuracies().personal_mean is None
    assert Accuracies({0: 0.5}).participating_mean is None
