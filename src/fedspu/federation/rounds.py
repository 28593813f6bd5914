"""The loop over rounds: play one, judge what changed, report."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TypeVar

from fedspu.errors import FedSPUError, ModelError, TrainingError
from fedspu.federation.checks import read_reply
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Cost, Engine, Missing
from fedspu.federation.guards.guard import find_guard
from fedspu.federation.messages import JudgeReply, TrainReply
from fedspu.federation.plan import Plan
from fedspu.federation.server import (
    Federation,
    TrainRequests,
    finished_federation,
    judge_requests,
    next_federation,
    update_of,
)
from fedspu.federation.values import Values
from fedspu.methods.method import Which, answered
from fedspu.neurons.average import Accumulator


@dataclass(frozen=True)
class Scores:
    """How well clients' models do on their own examples, as last judged."""

    personal: dict[int, Values] = field(default_factory=dict)
    participating: frozenset[int] = frozenset()  # judged clients that took part
    global_: Values | None = None  # at the last judging

    @property
    def personal_mean(self) -> Values | None:
        """Unweighted mean over the judged clients."""
        return _mean(self.personal.values())

    @property
    def participating_mean(self) -> Values | None:
        """The same, without the clients that never took part."""
        return _mean(self.personal[k] for k in sorted(self.participating))


@dataclass(frozen=True)
class Used:
    """A reply that is used; its values are dropped once they are in the average."""

    reply: TrainReply
    cost: Cost
    retried: bool = False  # the client was lost once, and asked again


@dataclass(frozen=True)
class Round:
    """What one round did."""

    federation: Federation  # as it is after the round
    answers: dict[int, Used]
    missing: dict[int, str] = field(default_factory=dict)  # and why
    refused: dict[int, str] = field(default_factory=dict)  # and why
    ignored: dict[int, int] = field(default_factory=dict)  # replies nobody asked for
    scores: Scores = field(default_factory=Scores)
    unjudged: dict[int, str] = field(default_factory=dict)  # and why
    judged: dict[int, Values] = field(default_factory=dict)  # the participants' models
    is_global_judged: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # where the time went

    def __repr__(self) -> str:
        """Which round, and who took part; not the tensors."""
        lost = len(self.missing) + len(self.refused)
        return (
            f"Round({self.federation.round}: {len(self.answers)} clients took part, "
            f"{lost} turns lost, {len(self.federation.stopped)} stopped)"
        )

    def replies(self) -> Iterator[tuple[int, TrainReply]]:
        """Each participant's reply, in client order."""
        for client, answer in self.answers.items():
            yield client, answer.reply


def play_round(federation: Federation, plan: Plan, engine: Engine) -> Round:
    """Play one round; clients are reached only through ``engine``."""
    watch = Stopwatch()
    answers: dict[int, Used] = {}
    missing: dict[int, Missing] = {}
    refused: dict[int, str] = {}
    ignored: dict[int, int] = {}

    # Server: send each chosen client the blocks that the method offers it.
    is_finish = plan.finishes and has_ended(federation, plan)
    requests = TrainRequests(federation, plan, federation.round + 1, is_finish)
    combined = answered(
        plan.method,
        "combine",
        plan.method.combine(federation.global_state),
        Accumulator,  # type: ignore[type-abstract]  # a protocol is enough to check
    )
    combined = find_guard(plan.settings.guard).on_server(requests, combined)

    # Clients: merge, train the active neurons, send them back.
    arriving = watch.waiting(engine.exchange(requests))
    first = first_answers(requests, arriving, ignored)
    read = _each_read(plan, federation, requests, first)
    for client, found in in_client_order(requests, read):
        if isinstance(found, Missing):
            missing[client] = found
        elif isinstance(found, ModelError):
            refused[client] = str(found)
        else:
            # Server: average each entry over the clients that trained it.
            if update := update_of(plan, found.reply):
                combined.add(update)
            reply = replace(found.reply, payload={})  # its values are added
            answers[client] = replace(found, reply=reply)

    # One client alone ends a run only if it is broken from the beginning.
    if len(requests) > 1 or not federation.last:
        _refuse_if_all_failed(requests.t, len(requests), missing)
    replies = {client: used.reply for client, used in answers.items()}
    if is_finish:  # nothing came back
        federation = finished_federation(federation, replies)
    else:
        federation = next_federation(plan, federation, combined.result(), replies)
    return Round(
        federation,
        answers,
        {client: lost.reason for client, lost in missing.items()},
        refused,
        ignored,
        seconds=watch.seconds(),
    )


