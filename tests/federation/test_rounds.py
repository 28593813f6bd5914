from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from time import sleep
from typing import Any

import pytest
import torch

from fedspu import State, Update
from fedspu.engines.local import LocalEngine
from fedspu.errors import FedSPUError, TrainingError
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Cost, Facts, Missing
from fedspu.federation.messages import (
    JudgeReply,
    JudgeRequest,
    Request,
    TrainReply,
    pack_reply,
)
from fedspu.federation.rounds import (
    Round,
    Scores,
    drop_old_memories,
    in_client_order,
    is_over,
    judge,
    play,
    play_round,
)
from fedspu.federation.server import Federation
from fedspu.federation.values import Values
from fedspu.methods import make_method
from fedspu.methods.method import ClientRound, Method, Offer, Which, all_neurons
from fedspu.prepare import Prepared
from fedspu.settings import MethodSettings
from tests.oracles.federation import (
    ConvNet,
    Played,
    distance,
    empty_reply,
    in_double,
    mlp,
    plan_for,
    play_all,
    prepared_for,
    same_bits,
    slow_federation,
)
from tests.oracles.tampering import (
    Change,
    Tampering,
    absent,
    fields,
    read,
    with_values,
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
    ready = in_double(prepared_for(seed=seed, data__min_examples=12, **given))
    slow, played = slow_federation(ready), play_all(ready)
    assert played.federation.round == slow.rounds
    assert played.federation.stopped == slow.stopped
    assert distance(played.federation.global_state, slow.global_state) < 1e-10
    assert played.federation.last.keys() == slow.personal.keys()
    for client, state in slow.personal.items():
        assert distance(played.own(client), state) < 1e-10
        expected = slow.losses.get(client, [])
        assert blended(played, client) == pytest.approx(expected, rel=1e-10)
        last = played.memory(client).losses  # as many as the patience
        assert last == pytest.approx(expected[-1:], rel=1e-10)
    if "early_stopping" in given:
        assert slow.stopped  # else this shows nothing


def blended(played: Played, client: int) -> list[float]:
    """A client's losses by Eq. 5, one for each of its turns."""
    replies = [dict(done.replies()).get(client) for done in played.rounds]
    return [
        0.7 * reply.train_loss + 0.3 * reply.val_loss
        for reply in replies
        if reply is not None and reply.val_loss is not None
    ]


# The loop ----------------------------------------------------------------------------


def test_a_run_is_over_after_its_rounds_or_with_its_last_client() -> None:
    plan = plan_for()
    everyone = frozenset(range(6))
    assert not is_over(Federation(2, plan.initial), plan)
    assert is_over(Federation(3, plan.initial), plan)
    assert not is_over(Federation(1, plan.initial, stopped=everyone - {4}), plan)
    assert is_over(Federation(1, plan.initial, stopped=everyone), plan)


def test_a_run_that_is_over_plays_no_round() -> None:
    ready = prepared_for()
    engine = LocalEngine(ready.plan, ready.examples)
    end = Federation(3, ready.plan.initial)
    assert not list(play(ready.plan, engine, end, Scores()))


# Judging -----------------------------------------------------------------------------


class Spy(LocalEngine):
    """An engine that notes what it is asked to judge, and what it is sent for that."""

    def __init__(self, ready: Prepared) -> None:
        super().__init__(ready.plan, ready.examples)
        self.asked: list[tuple[list[int], Which]] = []
        self.broadcast: list[State | None] = []

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        for request in requests.values():
            if isinstance(request, JudgeRequest):
                self.asked.append((list(requests), request.which))
                self.broadcast.append(broadcast)
            else:
                assert broadcast is None
            break
        yield from super().exchange(requests, broadcast)


def spied(**given: Any) -> tuple[Spy, list[Round]]:
    ready = prepared_for(ConvNet, **given)
    engine, start = Spy(ready), Federation(0, ready.plan.initial)
    return engine, list(play(ready.plan, engine, start, Scores()))


def test_personal_models_are_judged_when_they_have_changed_and_only_then() -> None:
    engine, rounds = spied(method="local", rounds=4)
    everyone = list(range(6))
    assert engine.asked[0] == (everyone, "personal")  # w0, once for all
    assert engine.asked[1:] == [(sorted(r.answers), "personal") for r in rounds]


def test_the_server_s_model_goes_to_those_alone_who_need_it_to_judge() -> None:
    engine, rounds = spied(rounds=2, judge__every=2)
    last = rounds[-1].federation
    for (_, which), broadcast in zip(engine.asked, engine.broadcast, strict=True):
        if which == "personal":
            assert broadcast is None
        else:
            assert broadcast is not None
            assert same_bits(broadcast, last.global_state)
    assert [which for _, which in engine.asked].count("global") == 1


def test_the_global_model_is_judged_when_due_and_at_the_end() -> None:
    engine, rounds = spied(rounds=5, judge__every=2)
    assert [done.is_global_judged for done in rounds] == [
        *(False, True, False, True, True),
    ]
    whole = [clients for clients, which in engine.asked[1:] if which == "global"]
    assert whole == [list(range(6))] * 3


def test_where_all_use_the_global_model_it_is_judged_once_for_both() -> None:
    engine, rounds = spied(method="fedavg", rounds=3, judge__every=3)
    everyone = list(range(6))
    assert engine.asked == [(everyone, "personal"), (everyone, "global")]
    assert rounds[0].scores.personal == rounds[1].scores.personal
    last = rounds[-1].scores
    assert last.personal_mean == last.global_


def test_local_training_has_no_global_accuracy() -> None:
    _, rounds = spied(method="local", rounds=2, judge__every=1)
    assert [done.scores.global_ for done in rounds] == [None, None]


def test_only_a_seeded_sample_of_clients_is_judged_if_so_set() -> None:
    plan = plan_for(judge__clients=2)
    assert len(set(plan.judged_clients)) == 2
    assert plan.judged_clients == plan_for(judge__clients=2).judged_clients
    samples = {plan_for(judge__clients=2, seed=s).judged_clients for s in range(6)}
    assert len(samples) > 1
    engine, rounds = spied(judge__clients=2)
    judged = {client for clients, _ in engine.asked for client in clients}
    assert judged == set(plan.judged_clients)
    assert rounds[-1].scores.personal.keys() == judged
    assert rounds[-1].scores.participating <= judged


class Slow(LocalEngine):
    """Takes a while to judge everyone for the first time."""

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        if all(isinstance(r, JudgeRequest) and r.round == 0 for r in requests.values()):
            sleep(0.5)
        return super().exchange(requests, broadcast)


def test_judging_before_the_first_round_counts_as_judging() -> None:
    ready = prepared_for(rounds=2)
    engine = Slow(ready.plan, ready.examples, Shelf(None))
    start = Federation(0, ready.plan.initial)
    first, second = play(ready.plan, engine, start, Scores())
    assert first.seconds["judging"] >= 0.5 > second.seconds["judging"]


def test_judging_a_sample_changes_no_model() -> None:
    whole = play_all(prepared_for())
    sampled = play_all(prepared_for(judge__clients=1))
    assert distance(whole.federation.global_state, sampled.federation.global_state) == 0


def test_the_means_are_unweighted_over_clients() -> None:
    each = {0: Values(0.5, 0.25), 1: Values(1.0, 0.0), 4: Values(0.0, 0.5)}
    known = Scores(each, frozenset({0, 1}), None)
    assert known.personal_mean == Values(test=0.5, val=0.25)
    assert known.participating_mean == Values(test=0.75, val=0.125)
    assert Scores().personal_mean is None
    assert Scores({0: each[0]}).participating_mean is None


# Order -------------------------------------------------------------------------------


class Late(LocalEngine):
    """An engine whose last client answers first."""

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        yield from reversed(list(super().exchange(requests, broadcast)))


def test_the_order_in_which_replies_arrive_does_not_matter() -> None:
    ready = prepared_for(clients__per_round=6)
    plan = ready.plan
    start = Federation(0, plan.initial)
    found = [
        play_round(start, plan, engine(plan, ready.examples))
        for engine in (LocalEngine, Late)
    ]
    assert list(found[1].answers) == list(range(6))
    assert same_bits(found[0].federation.global_state, found[1].federation.global_state)


def test_what_is_early_waits_and_what_is_missing_holds_nobody_up_for_good() -> None:
    arriving: Any = iter([(5, "e"), (1, "a"), (2, "b"), (7, "f")])
    found: Iterator[Any] = in_client_order([1, 2, 4, 5, 7], arriving)
    assert next(found) == (1, "a")
    assert next(found) == (2, "b")
    assert list(found) == [(5, "e"), (7, "f")]


# Replies that cannot be used, and clients that do not answer --------------------------

not_finite = with_values(
    lambda reply: {"fc.bias": torch.full_like(reply.payload["fc.bias"], float("nan"))}
)
judged_instead = read(lambda _: JudgeReply(2, 2, 4, 0.5, 0.5, 0.5))

CHANGES: dict[str, tuple[Change, str]] = {
    "another client's": (fields(client=3), "it belongs to client 3 in round 2"),
    "of another round": (fields(round=1), "it belongs to client 2 in round 1"),
    "from no example": (fields(num_examples=0), "it is from 0 examples"),
    "no loss": (fields(train_loss=float("nan")), "its training loss is nan"),
    "no weight": (not_finite, "its fc.bias is not finite"),
    "of another kind": (judged_instead, "it is a JudgeReply; expected a TrainReply"),
}


def played_by(engine: Tampering, ready: Prepared) -> Iterator[tuple[Round, set[Any]]]:
    """Each round, and whose memories of which rounds are there after it."""
    federation = Federation(0, ready.plan.initial)
    for done in play(ready.plan, engine, federation, Scores()):
        drop_old_memories(engine.inner.shelf, federation, done)
        federation = done.federation
        yield done, set(engine.inner.shelf.names())


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "fedspu") for kind in CHANGES),
        ("no weight", "fedavg"),
        ("no weight", "hermes"),
    ],
)
def test_a_refused_reply_is_as_if_its_client_had_not_been_there(
    kind: str, method: str
) -> None:
    """The round goes on without it; later it begins again from what it had."""
    ready = prepared_for(
        method=method,
        clients__per_round=6,
        train__epochs=1,
        early_stopping=True,
        early_stopping__patience=3,
    )
    change, reason = CHANGES[kind]
    engine = Tampering(ready, 2, 2, change)
    lost = Tampering(ready, 2, 2, absent)
    found, expected = list(played_by(engine, ready)), list(played_by(lost, ready))

    assert [done.refused for done, _ in found] == [{}, {2: reason}, {}]
    assert [done.missing for done, _ in found] == [{}, {}, {}]
    assert [done.missing for done, _ in expected] == [{}, {2: "it is not there"}, {}]
    assert [sorted(done.answers) for done, _ in found] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]
    assert [done.federation.last[2] for done, _ in found] == [1, 1, 3]
    for (done, _), (other, _) in zip(found, expected, strict=True):
        assert same_bits(done.federation.global_state, other.federation.global_state)
        assert done.federation.stopped == other.federation.stopped
        assert done.scores == other.scores
    # What it kept of that turn is gone, what it had before is not.
    assert found[1][1] == {(2, 1)} | {(k, 2) for k in (0, 1, 3, 4, 5)}
    memories = [e.inner.shelf.get(2, 3) for e in (engine, lost)]
    assert memories[0].losses == memories[1].losses
    states = [memory.own.state if memory.own else {} for memory in memories]
    assert same_bits(*states)
    assert len(memories[0].losses) == 2


