"""The loop over rounds: play one, judge what changed, report."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol, TypeVar

from fedspu.errors import FedSPUError, TrainingError
from fedspu.federation.client_memory import Shelf
from fedspu.federation.guards.guard import find_guard
from fedspu.federation.messages import (
    JudgeReply,
    Packet,
    Reply,
    Request,
    TrainReply,
    check_reply,
)
from fedspu.federation.plan import Plan
from fedspu.federation.server import (
    Federation,
    TrainRequests,
    judge_requests,
    next_federation,
    update_of,
)
from fedspu.methods.method import Which, answered
from fedspu.neurons.average import Accumulator
from fedspu.neurons.table import State


@dataclass(frozen=True)
class Cost:
    """What one client's turn cost: bytes as serialised, seconds as measured."""

    bytes_initial: int
    bytes_down: int
    bytes_up: int
    index_bytes: int
    train_seconds: float

    @staticmethod
    def of(down: Packet, up: Packet) -> "Cost":
        """What these messages cost."""
        return Cost(
            bytes_initial=len(down.initial),
            bytes_down=len(down.values),
            bytes_up=len(up.values),
            index_bytes=down.index_bytes + up.index_bytes,
            train_seconds=up.seconds,
        )


@dataclass(frozen=True)
class Answer:
    """A client's reply and what it cost."""

    reply: Reply
    cost: Cost
    retried: bool = False  # the client was lost once, and asked again


@dataclass(frozen=True)
class Missing:
    """Why a client gave no answer."""

    reason: str


@dataclass(frozen=True)
class Facts:
    """What an engine can tell about itself."""

    num_workers: int = 1
    peak_bytes: int = 0  # memory of the largest of its other processes


class Engine(Protocol):
    """A way to reach clients: it carries messages, and that is all."""

    @property
    def facts(self) -> Facts:
        """What it can tell about itself."""

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """Carry each request to its client, and its reply back; in any order.

        ``broadcast`` goes to all of these clients alike. A client that cannot be
        reached is ``Missing``, with the reason.
        """

    def close(self) -> None:
        """Release all that the engine holds."""


@dataclass(frozen=True)
class Scores:
    """How well clients' models do on their own test parts, as last judged."""

    personal: dict[int, float] = field(default_factory=dict)
    participating: frozenset[int] = frozenset()  # judged clients that took part
    global_: float | None = None  # at the last judging

    @property
    def personal_mean(self) -> float | None:
        """Unweighted mean over the judged clients."""
        return _mean(self.personal.values())

    @property
    def participating_mean(self) -> float | None:
        """The same, without the clients that never took part."""
        return _mean(self.personal[k] for k in sorted(self.participating))


@dataclass(frozen=True)
class Round:
    """What one round did."""

    federation: Federation  # as it is after the round
    answers: dict[int, Answer]  # without their values, which are in the average
    missing: dict[int, str] = field(default_factory=dict)  # and why
    refused: dict[int, str] = field(default_factory=dict)  # and why
    scores: Scores = field(default_factory=Scores)
    judged: dict[int, float] = field(default_factory=dict)  # the participants' models
    is_global_judged: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # where the time went

    def replies(self) -> Iterator[tuple[int, TrainReply]]:
        """Each participant's reply, in client order."""
        for client, answer in self.answers.items():
            if isinstance(answer.reply, TrainReply):
                yield client, answer.reply


def play_round(federation: Federation, plan: Plan, engine: Engine) -> Round:
    """Play one round; clients are reached only through ``engine``."""
    watch = Stopwatch()
    answers: dict[int, Answer] = {}
    replies: dict[int, TrainReply] = {}
    missing: dict[int, str] = {}
    refused: dict[int, str] = {}

    # Server: send each chosen client the blocks that the method offers it.
    requests = TrainRequests(federation, plan, federation.round + 1)
    combined = answered(
        plan.method,
        "combine",
        plan.method.combine(federation.global_state),
        Accumulator,  # type: ignore[type-abstract]  # a protocol is enough to check
    )
    combined = find_guard(plan.settings.guard).on_server(requests, combined)

    # Clients: merge, train the active neurons, send them back.
    arriving = in_client_order(requests, engine.exchange(requests))
    for client, answer in watch.waiting(arriving):
        if isinstance(answer, Missing):
            missing[client] = answer.reason
            continue
        reply = answer.reply
        if not isinstance(reply, TrainReply):
            refused[client] = f"it is a {type(reply).__name__}"
            continue
        if reason := check_reply(plan, requests.t, client, reply):
            refused[client] = reason
            continue

        # Server: average each entry over the clients that trained it.
        if update := update_of(plan, reply):
            combined.add(update)
        replies[client] = reply = replace(reply, payload={})  # its values are added
        answers[client] = replace(answer, reply=reply)

    federation = next_federation(plan, federation, combined.result(), replies)
    return Round(federation, answers, missing, refused, seconds=watch.seconds())


