"""A client that sends whatever it likes: the round goes on as if it were not there."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspu import State
from fedspu.engines.local import LocalEngine
from fedspu.federation.checks import largest
from fedspu.federation.engine import Answer, Missing
from fedspu.federation.messages import (
    JudgeReply,
    JudgeRequest,
    Packet,
    Reply,
    Request,
    Seconds,
    TrainReply,
    TrainRequest,
    pack_reply,
    unpack_reply,
)
from fedspu.federation.plan import Plan
from fedspu.federation.record import record_round
from fedspu.federation.rounds import Round, Scores, judge, play, play_round
from fedspu.federation.server import Federation, choose_clients
from fedspu.federation.values import Values
from fedspu.prepare import Prepared
from tests.federation.test_checks import damages
from tests.oracles.federation import mlp, prepared_for, same_bits
from tests.oracles.tampering import Change, Tampering, absent, fields, packed, read

METHODS = ("fedspu", "hermes", "feddrop", "fedavg", "local")
VICTIM = 2


@cache
def ready_for(method: str, early: bool = False) -> Prepared:
    return prepared_for(
        mlp, method=method, clients__per_round=4, train__epochs=1, early_stopping=early
    )


def start(method: str, early: bool = False) -> Federation:
    """Before a round in which clients 0 to 3 take part."""
    plan = ready_for(method, early).plan
    return Federation(0, plan.initial, stopped=frozenset({4, 5}))


@cache
def first_round(method: str, early: bool) -> tuple[Federation, LocalEngine]:
    """The server after a first round, and the engine that has the clients' memories."""
    ready = ready_for(method, early)
    engine = LocalEngine(ready.plan, ready.examples)
    first = play_round(start(method, early), ready.plan, engine)
    assert sorted(first.answers) == [0, 1, 2, 3]
    return replace(first.federation, stopped=frozenset({4, 5})), engine


def second_round(method: str, early: bool, change: Change | None) -> Round:
    """The second round, with a change of what client 2 sends in it."""
    ready = ready_for(method, early)
    federation, inner = first_round(method, early)
    engine = Tampering(ready, 2, VICTIM, change or absent)
    engine.inner = inner  # a turn may be played again
    return play_round(federation, ready.plan, engine)


@cache
def without(method: str, early: bool) -> Round:
    """The slow twin: the same round, in which client 2 is not there."""
    return second_round(method, early, None)


def assert_as_if_not_there(method: str, early: bool, change: Change) -> str:
    """The reason why the reply was refused."""
    found, wanted = second_round(method, early, change), without(method, early)
    assert wanted.missing == {VICTIM: "it is not there"}
    assert found.refused.keys() == {VICTIM}
    assert not found.missing
    assert sorted(found.answers) == sorted(wanted.answers) == [0, 1, 3]
    mine, theirs = found.federation, wanted.federation
    assert same_bits(mine.global_state, theirs.global_state)
    assert mine.stopped == theirs.stopped
    assert mine.last == theirs.last
    assert mine.num_examples == theirs.num_examples
    assert mine.kept.keys() == theirs.kept.keys()
    for client, kept in mine.kept.items():
        assert same_bits(kept, theirs.kept[client])
    plan = ready_for(method, early).plan
    (line,) = record_round(plan, found, {})["rounds.jsonl"]
    reason = line["refused_clients"][str(VICTIM)]
    assert reason
    return str(reason)