def test_one_that_is_refused_has_not_stopped() -> None:
    ready = prepared_for(clients__per_round=6)
    refuse = fields(has_stopped=True, train_loss=float("inf"))
    engine = Tampering(ready, 1, 4, refuse)
    done = play_round(Federation(0, ready.plan.initial), ready.plan, engine)
    assert done.refused.keys() == {4}
    assert done.federation.stopped == frozenset()


def test_a_round_in_which_all_are_refused_changes_no_model() -> None:
    ready = prepared_for(clients__per_round=1)
    start = Federation(0, ready.plan.initial)
    (client,) = play_round(start, ready.plan, Spy(ready)).answers
    engine = Tampering(ready, 1, client, not_finite)
    done = play_round(start, ready.plan, engine)
    assert (done.federation.round, done.answers) == (1, {})
    assert same_bits(done.federation.global_state, ready.plan.initial)


def test_answers_are_kept_without_their_values() -> None:
    played = play_all(prepared_for())
    assert all(not r.payload for done in played.rounds for _, r in done.replies())
    assert all(r.active for done in played.rounds for _, r in done.replies())


@dataclass
class Answering:
    """An engine in which all give the same answer."""

    answer: Answer | Missing
    facts = Facts()

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        yield from ((client, self.answer) for client in requests)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (None, "it is not there"),
        (JudgeReply(0, 2, 1, 0.5, 0.5, 0.5), "it belongs to client 2 in round 0"),
        (JudgeReply(0, 3, 1, float("nan"), 0.5, 1.0), "its accuracy is 0.5, loss nan"),
        (
            JudgeReply(0, 3, 1, 0.5, 0.5, float("nan")),
            "its accuracy on validation examples is nan, loss 0.5",
        ),
        (empty_reply(0, 3), "it is a TrainReply"),
    ],
)
def test_one_client_that_cannot_be_judged_ends_nothing_and_it_says_why(
    reply: Any, reason: str
) -> None:
    plan, free = plan_for(), Cost(0, 0, 0, 0, 0.0, 0.0)
    start = Federation(0, plan.initial)
    answer: Answer | Missing = Missing("it is not there")
    if reply is not None:
        request = JudgeRequest(0, 3, 0, "personal")
        answer = Answer(pack_reply(plan, request, reply), free)
    found = judge(plan, Answering(answer), start, [3], "personal")
    assert not found.scores
    assert list(found.unjudged) == [3]
    assert found.unjudged[3].startswith(reason)


