from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedspu.methods.method as method_module
from fedspu.engines.local import LocalEngine
from fedspu.errors import TrainingError
from fedspu.federation.client import Client
from fedspu.federation.engine import Answer, Missing
from fedspu.federation.messages import (
    NO_TIME,
    Packet,
    TrainReply,
    TrainRequest,
    pack_request,
    unpack_reply,
)
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import judge
from fedspu.federation.server import Federation
from fedspu.methods.method import Memory
from fedspu.prepare import Prepared
from fedspu.training.epochs import train
from tests.oracles.federation import bits, prepared_for, request_for, same_bits


def engine_of(ready: Prepared) -> LocalEngine:
    return LocalEngine(ready.plan, ready.examples)


def requests(plan: Plan, *clients: int) -> dict[int, TrainRequest]:
    """What the server asks of these clients in the first round."""
    federation = Federation(0, plan.initial)
    return {client: request_for(plan, federation, 1, client) for client in clients}


def exchanged(
    engine: LocalEngine, requests: Mapping[int, TrainRequest]
) -> dict[int, Answer]:
    found = dict(engine.exchange(requests))
    return {k: answer for k, answer in found.items() if isinstance(answer, Answer)}


def reply_of(plan: Plan, request: TrainRequest, answer: Answer) -> TrainReply:
    reply = unpack_reply(plan, request, answer.up)
    assert isinstance(reply, TrainReply)
    return reply


def without_time(answer: Answer) -> Packet:
    """The bytes of an answer."""
    return replace(answer.up, took=NO_TIME)


def test_bytes_are_counted_as_serialised() -> None:
    ready = prepared_for(early_stopping=True)
    plan = ready.plan
    answers = exchanged(engine_of(ready), requests(plan, 0, 3, 5))
    assert answers.keys() == {0, 3, 5}
    for client, answer in answers.items():
        request = requests(plan, client)[client]
        down = pack_request(plan, request)
        up = answer.up
        cost = answer.cost
        assert cost.bytes_initial == len(down.initial) > 0
        assert cost.bytes_down == len(down.values)
        assert cost.bytes_up == len(up.values) == len(down.values)
        beside = (down.header, down.positions, up.header, up.positions)
        assert cost.index_bytes == sum(map(len, beside))
        # And the values are the tensors' bytes, no more and no less.
        assert cost.bytes_down == sum(len(bits(t)) for t in request.payload.values())


def test_a_method_without_exchange_sends_no_values() -> None:
    ready = prepared_for(method="local")
    asked = requests(ready.plan, 0, 3)
    answers = exchanged(engine_of(ready), asked)
    assert {a.cost.bytes_down + a.cost.bytes_up for a in answers.values()} == {0}
    replies = [reply_of(ready.plan, asked[k], answers[k]) for k in (0, 3)]
    assert all(reply.payload == {} for reply in replies)


def test_the_order_of_requests_does_not_matter() -> None:
    ready = prepared_for()
    plan = ready.plan
    one, other = engine_of(ready), engine_of(ready)
    first = exchanged(one, requests(plan, 0, 3, 5))
    second = exchanged(other, requests(plan, 5, 0, 3))
    for client in (0, 3, 5):
        assert without_time(first[client]) == without_time(second[client])
        kept, also = (engine.shelf.get(client, 1).own for engine in (one, other))
        assert kept is not None
        assert also is not None
        assert same_bits(kept.state, also.state)


def test_a_client_s_turn_does_not_depend_on_who_else_takes_part() -> None:
    ready = prepared_for()
    alone = exchanged(engine_of(ready), requests(ready.plan, 3))[3]
    among = exchanged(engine_of(ready), requests(ready.plan, 0, 1, 2, 3))[3]
    assert without_time(alone) == without_time(among)