HUGE = 2**32 - 1
ODD: dict[str, Change] = {
    "another client": fields(client=0),
    "no such client": fields(client=HUGE),
    "another round": fields(round=1),
    "a later round": fields(round=3),
    "no examples": fields(num_examples=0),
    "too many examples": fields(num_examples=HUGE),
    "one example more": read(lambda r: replace(r, num_examples=r.num_examples + 1)),
    "nan": fields(train_loss=float("nan")),
    "inf": fields(train_loss=float("inf")),
    "a score instead": read(lambda _: JudgeReply(2, VICTIM, 4, 0.5, 0.5, 0.5)),
    "another version": packed(lambda up: replace(up, header=b"\1" + up.header[1:])),
    "no header": packed(lambda up: replace(up, header=b"")),
    "nothing": packed(lambda up: Packet(b"")),
    "a model besides": packed(lambda up: replace(up, initial=b"\0")),
    "far too long": packed(lambda up: replace(up, values=bytes(10**7))),
    "no time at all": packed(lambda up: replace(up, took=Seconds(float("nan"), 0.0))),
    "no cpu time": packed(lambda up: replace(up, took=Seconds(1.0, float("nan")))),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("method", METHODS)
def test_an_odd_reply_costs_its_turn_and_no_more(method: str, kind: str) -> None:
    assert_as_if_not_there(method, False, ODD[kind])


@pytest.mark.parametrize("early", [False, True])
def test_a_reply_that_stops_or_validates_against_the_settings(early: bool) -> None:
    change = fields(val_loss=None) if early else fields(has_stopped=True)
    reason = assert_as_if_not_there("fedspu", early, change)
    assert ("early stopping needs" if early else "early_stopping is off") in reason


@pytest.mark.parametrize("method", ["fedspu", "feddrop"])
def test_neurons_that_were_not_offered(method: str) -> None:
    """All of them, with the values of the server: the rest of a sub-model."""
    ready = ready_for(method)

    def all_of_them(reply: TrainReply) -> Reply:
        active = ready.plan.neurons.everything()
        payload = {n: ready.plan.initial[n] for n in ready.plan.travelling(active)}
        return replace(reply, active=active, payload=payload)

    reason = assert_as_if_not_there(method, False, read(all_of_them))
    assert reason.endswith("that were not offered")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", ["fedspu", "hermes", "feddrop", "fedavg"])
def test_one_value_that_is_not_finite(method: str, value: float) -> None:
    def change(reply: TrainReply) -> Reply:
        payload = {name: t.clone() for name, t in reply.payload.items()}
        next(iter(payload.values())).view(-1)[0] = value
        return replace(reply, payload=payload)

    assert_as_if_not_there(method, False, read(change))


@settings(max_examples=120, deadline=None)
@given(
    method=st.sampled_from(METHODS),
    early=st.booleans(),
    damage=damages(),
)
def test_whatever_bytes_come_the_round_goes_on(
    method: str, early: bool, damage: Any
) -> None:
    """Damage is refused, or it is a reply that the client could have sent."""
    ready, sent = ready_for(method, early), list[Packet]()

    def change(plan: Plan, request: Request, answer: Answer) -> Answer:
        sent.append(damage(answer.up))
        return replace(answer, up=sent[-1])

    found = second_round(method, early, change)
    if VICTIM in found.refused:
        assert_as_if_not_there(method, early, packed(lambda _: sent[0]))
    else:
        # Only values and losses are free: all else the server knows.
        reply = found.answers[VICTIM].reply
        assert (reply.round, reply.client) == (2, VICTIM)
        assert reply.num_examples == start_counts(method, early)[VICTIM]
        assert len(sent[0].values) <= largest(ready.plan).values
        state = found.federation.global_state
        assert all(bool(t.isfinite().all()) for t in state.values())


@cache
def start_counts(method: str, early: bool) -> Mapping[int, int]:
    return without(method, early).federation.num_examples


# More replies than were asked for -----------------------------------------------------


class Chatty(Tampering):
    """Client 2 answers twice or more, and so does a client that was not asked."""

    more: int = 1

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        asked = {client: requests[client] for client in requests}
        for client, answer in self.inner.exchange(asked, broadcast):
            request = asked[client]
            yield client, answer
            if client == VICTIM and isinstance(request, TrainRequest):
                assert isinstance(answer, Answer)
                reply = unpack_reply(self.plan, request, answer.up)
                assert isinstance(reply, TrainReply)
                payload = {n: t + 1 for n, t in reply.payload.items()}
                other = replace(reply, payload=payload)
                again = replace(answer, up=pack_reply(self.plan, request, other))
                for _ in range(self.more):
                    yield client, again
                yield 5, again
                yield 77, again
                yield client, Missing("it is gone")


@pytest.mark.parametrize("method", ["fedspu", "fedavg"])
def test_only_the_first_reply_of_a_client_that_was_asked_counts(method: str) -> None:
    ready = ready_for(method)
    engines = [cls(ready, 1, VICTIM, absent) for cls in (Chatty, Honest)]
    engines[0].more = 3
    found, wanted = (play_round(start(method), ready.plan, e) for e in engines)
    assert found.ignored == {VICTIM: 4, 5: 1, 77: 1}
    assert found.answers.keys() == wanted.answers.keys() == {0, 1, 2, 3}
    assert not found.refused
    assert not found.missing
    assert same_bits(found.federation.global_state, wanted.federation.global_state)


class Honest(Chatty):
    """Everybody answers once."""

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        return self.inner.exchange(requests, broadcast)


class Silent(Tampering):
    """Nothing at all is heard of client 2."""

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        for client, answer in self.inner.exchange(requests, broadcast):
            if client != VICTIM:
                yield client, answer


def test_a_client_of_which_nothing_is_heard_is_missing() -> None:
    ready = ready_for("fedspu")
    engine = Silent(ready, 1, VICTIM, absent)
    found = play_round(start("fedspu"), ready.plan, engine)
    assert found.missing == {VICTIM: "no answer"}
    assert sorted(found.answers) == [0, 1, 3]


# Judging ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        JudgeReply(1, VICTIM, 4, 0.5, 1.5, 0.5),
        JudgeReply(1, VICTIM, 4, 0.5, 0.5, 1.5),
        JudgeReply(1, VICTIM, 4, 0.5, 0.5, float("nan")),
        JudgeReply(1, VICTIM, 4, float("nan"), 0.5, 0.5),
        JudgeReply(0, VICTIM, 4, 0.5, 0.5, 0.5),
        JudgeReply(1, VICTIM, 0, 0.5, 0.5, 0.5),
    ],
)
@pytest.mark.parametrize("method", ["fedspu", "fedavg"])
def test_a_bad_score_is_not_used_and_the_one_before_stays(
    method: str, reply: JudgeReply
) -> None:
    given = {"method": method, "clients__per_round": 6, "judge__every": 1}
    ready = prepared_for(mlp, **given, rounds=2)
    rounds = {
        name: list(
            play(ready.plan, engine, Federation(0, ready.plan.initial), Scores())
        )
        for name, engine in (
            ("bad", Tampering(ready, 1, VICTIM, read(lambda _: reply), JudgeRequest)),
            ("good", Tampering(ready, 9, VICTIM, absent, JudgeRequest)),
            ("at first", Tampering(ready, 0, VICTIM, absent, JudgeRequest)),
        )
    }
    bad, good = rounds["bad"], rounds["good"]
    assert bad[0].unjudged.keys() == {VICTIM}
    assert not bad[1].unjudged
    before = rounds["good"][0].scores.personal
    found = bad[0].scores.personal
    assert {k: v for k, v in found.items() if k != VICTIM} == {
        k: v for k, v in before.items() if k != VICTIM
    }
    # It has the score of w0; a round later it is judged again.
    assert found[VICTIM] == scores_of_w0(ready)[VICTIM]
    assert bad[1].scores == good[1].scores
    assert list(found) == list(range(6))
    for a, b in zip(bad, good, strict=True):
        assert same_bits(a.federation.global_state, b.federation.global_state)
    # One that never had a score is left out until it has one.
    late = rounds["at first"]
    assert late[0].unjudged == {VICTIM: "it is not there"}
    assert late[0].scores == good[0].scores