def test_if_several_are_lost_and_nobody_was_ever_judged_it_is_an_error() -> None:
    plan = plan_for()
    start, asleep = Federation(0, plan.initial), Answering(Missing("asleep"))
    with pytest.raises(FedSPUError, match=r"client 3 could not be judged: asleep"):
        judge(plan, asleep, start, [3, 4], "personal")
    found = judge(plan, asleep, start, [3, 4], "personal", known={5: Values(0.5, 0.5)})
    assert found.unjudged == {3: "asleep", 4: "asleep"}


@pytest.mark.parametrize("clients", [[3], [3, 4]])
def test_if_the_turns_of_all_fail_and_nobody_was_ever_judged_it_is_an_error(
    clients: list[int],
) -> None:
    plan = plan_for()
    failing = Answering(Missing("no metric", has_failed=True))
    with pytest.raises(TrainingError, match=r"round 0, client 3: no metric"):
        judge(plan, failing, Federation(0, plan.initial), clients, "personal")


# A method's own answers on the server -------------------------------------------------


def fedavg(**given: Any) -> Method:
    return replace(make_method(MethodSettings(name="fedavg")), **given)


class Largest:
    """Takes each tensor from the client that has the most examples."""

    def __init__(self, state: State) -> None:
        self.state, self.seen = state, 0

    def add(self, update: Update) -> None:
        if update.num_examples > self.seen:
            self.seen = update.num_examples
            self.state = {**self.state, **update.payload}

    def result(self) -> State:
        return self.state


