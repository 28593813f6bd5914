"""A small federation, played before a witness.

The witness stands where an engine does. It writes down every request, every reply, the
packets they became, each client's memory, and its model before and after training.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedspu.federation.client import Memory, Which, judge, take_turn
from fedspu.federation.memory import Memories
from fedspu.federation.messages import (
    Packet,
    Reply,
    Request,
    pack_reply,
    pack_request,
    unpack_reply,
    unpack_request,
)
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Accuracies, Answer, Cost, play
from fedspu.federation.server import Federation
from fedspu.federation.workbench import Workspace
from fedspu.methods.method import Lesson, Method
from fedspu.neurons.blocks import state_of
from fedspu.neurons.table import Active, Neurons, State
from fedspu.training import Recipe, Score


@dataclass(frozen=True, repr=False)
class Seen:
    """What one client's training was given, and what it did."""

    neurons: Neurons  # the model's own table, slim if it is slim
    active: Active
    learnable: frozenset[str]
    num_examples: int
    recipe: Recipe
    orders: tuple[NDArray[np.int64], ...]  # of its examples, as drawn, epoch by epoch
    begin: State
    trained: State
    loss: float


@dataclass(frozen=True, repr=False)
class Turn:
    """One client's turn; what comes after a failure is None."""

    round: int
    client: int
    request: Request
    down: Packet
    before: Memory | None
    seen: Seen | None = None
    reply: Reply | None = None  # as the client gave it, before it became bytes
    after: Memory | None = None
    up: Packet | None = None
    arrived: Reply | None = None  # as the server reads it


@dataclass(repr=False)
class Trial:
    """All that was seen of one run."""

    plan: Plan
    initial: State  # w0, as it was before anything was played
    turns: list[Turn] = field(default_factory=list)
    federations: list[Federation] = field(default_factory=list)  # after round 0, 1, …
    memories: dict[int, Memory] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def last(self) -> Federation:
        """Where the run stands at its end."""
        return self.federations[-1]

    def in_round(self, t: int) -> list[Turn]:
        """The turns of one round, in client order."""
        return [turn for turn in self.turns if turn.round == t]

    def cohorts(self) -> list[list[int]]:
        """Who took part, round by round."""
        rounds = range(1, len(self.federations))
        return [[turn.client for turn in self.in_round(t)] for t in rounds]


def play_trial(plan: Plan, rounds: int | None = None) -> Trial:
    """Play a plan to its end, for so many rounds, or to where it fails."""
    trial = Trial(plan, initial=copy_of(plan.initial))
    start = Federation(0, plan.initial)
    trial.federations.append(_copy_federation(start))
    try:
        witness = Witness(plan, trial)
        played = play(witness.plan, witness, start, Accuracies())
        for report in islice(played, rounds):
            trial.federations.append(_copy_federation(report.federation))
    except Exception as error:  # whatever a faulty method comes to
        trial.error = error
    return trial


class Witness:
    """An engine that plays all clients itself and writes everything down."""

    def __init__(self, plan: Plan, trial: Trial) -> None:
        self.plan = replace(plan, method=self._watched(plan.method))
        self.workspace = Workspace(self.plan)
        self.memories = Memories()  # those of the trial are the ones that count
        self.trial = trial
        self._seen: list[Seen] = []

    def _watched(self, method: Method) -> Method:
        """The same method, with someone to look on while it trains."""

        def train(lesson: Lesson) -> float:
            begin = state_of(lesson.model)
            rng = Noted(lesson.rng.bit_generator)
            loss = method.train(replace(lesson, rng=rng))
            seen = Seen(
                neurons=lesson.neurons,
                active=copy_of(lesson.active),
                learnable=frozenset(n for n, _ in lesson.model.named_parameters()),
                num_examples=len(lesson.x),
                recipe=lesson.recipe,
                orders=tuple(rng.orders),
                begin=begin,
                trained=state_of(lesson.model),
                loss=loss,
            )
            self._seen.append(seen)
            return loss

        return replace(method, train=train)

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[tuple[int, Answer]]:
        """Play each client's turn."""
        for client, request in requests.items():
            yield client, self._turn(request)

    def _turn(self, request: Request) -> Answer:
        memories, turns = self.trial.memories, self.trial.turns
        memory = memories.get(request.client)
        down = pack_request(self.plan, request)
        turn = Turn(
            round=request.round,
            client=request.client,
            request=_copy_request(request),
            down=down,
            before=memory and _copy_memory(memory),
        )
        turns.append(turn)
        received = unpack_request(self.plan, down)
        self._seen.clear()
        reply, after = take_turn(self.plan, self.workspace, received, memory)
        if not self._seen:
            raise RuntimeError("the client's turn ended without training")
        turns[-1] = turn = replace(
            turn,
            seen=self._seen[-1],
            reply=_copy_reply(reply),
            after=_copy_memory(after),
        )
        up = pack_reply(self.plan, reply, received.offer)
        turns[-1] = turn = replace(turn, up=up)
        arrived = unpack_reply(self.plan, up, request.client, request.offer)
        turns[-1] = replace(turn, arrived=_copy_reply(arrived))
        memories[request.client] = after
        return Answer(arrived, cost_of(down, up))

    def judge(
        self, clients: Iterable[int], federation: Federation, which: Which
    ) -> dict[int, Score]:
        """Score each client's personal model, or the global one, on its test part."""
        return {
            client: judge(
                self.plan,
                self.workspace,
                federation.round,
                client,
                self.trial.memories.get(client),
                federation.global_state,
                which,
            )
            for client in clients
        }


class Noted(np.random.Generator):
    """A generator that remembers the orders it has drawn."""

    def __init__(self, bit_generator: np.random.BitGenerator) -> None:
        super().__init__(bit_generator)
        self.orders: list[NDArray[np.int64]] = []

    def permutation(self, x, axis=0):  # type: ignore[no-untyped-def]  # as numpy has it
        """A random order, as ever."""
        order = super().permutation(x, axis)
        self.orders.append(np.asarray(order).copy())
        return order


# Copies, so that nothing that is changed later changes what was seen -----------------


def copy_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values in memory of their own."""
    return {name: values.clone() for name, values in tensors.items()}


def _copy_federation(federation: Federation) -> Federation:
    return replace(
        federation,
        global_state=copy_of(federation.global_state),
        kept={client: copy_of(kept) for client, kept in federation.kept.items()},
    )


def _copy_request(request: Request) -> Request:
    initial = request.initial and copy_of(request.initial)
    return replace(request, payload=copy_of(request.payload), initial=initial)


def _copy_reply(reply: Reply) -> Reply:
    active = None if reply.active is None else copy_of(reply.active)
    return replace(reply, active=active, payload=copy_of(reply.payload))


def _copy_memory(memory: Memory) -> Memory:
    own = memory.own
    return replace(memory, own=own and replace(own, state=copy_of(own.state)))


def cost_of(down: Packet, up: Packet) -> Cost:
    """What these packets cost, by their lengths; no clock runs."""
    return Cost(
        bytes_initial=len(down.initial),
        bytes_down=len(down.values),
        bytes_up=len(up.values),
        index_bytes=sum(
            len(part) for p in (down, up) for part in (p.header, p.positions)
        ),
        train_seconds=0.0,
    )