def scores_of_w0(ready: Prepared) -> dict[int, Values]:
    engine = LocalEngine(ready.plan, ready.examples)
    begin = Federation(0, ready.plan.initial)
    return judge(ready.plan, engine, begin, range(6), "personal").scores


def test_a_participant_without_a_score_is_left_out_of_the_means() -> None:
    ready = prepared_for(mlp, clients__per_round=6, rounds=1, judge__every=1)

    class Never(Tampering):
        def exchange(
            self, requests: Mapping[int, Request], broadcast: State | None = None
        ) -> Iterator[tuple[int, Answer | Missing]]:
            for client, answer in self.inner.exchange(requests, broadcast):
                lost = client == VICTIM and not isinstance(requests[0], TrainRequest)
                yield client, Missing("asleep") if lost else answer

    engine = Never(ready, 0, 0, absent)
    (done,) = play(ready.plan, engine, Federation(0, ready.plan.initial), Scores())
    assert sorted(done.scores.personal) == [0, 1, 3, 4, 5]
    assert done.scores.participating == {0, 1, 3, 4, 5}
    values = list(done.scores.personal.values())
    assert done.scores.participating_mean == mean_of(values)
    (line,) = record_round(ready.plan, done, {})["rounds.jsonl"]
    assert line["unjudged_clients"] == {"2": "asleep"}
    assert line["personal_accuracy"] == sum(v.test for v in values) / 5
    assert line["personal_val_accuracy"] == sum(v.val for v in values) / 5


