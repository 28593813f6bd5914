from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from fedspu.engines.local import LocalEngine
from fedspu.federation.client import Which
from fedspu.federation.messages import Request
from fedspu.federation.rounds import (
    Accuracies,
    Answer,
    _in_client_order,
    is_over,
    play,
    play_round,
)
from fedspu.federation.server import Federation
from fedspu.training import Score
from tests.oracles.federation import (
    ConvNet,
    distance,
    in_double,
    plan_for,
    play_all,
    same_bits,
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
        self.asked: list[tuple[list[int], Which]] = []

    def judge(
        self, clients: Iterable[int], federation: Federation, which: Which
    ) -> dict[int, Score]:
        self.asked.append((list(clients), which))
        return super().judge(self.asked[-1][0], federation, which)


def spied(**given: Any) -> tuple[Spy, list[Any]]:
    plan = plan_for(ConvNet, **given)
    engine = Spy(plan)
    return engine, list(play(plan, engine, Federation(0, plan.initial), Accuracies()))


def test_personal_models_are_judged_when_they_have_changed_and_only_then() -> None:
    engine, reports = spied(method="local", rounds=4)
    everyone = list(range(6))
    assert engine.asked[0] == (everyone, "personal")  # w0, once for all
    assert engine.asked[1:] == [(sorted(r.answers), "personal") for r in reports]


def test_the_global_model_is_judged_when_due_and_at_the_end() -> None:
    engine, reports = spied(rounds=5, judge__every=2)
    assert [report.is_global_judged for report in reports] == [
        *(False, True, False, True, True),
    ]
    whole = [clients for clients, which in engine.asked[1:] if which == "global"]
    assert whole == [list(range(6))] * 3


def test_where_all_use_the_global_model_it_is_judged_once_for_both() -> None:
    engine, reports = spied(method="fedavg", rounds=3, judge__every=3)
    everyone = list(range(6))
    assert engine.asked == [(everyone, "personal"), (everyone, "global")]
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


# Order -------------------------------------------------------------------------------


class Late(LocalEngine):
    """An engine whose last client answers first."""

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[tuple[int, Answer]]:
        yield from reversed(list(super().exchange(requests)))


def test_the_order_in_which_replies_arrive_does_not_matter() -> None:
    plan = plan_for(clients__per_round=6)
    start = Federation(0, plan.initial)
    found = [
        play_round(start, plan, engine) for engine in (LocalEngine(plan), Late(plan))
    ]
    assert list(found[1].answers) == list(range(6))
    assert same_bits(found[0].federation.global_state, found[1].federation.global_state)


def test_what_is_early_waits_and_what_is_missing_holds_nobody_up_for_good() -> None:
    arriving: Any = iter([(5, "e"), (1, "a"), (2, "b"), (7, "f")])
    found: Iterator[Any] = _in_client_order([1, 2, 4, 5, 7], arriving)
    assert next(found) == (1, "a")
    assert next(found) == (2, "b")
    assert list(found) == [(5, "e"), (7, "f")]