def _each_read(
    plan: Plan,
    federation: Federation,
    requests: TrainRequests,
    answers: Iterable[tuple[int, Answer | Missing]],
) -> Iterator[tuple[int, Used | Missing | ModelError]]:
    """Read and check each reply as it comes; a refused one becomes the reason."""
    for client, answer in answers:
        if isinstance(answer, Missing):
            yield client, answer
            continue
        count = federation.num_examples.get(client)
        try:
            reply = read_reply(plan, requests.asked(client), answer.up, count)
        except ModelError as error:
            yield client, error
            continue
        if not isinstance(reply, TrainReply):  # read_reply has refused it
            raise TypeError(f"a train request got a {type(reply).__name__}")
        yield client, Used(reply, answer.cost, answer.retried)


def _refuse_if_all_failed(
    t: int, num_asked: int, missing: Mapping[int, Missing]
) -> None:
    """End a run in which the turns of all clients that were asked went wrong."""
    failed = {k: lost.reason for k, lost in missing.items() if lost.has_failed}
    if not failed or len(failed) < num_asked:
        return
    client, reason = next(iter(failed.items()))
    others = f"; the other {num_asked - 1} failed too" if num_asked > 1 else ""
    raise TrainingError(f"round {t}, client {client}: {reason}{others}")


def drop_old_memories(shelf: Shelf, before: Federation, played: Round) -> None:
    """Forget what clients had before a round, as it is no longer needed."""
    for client in played.answers:
        if client in before.last:
            shelf.drop(client, before.last[client])
    # A client that was refused or lost begins again from what it had before.
    for client in (*played.refused, *played.missing):
        shelf.drop(client, played.federation.round)


T = TypeVar("T")


def first_answers(
    clients: Iterable[int],
    answers: Iterable[tuple[int, Answer | Missing]],
    ignored: dict[int, int],
) -> Iterator[tuple[int, Answer | Missing]]:
    """The first answer of every client that was asked; all others are counted.

    A client of which nothing was heard in the end is missing.
    """
    waiting = set(clients)
    for client, answer in answers:
        if client in waiting:
            waiting.remove(client)
            yield client, answer
        else:
            ignored[client] = ignored.get(client, 0) + 1
    yield from ((client, Missing("no answer")) for client in sorted(waiting))


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
    plan: Plan,
    engine: Engine,
    federation: Federation,
    known: Scores,
    trained: Callable[[Round], None] | None = None,
) -> Iterator[Round]:
    """Play the rounds that are left; end early once every client has stopped.

    ``known`` are the scores so far: none at the beginning of a run. ``trained`` is
    called with each round before it is judged.
    """
    began, first = perf_counter(), Judging({})
    if not known.personal:
        first = judge(plan, engine, federation, plan.judged_clients, "personal")
        known = Scores(first.scores)
    judging = perf_counter() - began  # what is judged before a round counts to it
    while not is_over(federation, plan):
        played = play_round(federation, plan, engine)
        if trained:
            trained(played)
        played = _judged(plan, engine, replace(played, unjudged=first.unjudged), known)
        played.seconds["judging"] += judging
        first, judging = Judging({}), 0.0
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
    """Whether the run has ended, and clients have made their last models, if any."""
    return has_ended(federation, plan) and (federation.is_finished or not plan.finishes)


def has_ended(federation: Federation, plan: Plan) -> bool:
    """Whether all rounds are played, or every client has stopped (Alg. 2, line 23)."""
    return (
        federation.round >= plan.settings.rounds
        or len(federation.stopped) == plan.num_clients
    )


