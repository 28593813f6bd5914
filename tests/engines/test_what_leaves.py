"""Nothing but trained blocks, positions, counts, losses and metrics leaves a client.

Every byte that crosses is recorded, on every engine, and compared with a message that
is written here by hand, from what the client trained.
"""

import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedspu.conformance.entries import as_bytes, at_full_size, held_by_slim, is_active
from fedspu.engines.local import LocalEngine
from fedspu.engines.workers import Worker, WorkersEngine, can_fork
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Cost, Engine
from fedspu.federation.messages import (
    NO_TIME,
    JudgeReply,
    JudgeRequest,
    Packet,
    Request,
    Seconds,
    TrainRequest,
)
from fedspu.federation.server import Federation, judge_requests
from fedspu.methods.method import Memory, ModelState, Trained, Turn
from fedspu.neurons.table import Active, State
from fedspu.prepare import Prepared
from fedspu.training.epochs import LocalTraining
from tests.engines.fresh import FreshEngine
from tests.oracles.federation import (
    client_of,
    mlp,
    prepared_for,
    request_for,
    with_inputs,
)

METHODS = ("fedspu", "hermes", "feddrop", "ditto", "apfl", "fedper", "fedavg", "local")
CLIENTS = (0, 3, 5)


@cache
def ready_for(method: str, **given: Any) -> Prepared:
    recipe = {"train__epochs": 1, "early_stopping": True, **given}
    return prepared_for(mlp, method=method, **recipe)


def requests(ready: Prepared, *clients: int) -> dict[int, TrainRequest]:
    start = Federation(0, ready.plan.initial)
    return {k: request_for(ready.plan, start, 1, k) for k in clients}


# A reply by hand ----------------------------------------------------------------------


@cache
def by_hand(method: str, client: int) -> Packet:
    """The bytes of a client's reply, written from what it trained."""
    ready = ready_for(method)
    results: list[Trained] = []

    def train(turn: Turn, local: LocalTraining) -> Trained:
        trained = ready.plan.method.train(turn, local)
        results.append(trained)
        return trained

    plan = replace(ready.plan, method=replace(ready.plan.method, train=train))
    player = client_of(replace(ready, plan=plan))
    request = requests(ready, client)[client]
    reply, _ = player.take_turn(request, Memory())
    examples, _ = ready.examples.part(client, "train")
    if not plan.method.is_slim:  # else it is the loss of a model cut out of this one
        keeps = plan.method.keeps_own
        judged = results[0].own if keeps else results[0].sent
        loss = validation_loss(ready, client, judged)
        assert reply.val_loss == pytest.approx(loss, rel=1e-6)
    header = struct.pack(
        "<BBIII??dd",
        *(2, 1, 1, client, len(examples), False, True),
        *(results[0].loss, reply.val_loss),
    )
    if reply.active is None:
        return Packet(header)
    positions, values = b"=", b""
    assert request.offer is not None
    if not same(reply.active, request.offer.active):
        bits = [
            int(neuron) in reply.active[group.name].tolist()
            for group in plan.neurons.groups
            for neuron in range(group.size)
        ]
        positions = b"b" + np.packbits(bits).tobytes()
    state = results[0].sent
    if plan.method.is_slim:
        held = held_by_slim(plan.neurons, reply.active)
        state, _ = at_full_size(plan.neurons, held, state, plan.initial)
    for name in plan.neurons.shapes:
        if name not in plan.method.stays(plan.neurons):
            shape = tuple(plan.initial[name].shape)
            inside = is_active(plan.neurons, reply.active, name, shape)
            values += as_bytes(state[name][inside])
    return Packet(header, positions, values)


def validation_loss(ready: Prepared, client: int, state: State) -> float:
    model = ready.plan.build()
    model.load_state_dict(state)
    x, y = ready.examples.part(client, "val")
    with torch.no_grad():
        return float(F.cross_entropy(model.eval()(x), y))


def same(a: Active, b: Active) -> bool:
    return all(a[name].tolist() == b[name].tolist() for name in a)


# What crosses -------------------------------------------------------------------------