def test_a_method_s_own_way_to_combine_is_used() -> None:
    def play_once(record: Method) -> Played:
        return play_all(
            prepared_for(mlp, method_record=record, rounds=1, clients__per_round=6)
        )

    played = play_once(fedavg(combine=Largest))
    counts = {k: reply.num_examples for k, reply in played.rounds[0].replies()}
    winner = max(counts, key=lambda k: (counts[k], -k))
    # A round of this client alone has its model for a result.
    alone = Federation(0, played.engine.plan.initial, frozenset(range(6)) - {winner})
    expected = play_round(alone, played.engine.plan, played.engine)
    assert list(expected.answers) == [winner]
    assert same_bits(played.federation.global_state, expected.federation.global_state)
    averaged = play_once(fedavg())
    assert not same_bits(
        played.federation.global_state, averaged.federation.global_state
    )


def test_a_method_s_memory_on_the_server_reaches_what_it_offers() -> None:
    """It counts turns and adds losses; the next round's offers are given both."""
    seen: dict[int, State] = {}

    def offer(now: ClientRound) -> Offer:
        seen[now.round] = dict(now.server)
        return all_neurons(now)

    def count(extra: State, replies: Mapping[int, TrainReply]) -> State:
        zero = torch.zeros(6, dtype=torch.float64)
        turns, losses = (extra.get(name, zero).clone() for name in ("turns", "loss"))
        for client, reply in replies.items():
            turns[client] += 1
            losses[client] += reply.train_loss
        return {"turns": turns, "loss": losses}

    record = fedavg(offer=offer, server=count)
    played = play_all(prepared_for(mlp, method_record=record, rounds=4))
    assert seen[1] == {}
    turns, losses = [0.0] * 6, [0.0] * 6
    for before, done in pairwise([None, *played.rounds]):
        assert done is not None
        if before is not None:
            assert same_bits(seen[done.federation.round], before.federation.extra)
        for client, reply in done.replies():
            turns[client] += 1
            losses[client] += reply.train_loss
        assert done.federation.extra["turns"].tolist() == turns
        assert done.federation.extra["loss"].tolist() == losses
    assert sum(turns) == 12


def test_a_method_without_a_memory_leaves_the_server_s_empty() -> None:
    played = play_all(prepared_for(mlp, rounds=2))
    assert played.federation.extra == {}