# Judging ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judging:
    """What clients that were asked to judge a model replied."""

    scores: dict[int, Values]
    unjudged: dict[int, str] = field(default_factory=dict)  # and why
    ignored: dict[int, int] = field(default_factory=dict)  # replies nobody asked for


def judge(
    plan: Plan,
    engine: Engine,
    federation: Federation,
    clients: Sequence[int],
    which: Which,
    known: Mapping[int, Values] | None = None,
) -> Judging:
    """How well each client's own model, or the global one, does on its own examples.

    It is an error if nobody was ever judged (no scores are ``known`` from before), and
    the turns of all who were asked went wrong, or several were asked and all are lost.
    A score that is refused is never an error: its client alone is to blame.
    """
    is_own = which == "personal" and has_own_models(federation, plan)
    requests = judge_requests(federation, list(clients), which)
    broadcast = None if is_own else federation.shown_state
    scores: dict[int, Values] = {}
    missing: dict[int, Missing] = {}
    refused: dict[int, str] = {}
    ignored: dict[int, int] = {}
    arriving = engine.exchange(requests, broadcast)
    for client, answer in first_answers(requests, arriving, ignored):
        if isinstance(answer, Missing):
            missing[client] = answer
            continue
        try:
            reply = read_reply(plan, requests[client], answer.up)
        except ModelError as error:
            refused[client] = str(error)
            continue
        if isinstance(reply, JudgeReply):
            scores[client] = Values(reply.value, reply.val_value)
    missing = {client: missing[client] for client in clients if client in missing}
    if missing and not (scores or refused or known):
        _refuse_if_all_failed(federation.round, len(clients), missing)
        if len(clients) > 1:
            client, lost = next(iter(missing.items()))
            raise FedSPUError(f"client {client} could not be judged: {lost.reason}")
    unjudged = {**refused, **{client: lost.reason for client, lost in missing.items()}}
    return Judging(
        {client: scores[client] for client in clients if client in scores},
        {client: unjudged[client] for client in clients if client in unjudged},
        ignored,
    )


def has_own_models(federation: Federation, plan: Plan) -> bool:
    """Whether clients that took part are judged by a model that they keep."""
    return plan.method.keeps_own or federation.is_finished


def _judged(plan: Plan, engine: Engine, played: Round, known: Scores) -> Round:
    """Judge the models that changed; ask every client only in rounds when it is due.

    A client that could not be judged keeps its score from before, or has none. The same
    holds for the global model, if nobody could judge it.
    """
    began = perf_counter()
    federation = played.federation
    has_own = has_own_models(federation, plan)
    everyone = plan.judged_clients
    personal, global_ = dict(known.personal), known.global_
    judged: dict[int, Values] = {}
    global_scores: dict[int, Values] = {}
    unjudged, ignored = dict(played.unjudged), Counter(played.ignored)

    def ask(clients: Sequence[int], which: Which) -> dict[int, Values]:
        found = judge(plan, engine, federation, clients, which, personal)
        unjudged.update(found.unjudged)
        ignored.update(found.ignored)
        return found.scores

    if has_own:
        judged = ask([k for k in everyone if k in played.answers], "personal")
        personal.update(judged)
    is_due = is_over(federation, plan) or (
        federation.round % plan.settings.judge.every == 0
    )
    if is_due and plan.has_global:
        global_scores = ask(everyone, "global")
        global_ = _mean(global_scores.values()) if global_scores else global_
        if plan.uses_global and not has_own:
            personal.update(global_scores)
    if is_due and not has_own and not plan.uses_global:
        personal.update(ask(everyone, "personal"))
    personal = {client: personal[client] for client in everyone if client in personal}
    took_part = frozenset(federation.last) & frozenset(personal)
    return replace(
        played,
        scores=Scores(personal, took_part, global_),
        judged=judged,
        unjudged=unjudged,
        ignored=dict(ignored),
        is_global_judged=bool(global_scores),
        seconds={**played.seconds, "judging": perf_counter() - began},
    )


def _mean(scores: Iterable[Values]) -> Values | None:
    listed = list(scores)
    if not listed:
        return None
    test, val = map(sum, zip(*listed, strict=True))
    return Values(test / len(listed), val / len(listed))