class Tap:
    """A pipe that notes all that arrives through it."""

    def __init__(self, pipe: Any, seen: list[bytes]) -> None:
        self.pipe, self.seen = pipe, seen

    def recv(self) -> Any:
        self.seen.append(self.pipe.recv_bytes())
        return pickle.loads(self.seen[-1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)


def workers(ready: Prepared, folder: Path, seen: list[bytes]) -> Engine:
    class Tapped(WorkersEngine):
        def _hire(self) -> Worker:
            worker = super()._hire()
            worker.pipe = Tap(worker.pipe, seen)  # type: ignore[assignment]  # like one
            return worker

    return Tapped(ready.plan, ready.examples, Shelf(folder), 2)


def local(ready: Prepared, folder: Path, seen: list[bytes]) -> Engine:
    return LocalEngine(ready.plan, ready.examples, Shelf(folder))


def fresh(ready: Prepared, folder: Path, seen: list[bytes]) -> Engine:
    return FreshEngine(ready.plan, ready.examples, folder)


ENGINES = [
    *((local, method) for method in METHODS),
    *(
        pytest.param(
            workers, m, marks=pytest.mark.skipif(not can_fork(), reason="no fork")
        )
        for m in METHODS
    ),
    pytest.param(fresh, "fedspu", marks=pytest.mark.slow),
]


def exchanged(
    make: Callable[..., Engine],
    ready: Prepared,
    folder: Path,
    asked: dict[int, Any],
    broadcast: State | None = None,
) -> tuple[dict[int, Answer], list[bytes]]:
    """What an engine hands in, and what went through its pipes."""
    seen: list[bytes] = []
    engine = make(ready, folder, seen)
    try:
        found = dict(engine.exchange(asked, broadcast))
    finally:
        engine.close()
    return {k: a for k, a in found.items() if isinstance(a, Answer)}, seen


@pytest.mark.parametrize(("make", "method"), ENGINES)
def test_a_reply_is_what_was_trained_and_nothing_else(
    make: Callable[..., Engine], method: str, tmp_path: Path
) -> None:
    ready = ready_for(method)
    asked: dict[int, Request] = {**requests(ready, *CLIENTS)}
    answers, piped = exchanged(make, ready, tmp_path, asked)
    assert answers.keys() == set(CLIENTS)
    for client, answer in answers.items():
        wanted = by_hand(method, client)
        assert replace(answer.up, took=NO_TIME) == wanted
        assert_only_times(answer.up.took)
        # An answer is a message, its cost, and whether it was asked for again.
        assert vars(answer).keys() == {"up", "cost", "retried"}
        assert vars(answer.cost).keys() == set(Cost.__dataclass_fields__)
        spent = answer.cost.train_seconds, answer.cost.train_cpu_seconds
        assert spent == answer.up.took
        assert all(seconds > 0 for seconds in spent)
    if make is workers:
        assert_only_lengths(piped, [by_hand(method, k) for k in CLIENTS])


@pytest.mark.parametrize(("make", "method"), ENGINES)
def test_judging_sends_a_count_a_loss_and_a_metric_of_two_parts(
    make: Callable[..., Engine], method: str, tmp_path: Path
) -> None:
    ready = ready_for(method)
    plan = ready.plan
    asked: dict[int, JudgeRequest] = judge_requests(
        Federation(0, plan.initial), list(CLIENTS), "personal"
    )
    answers, piped = exchanged(make, ready, tmp_path, asked, plan.initial)
    wanted = []
    for client, answer in answers.items():
        reply, _ = client_of(ready).reply(asked[client], plan.initial)
        count = len(ready.examples.part(client, "test")[0])
        assert isinstance(reply, JudgeReply)
        measured = (reply.loss, reply.value, reply.val_value)
        header = struct.pack("<BBIIIddd", 2, 2, 0, client, count, *measured)
        wanted.append(Packet(header))
        assert replace(answer.up, took=NO_TIME) == wanted[-1]
    assert len(wanted) == 3
    if make is workers:
        assert_only_lengths(piped, wanted)


def assert_only_times(took: Seconds) -> None:
    assert type(took) is Seconds
    assert [type(seconds) for seconds in took] == [float, float]


def assert_only_lengths(piped: list[bytes], packets: list[Packet]) -> None:
    """Lengths of the parts, seconds and peak memory go through pipes, and no more."""
    lengths = []
    for content in piped:
        is_done, (found, took, peak) = pickle.loads(content)
        assert is_done is True
        assert_only_times(took)
        assert type(peak) is int
        lengths.append(found)
    assert sorted(lengths) == sorted(
        (len(p.header), len(p.positions), len(p.values), 0) for p in packets
    )


# What does not matter -----------------------------------------------------------------


def noisy(state: State, seed: int) -> State:
    draw = torch.Generator().manual_seed(seed)
    return {name: t + torch.randn(t.shape, generator=draw) for name, t in state.items()}


def answer_of(ready: Prepared, memory: Memory, seed: int = 1) -> Packet:
    """Client 3's reply in round 2, if this is what it kept of round 1."""
    plan = ready.plan
    shelf = Shelf(None)
    shelf.put(3, 1, memory)
    player = Client(plan, ready.examples, shelf, torch.device("cpu"))
    federation = Federation(1, noisy(plan.initial, seed), last={3: 1})
    request = request_for(plan, federation, 2, 3)
    engine = LocalEngine(plan, ready.examples, shelf)
    engine.client = player
    (found,) = [answer for _, answer in engine.exchange({3: request})]
    assert isinstance(found, Answer)
    return replace(found.up, took=NO_TIME)


LOSSES = slice(16, 32)
"""Where the two losses are in the header of a reply."""


@pytest.mark.parametrize("method", ["fedspu", "fedper", "fedavg"])
def test_if_nothing_is_learned_only_losses_tell_of_a_client(method: str) -> None:
    """With a rate of 0: frozen neurons, private tensors and examples do not show."""
    ready = ready_for(method, train__lr=0.0)
    plan = ready.plan
    own = ModelState(noisy(plan.initial, 7))
    first = answer_of(ready, Memory(own, (0.5,)))
    x = ready.examples.data.x
    others = {
        "frozen and private values": (
            ready,
            Memory(ModelState(noisy(plan.initial, 8)), (0.5,)),
        ),
        "what it remembers": (ready, Memory(own, (0.1,))),
        "the order of examples": (with_inputs(ready, x.flip(0)), Memory(own, (0.5,))),
        "the examples": (with_inputs(ready, 3 - x), Memory(own, (0.5,))),
    }
    for what, (changed, memory) in others.items():
        other = answer_of(changed, memory)
        assert other.values == first.values, what
        assert other.positions == first.positions, what
        assert other.header[:14] == first.header[:14], what  # up to has_stopped
    received = answer_of(ready, Memory(own, (0.5,)), seed=2)
    assert received.values != first.values  # they are what was received


@pytest.mark.parametrize("method", ["fedspu", "fedper", "fedavg"])
def test_what_training_does_not_use_does_not_show(method: str) -> None:
    ready = ready_for(method, early_stopping=False)
    plan = ready.plan
    own = ModelState(noisy(plan.initial, 7))
    first = answer_of(ready, Memory(own))
    junk = {"weights": torch.ones(9)}
    assert answer_of(ready, Memory(own, (3.0, 4.0), junk)) == first
    x = ready.examples.data.x.clone()
    mine = torch.from_numpy(ready.examples.splits[3].train)
    keep = torch.zeros(len(x), dtype=torch.bool)
    keep[mine] = True
    x[~keep] = 9.0  # everything but the client's own training examples
    assert answer_of(with_inputs(ready, x), Memory(own)) == first
    x = ready.examples.data.x.clone()
    x[mine] += 1.0
    assert answer_of(with_inputs(ready, x), Memory(own)) != first


def test_losses_are_where_this_file_says() -> None:
    ready = ready_for("fedspu", train__lr=0.0)
    own = Memory(ModelState(noisy(ready.plan.initial, 7)), (0.5,))
    header = answer_of(ready, own).header
    losses = struct.unpack("<dd", header[LOSSES])
    reply, _ = client_of(ready).take_turn(
        request_for(
            ready.plan,
            Federation(1, noisy(ready.plan.initial, 1), last={3: 1}),
            2,
            3,
        ),
        own,
    )
    assert losses == (reply.train_loss, reply.val_loss)
    assert len(header) == 32
