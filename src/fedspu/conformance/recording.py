"""A small federation, played by an engine that records everything.

It records every request and reply, the packets they became, each client's memory, and
its model before and after training.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspu.data.examples import DividedData
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Cost, Facts
from fedspu.federation.messages import (
    JudgeRequest,
    Packet,
    Request,
    TrainReply,
    TrainRequest,
    pack_reply,
    pack_request,
    unpack_reply,
    unpack_request,
)
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Scores, play
from fedspu.federation.server import Federation
from fedspu.methods.method import Memory, Method, Trained, Turn
from fedspu.neurons.blocks import state_of
from fedspu.neurons.table import Active, Neurons, State
from fedspu.settings import TrainSettings
from fedspu.training.epochs import LocalTraining


@dataclass(frozen=True, repr=False)
class RecordedTraining:
    """What one client's training was given, and what it returned."""

    neurons: Neurons  # the model's own table, slim if it is slim
    active: Active
    learnable: frozenset[str]
    num_examples: int
    settings: TrainSettings
    orders: tuple[NDArray[np.int64], ...]  # of its examples, as drawn, epoch by epoch
    begin: State
    sent: State  # the model whose trained entries go back
    loss: float


@dataclass(frozen=True, repr=False)
class RecordedTurn:
    """One client's turn; if it failed, the fields not reached are None."""

    round: int
    client: int
    request: TrainRequest
    down: Packet
    before: Memory
    training: RecordedTraining | None = None
    reply: TrainReply | None = None  # as the client returned it, before it became bytes
    after: Memory | None = None
    up: Packet | None = None
    arrived: TrainReply | None = None  # as the server reads it


@dataclass(repr=False)
class Recording:
    """Everything that was recorded about one run."""

    plan: Plan
    examples: DividedData
    initial: State  # w0, as it was before anything was played
    turns: list[RecordedTurn] = field(default_factory=list)
    federations: list[Federation] = field(default_factory=list)  # after round 0, 1, …
    memories: dict[int, Memory] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def last(self) -> Federation:
        """The server's state at the end of the run."""
        return self.federations[-1]

    def in_round(self, t: int) -> list[RecordedTurn]:
        """The turns of one round, in client order."""
        return [turn for turn in self.turns if turn.round == t]

    def cohorts(self) -> list[list[int]]:
        """The clients that took part, round by round."""
        rounds = range(1, len(self.federations))
        return [[turn.client for turn in self.in_round(t)] for t in rounds]


def record(plan: Plan, examples: DividedData, rounds: int | None = None) -> Recording:
    """Play a plan to its end, for this many rounds, or until it fails."""
    recording = Recording(plan, examples, initial=copy_of(plan.initial))
    start = Federation(0, plan.initial)
    recording.federations.append(_copy_federation(start))
    try:
        engine = RecordingEngine(recording)
        for played in islice(play(engine.plan, engine, start, Scores()), rounds):
            recording.federations.append(_copy_federation(played.federation))
    except Exception as error:  # a faulty method may raise anything
        recording.error = error
    return recording


class RecordingEngine:
    """An engine that plays all clients itself and records everything."""

    facts = Facts()

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        method = self._watched(recording.plan.method)
        self.plan = replace(recording.plan, method=method)
        shelf, device = Shelf(None), torch.device("cpu")
        self.client = Client(self.plan, recording.examples, shelf, device)
        self._trained: list[RecordedTraining] = []

    def _watched(self, method: Method) -> Method:
        """The same method, with its training recorded."""

        def train(turn: Turn, local: LocalTraining) -> Trained:
            begin = state_of(local.model)
            rng = Noted(local.rng.bit_generator)
            trained = method.train(turn, replace(local, rng=rng))
            seen = RecordedTraining(
                neurons=local.neurons,
                active=copy_of(local.active),
                learnable=frozenset(n for n, _ in local.model.named_parameters()),
                num_examples=len(local.x),
                settings=local.settings,
                orders=tuple(rng.orders),
                begin=begin,
                sent=copy_of(trained.sent),
                loss=trained.loss,
            )
            self._trained.append(seen)
            return trained

        return replace(method, train=train)

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer]]:
        """Play each client's turn."""
        for client in requests:
            request = requests[client]
            if isinstance(request, JudgeRequest):
                down = pack_request(self.plan, request)
                up = self.client.answer(down, broadcast)
                yield client, Answer(up, Cost.of(down, up))
            else:
                yield client, self._turn(request)

    def _turn(self, request: TrainRequest) -> Answer:
        memories, turns = self.recording.memories, self.recording.turns
        memory = memories.get(request.client, Memory())
        down = pack_request(self.plan, request)
        turn = RecordedTurn(
            round=request.round,
            client=request.client,
            request=_copy_request(request),
            down=down,
            before=_copy_memory(memory),
        )
        turns.append(turn)
        received = unpack_request(self.plan, down)
        if not isinstance(received, TrainRequest):
            raise RuntimeError("a train request was read back as another kind")
        self._trained.clear()
        reply, after = self.client.take_turn(received, memory)
        if not self._trained:
            raise RuntimeError("the client's turn ended without training")
        turns[-1] = turn = replace(
            turn,
            training=self._trained[-1],
            reply=_copy_reply(reply),
            after=_copy_memory(after),
        )
        up = pack_reply(self.plan, received, reply)
        turns[-1] = turn = replace(turn, up=up)
        arrived = unpack_reply(self.plan, request, up)
        if not isinstance(arrived, TrainReply):
            raise RuntimeError("a train reply was read back as another kind")
        turns[-1] = replace(turn, arrived=_copy_reply(arrived))
        memories[request.client] = after
        self.client.shelf.put(request.client, request.round, after)
        return Answer(up, Cost.of(down, up))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Noted(np.random.Generator):
    """A generator that remembers the orders it has drawn."""

    def __init__(self, bit_generator: np.random.BitGenerator) -> None:
        super().__init__(bit_generator)
        self.orders: list[NDArray[np.int64]] = []

    def permutation(self, x, axis=0):  # type: ignore[no-untyped-def]  # as numpy has it
        """A random order, as usual."""
        order = super().permutation(x, axis)
        self.orders.append(np.asarray(order).copy())
        return order


# Copies, so that later changes do not reach the recording -----------------------------


def copy_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of every tensor, by name."""
    return {name: values.clone() for name, values in tensors.items()}


def _copy_federation(federation: Federation) -> Federation:
    return replace(
        federation,
        global_state=copy_of(federation.global_state),
        kept={client: copy_of(kept) for client, kept in federation.kept.items()},
        extra=copy_of(federation.extra),
    )


def _copy_request(request: TrainRequest) -> TrainRequest:
    initial = request.initial and copy_of(request.initial)
    return replace(request, payload=copy_of(request.payload), initial=initial)


def _copy_reply(reply: TrainReply) -> TrainReply:
    active = None if reply.active is None else copy_of(reply.active)
    return replace(reply, active=active, payload=copy_of(reply.payload))


def _copy_memory(memory: Memory) -> Memory:
    own = memory.own
    return replace(
        memory,
        own=own and replace(own, state=copy_of(own.state)),
        extra=copy_of(memory.extra),
    )