def mean_of(values: list[Values]) -> Values:
    return Values(*(sum(each) / len(values) for each in zip(*values, strict=True)))


def test_the_global_model_s_mean_is_over_those_who_could_be_judged() -> None:
    ready = prepared_for(
        mlp, method="fedavg", clients__per_round=6, rounds=1, judge__every=1
    )
    begin = Federation(0, ready.plan.initial)
    lost = Tampering(ready, 1, VICTIM, absent, JudgeRequest)
    (found,) = play(ready.plan, lost, begin, Scores())
    (whole,) = play(
        ready.plan, Tampering(ready, 9, VICTIM, absent, JudgeRequest), begin, Scores()
    )
    scores = [v for k, v in whole.scores.personal.items() if k != VICTIM]
    assert found.scores.global_ == mean_of(scores)


class NoScores(Tampering):
    """Some clients' scores are never numbers."""

    def __init__(self, ready: Prepared, since: int, clients: set[int]) -> None:
        super().__init__(ready, 0, 0, absent)
        self.since, self.clients = since, clients

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        for client, answer in self.inner.exchange(requests, broadcast):
            request = requests[client]
            is_due = request.round >= self.since and client in self.clients
            if is_due and isinstance(request, JudgeRequest):
                assert isinstance(answer, Answer)
                nan = read(lambda reply: replace(reply, value=float("nan")))
                yield client, nan(self.plan, request, answer)
            else:
                yield client, answer


@pytest.mark.parametrize("method", ["fedspu", "fedavg"])
def test_the_only_client_that_is_judged_cannot_end_a_run(method: str) -> None:
    ready = prepared_for(mlp, method=method, judge__clients=1, judge__every=1)
    begin = Federation(0, ready.plan.initial)
    (client,) = ready.plan.judged_clients
    rounds = list(play(ready.plan, NoScores(ready, 0, {client}), begin, Scores()))
    assert len(rounds) == 3
    for done in rounds:
        assert done.scores == Scores()
        assert done.unjudged.keys() <= {client}
    assert rounds[0].unjudged[client].startswith("its accuracy is nan")


def test_the_clients_of_a_round_cannot_end_it_by_their_scores() -> None:
    ready = prepared_for(mlp, clients__per_round=2, judge__every=9, rounds=2)
    begin = Federation(0, ready.plan.initial)
    hostile = set(choose_clients(Federation(0, begin.global_state), ready.plan, 1))
    first, _ = play(ready.plan, NoScores(ready, 1, hostile), begin, Scores())
    assert first.unjudged.keys() == hostile
    assert first.scores.personal == scores_of_w0(ready)