def drop_old_memories(shelf: Shelf, before: Federation, played: Round) -> None:
    """Forget what clients had before a round, as it is no longer needed."""
    for client in played.answers:
        if client in before.last:
            shelf.drop(client, before.last[client])
    # A client that was refused or lost begins again from what it had before.
    for client in (*played.refused, *played.missing):
        shelf.drop(client, played.federation.round)


T = TypeVar("T")


def in_client_order(
    clients: Iterable[int], answers: Iterable[tuple[int, T]]
) -> Iterator[tuple[int, T]]:
    """Answers in the order of the clients; one that comes early waits."""
    left, early = deque(clients), dict[int, T]()
    for client, answer in answers:
        early[client] = answer
        while left and left[0] in early:
            yield left[0], early.pop(left.popleft())
    yield from ((client, early[client]) for client in left if client in early)


class Stopwatch:
    """Measures how long the server works in a round, and how long it waits."""

    def __init__(self) -> None:
        self._began, self._waited = perf_counter(), 0.0

    def waiting(self, arriving: Iterator[T]) -> Iterator[T]:
        """The same items; the time until each arrives counts as waiting."""
        while True:
            asked = perf_counter()
            found = next(arriving, None)
            self._waited += perf_counter() - asked
            if found is None:
                return
            yield found

    def seconds(self) -> dict[str, float]:
        """Seconds so far."""
        whole = perf_counter() - self._began
        return {"server": whole - self._waited, "clients": self._waited}


def play(
    plan: Plan, engine: Engine, federation: Federation, known: Scores
) -> Iterator[Round]:
    """Play the rounds that are left; end early once every client has stopped.

    ``known`` are the scores so far: none at the beginning of a run.
    """
    if not known.personal:
        everyone = plan.judged_clients
        known = Scores(judge(plan, engine, federation, everyone, "personal"))
    while not is_over(federation, plan):
        played = _judged(plan, engine, play_round(federation, plan, engine), known)
        federation, known = played.federation, played.scores
        lost = {**played.missing, **played.refused}
        if is_over(federation, plan) and lost and not federation.last:
            client, reason = next(iter(lost.items()))
            raise TrainingError(
                "no client gave a reply that can be used, in any round; the last was "
                f"client {client}: {reason}"
            )
        yield played


def is_over(federation: Federation, plan: Plan) -> bool:
    """Whether all rounds are played, or every client has stopped (Alg. 2, line 23)."""
    return (
        federation.round >= plan.settings.rounds
        or len(federation.stopped) == plan.num_clients
    )


# Judging ------------------------------------------------------------------------------


def judge(
    plan: Plan,
    engine: Engine,
    federation: Federation,
    clients: Sequence[int],
    which: Which,
) -> dict[int, float]:
    """How well each client's own model, or the global one, does on its test part."""
    is_own = which == "personal" and plan.method.keeps_own
    requests = judge_requests(federation, list(clients), which)
    broadcast = None if is_own else federation.global_state
    scores: dict[int, float] = {}
    for client, answer in engine.exchange(requests, broadcast):
        if isinstance(answer, Missing):
            raise FedSPUError(f"client {client} could not be judged: {answer.reason}")
        reply = answer.reply
        if not isinstance(reply, JudgeReply):
            kind = type(reply).__name__
            raise FedSPUError(
                f"client {client} could not be judged: its reply is a {kind}"
            )
        if problem := check_reply(plan, federation.round, client, reply):
            raise FedSPUError(f"client {client} could not be judged: {problem}")
        scores[client] = reply.value
    return {client: scores[client] for client in clients}


def _judged(plan: Plan, engine: Engine, played: Round, known: Scores) -> Round:
    """Judge the models that changed; ask every client only in rounds when it is due."""
    began = perf_counter()
    federation, method = played.federation, plan.method
    everyone = plan.judged_clients
    personal, global_ = dict(known.personal), known.global_
    judged: dict[int, float] = {}
    if method.keeps_own:
        changed = [k for k in everyone if k in played.answers]
        judged = judge(plan, engine, federation, changed, "personal")
        personal.update(judged)
    is_due = is_over(federation, plan) or (
        federation.round % plan.settings.judge.every == 0
    )
    if is_due and plan.has_global:
        scores = judge(plan, engine, federation, everyone, "global")
        global_ = _mean(scores.values())
        if plan.uses_global:
            personal = scores
    if is_due and not method.keeps_own and not plan.uses_global:
        personal = judge(plan, engine, federation, everyone, "personal")
    took_part = frozenset(federation.last) & frozenset(everyone)
    return replace(
        played,
        scores=Scores(personal, took_part, global_),
        judged=judged,
        is_global_judged=is_due,
        seconds={**played.seconds, "judging": perf_counter() - began},
    )


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