def test_what_clients_had_before_a_round_is_there_after_one_of_them_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = prepared_for()
    plan, engine = ready.plan, engine_of(ready)
    exchanged(engine, requests(plan, 0, 1))
    before = {client: engine.shelf.get(client, 1) for client in (0, 1)}
    kept = {client: values_of(memory) for client, memory in before.items()}
    turns = iter([True, False])

    def fails_second(*args: Any) -> float:
        if not next(turns):
            raise TrainingError("the training loss is nan")
        return train(*args)

    monkeypatch.setattr(method_module, "train", fails_second)
    now = Federation(1, plan.initial, last={0: 1, 1: 1})
    second = {client: request_for(plan, now, 2, client) for client in (0, 3)}
    answers = dict(engine.exchange(second))
    assert isinstance(answers[0], Answer)
    assert answers[3] == Missing("the training loss is nan", has_failed=True)
    engine.shelf.keep_only(now.last.items())  # as a run does that goes on from there
    assert sorted(engine.shelf.names()) == [(0, 1), (1, 1)]
    for client, memory in before.items():
        assert engine.shelf.get(client, 1) is memory
        assert values_of(memory) == kept[client]


def values_of(memory: Memory) -> dict[str, bytes]:
    assert memory.own is not None
    return {name: bits(tensor) for name, tensor in memory.own.state.items()}


def test_what_a_client_gets_and_gives_has_crossed_as_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but the packets' content reaches the other side."""
    ready = prepared_for()
    request = requests(ready.plan, 5)[5]
    seen: list[Any] = []
    original = Client.take_turn

    def spied(client: Client, received: TrainRequest, memory: Memory) -> Any:
        reply, kept = original(client, received, memory)
        seen.extend([received, reply, kept])
        return reply, kept

    monkeypatch.setattr(Client, "take_turn", spied)
    answer = exchanged(engine_of(ready), {5: request})[5]
    received, _, memory = seen
    assert received is not request
    arrived = reply_of(ready.plan, request, answer)
    with torch.no_grad():
        for tensor in (*request.payload.values(), *arrived.payload.values()):
            tensor.zero_()
    assert float(received.payload["fc.weight"].abs().sum()) > 0
    assert float(memory.own.state["fc.weight"].abs().sum()) > 0


def right_by_hand(ready: Prepared, model: nn.Module, client: int) -> list[float]:
    """The share of right answers on a client's own test and validation part."""
    parts = (ready.examples.part(client, name) for name in ("test", "val"))
    return [(model.eval()(x).argmax(1) == y).double().mean().item() for x, y in parts]


def test_judging_scores_each_client_s_own_model_on_its_own_parts() -> None:
    ready = prepared_for(train__epochs=8)
    plan, engine = ready.plan, engine_of(ready)
    exchanged(engine, requests(plan, 5))
    by_hand = plan.build()
    elsewhere = {name: tensor + 1 for name, tensor in plan.initial.items()}
    federation = Federation(1, elsewhere, last={5: 1})
    for client in (4, 5):
        own = engine.shelf.get(client, federation.last.get(client, 0)).own
        assert (own is None) == (client == 4)
        by_hand.load_state_dict(plan.initial if own is None else own.state)
        score = judge(plan, engine, federation, [client], "personal").scores[client]
        assert list(score) == pytest.approx(right_by_hand(ready, by_hand, client))


def test_the_broadcast_is_what_clients_judge_by_the_server_s_model() -> None:
    ready = prepared_for()
    plan, engine = ready.plan, engine_of(ready)
    by_hand = plan.build()
    asked = requests(plan, 5)
    trained = reply_of(plan, asked[5], exchanged(engine, asked)[5])
    state = {**plan.initial, **trained.payload}  # client 5 has capacity 1
    federation = Federation(1, state, last={5: 1})
    found = judge(plan, engine, federation, range(6), "global").scores
    by_hand.load_state_dict(state)
    for client, score in found.items():
        assert list(score) == pytest.approx(right_by_hand(ready, by_hand, client))


def test_an_engine_moves_no_global_generator() -> None:
    ready = prepared_for()
    plan = ready.plan
    before = torch.get_rng_state()
    engine = engine_of(ready)
    exchanged(engine, requests(plan, 0))
    federation = Federation(1, plan.initial, last={0: 1})
    judge(plan, engine, federation, [0, 1], "personal")
    judge(plan, engine, federation, [0, 1], "global")
    assert torch.equal(torch.get_rng_state(), before)
