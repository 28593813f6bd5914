from collections.abc import Mapping
from typing import Any

import pytest
import torch

import fedspu.methods.method as method_module
from fedspu.engines import turns
from fedspu.engines.local import LocalEngine
from fedspu.errors import TrainingError
from fedspu.federation import client as client_module
from fedspu.federation.messages import Request, pack_reply, pack_request
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Answer
from fedspu.federation.server import Federation, build_request
from fedspu.federation.workbench import Workspace
from fedspu.training import train
from tests.oracles.federation import bits, plan_for, same_bits


def requests(plan: Plan, *clients: int, t: int = 1) -> dict[int, Request]:
    federation = Federation(t - 1, plan.initial)
    return {client: build_request(federation, plan, t, client) for client in clients}


def exchanged(
    engine: LocalEngine, requests: Mapping[int, Request]
) -> dict[int, Answer]:
    return dict(engine.exchange(requests))


def test_bytes_are_counted_as_serialised() -> None:
    plan = plan_for(early_stopping=True)
    answers = exchanged(LocalEngine(plan), requests(plan, 0, 3, 5))
    for client, answer in answers.items():
        request = requests(plan, client)[client]
        down = pack_request(plan, request)
        up = pack_reply(plan, answer.reply, request.offer)
        cost = answer.cost
        assert cost.bytes_initial == len(down.initial) > 0
        assert cost.bytes_down == len(down.values)
        assert cost.bytes_up == len(up.values) == len(down.values)
        beside = (down.header, down.positions, up.header, up.positions)
        assert cost.index_bytes == sum(map(len, beside))
        # And the values are the tensors' bytes, no more and no less.
        assert cost.bytes_down == sum(len(bits(t)) for t in request.payload.values())


def test_a_method_without_exchange_sends_no_values() -> None:
    plan = plan_for(method="local")
    answers = exchanged(LocalEngine(plan), requests(plan, 0, 3))
    assert {a.cost.bytes_down + a.cost.bytes_up for a in answers.values()} == {0}
    assert all(a.reply.payload == {} for a in answers.values())


def test_the_order_of_requests_does_not_matter() -> None:
    plan = plan_for()
    one, other = LocalEngine(plan), LocalEngine(plan)
    first = exchanged(one, requests(plan, 0, 3, 5))
    second = exchanged(other, requests(plan, 5, 0, 3))
    for client in (0, 3, 5):
        assert same_bits(first[client].reply.payload, second[client].reply.payload)
        mine, its = one.memories[client].own, other.memories[client].own
        assert mine is not None
        assert its is not None
        assert same_bits(mine.state, its.state)


def test_a_client_s_turn_does_not_depend_on_who_else_takes_part() -> None:
    plan = plan_for()
    alone = exchanged(LocalEngine(plan), requests(plan, 3))[3]
    among = exchanged(LocalEngine(plan), requests(plan, 0, 1, 2, 3))[3]
    assert same_bits(alone.reply.payload, among.reply.payload)


def test_no_memory_changes_if_one_client_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for()
    engine = LocalEngine(plan)
    exchanged(engine, requests(plan, 0, 1))
    before = dict(engine.memories)
    turns = iter([True, False])

    def fails_second(*args: Any) -> float:
        if not next(turns):
            raise TrainingError("the training loss is nan")
        return train(*args)

    monkeypatch.setattr(method_module, "train", fails_second)
    with pytest.raises(TrainingError, match="round 2, client 3: the training loss"):
        exchanged(engine, requests(plan, 0, 3, t=2))
    assert engine.memories.keys() == before.keys()
    assert all(engine.memories[k].own is before[k].own for k in before)


def test_what_a_client_gets_and_gives_has_crossed_as_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but the packets' content reaches the other side."""
    plan = plan_for()
    request = requests(plan, 5)[5]
    seen: list[Any] = []
    original = client_module.take_turn

    def spied(plan: Plan, place: Workspace, received: Request, memory: Any) -> Any:
        reply, memory = original(plan, place, received, memory)
        seen.extend([received, reply, memory])
        return reply, memory

    monkeypatch.setattr(turns, "take_turn", spied)
    answer = exchanged(LocalEngine(plan), {5: request})[5]
    received, reply, memory = seen
    assert received is not request
    assert answer.reply is not reply
    with torch.no_grad():
        for tensor in (*request.payload.values(), *answer.reply.payload.values()):
            tensor.zero_()
    assert float(received.payload["fc.weight"].abs().sum()) > 0
    assert float(memory.own.state["fc.weight"].abs().sum()) > 0


def test_judging_scores_each_client_s_own_model_on_its_own_test_part() -> None:
    plan = plan_for(train__epochs=8)
    engine = LocalEngine(plan)
    exchanged(engine, requests(plan, 5))
    by_hand = plan.build()
    elsewhere = {name: tensor + 1 for name, tensor in plan.initial.items()}
    for client in (4, 5):
        memory = engine.memories.get(client)
        own = None if memory is None else memory.own
        assert (own is None) == (client == 4)
        by_hand.load_state_dict(plan.initial if own is None else own.state)
        x, y = plan.examples(client, "test")
        right = (by_hand.eval()(x).argmax(1) == y).float().mean().item()
        score = engine.judge([client], Federation(1, elsewhere), "personal")[client]
        assert score.accuracy == pytest.approx(right)


def test_an_engine_moves_no_global_generator() -> None:
    plan = plan_for()
    before = torch.get_rng_state()
    engine = LocalEngine(plan)
    exchanged(engine, requests(plan, 0))
    federation = Federation(1, plan.initial)
    engine.judge([0, 1], federation, "personal")
    engine.judge([0, 1], federation, "global")
    assert torch.equal(torch.get_rng_state(), before)
