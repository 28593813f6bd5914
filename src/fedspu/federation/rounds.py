"""play_round, and the loop over rounds."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

from fedspu.federation.client import Which
from fedspu.federation.memory import Memories
from fedspu.federation.messages import Reply, Request
from fedspu.federation.plan import Plan
from fedspu.federation.server import Federation, Requests, absorb
from fedspu.training import Score


@dataclass(frozen=True)
class Cost:
    """What one client's turn cost: bytes as serialised, seconds as measured."""

    bytes_initial: int
    bytes_down: int
    bytes_up: int
    index_bytes: int
    train_seconds: float


@dataclass(frozen=True)
class Answer:
    """A client's reply and what it cost."""

    reply: Reply
    cost: Cost
    retried: bool = False  # the client was lost once, and asked again


class Engine(Protocol):
    """A way to reach clients."""

    memories: Memories

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[tuple[int, Answer]]:
        """Carry each request to its client, and its reply back; in any order.

        A client that cannot be reached is left out. Memories change at the end.
        """

    def judge(
        self, clients: Iterable[int], federation: Federation, which: Which
    ) -> dict[int, Score]:
        """Score each client's personal model, or the global one, on its test part."""


@dataclass(frozen=True)
class Accuracies:
    """What is known of how well the clients' models do on their own test parts."""

    personal: dict[int, float] = field(default_factory=dict)
    participating: frozenset[int] = frozenset()  # of those, who has taken part
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
class RoundReport:
    """What one round did."""

    federation: Federation
    answers: dict[int, Answer]
    accuracies: Accuracies
    judged: dict[int, float]  # the participants' accuracy after this round
    is_global_judged: bool
    missing: tuple[int, ...] = ()  # clients that were asked and could not be reached
    seconds: dict[str, float] = field(default_factory=dict)  # where the time went


@dataclass(frozen=True)
class Played:
    """A round that was played, and not yet judged."""

    federation: Federation
    answers: dict[int, Answer]  # without the values, which are in the average
    missing: tuple[int, ...]
    seconds: dict[str, float]


def play_round(federation: Federation, plan: Plan, engine: Engine) -> Played:
    """Play one round; clients are reached through ``engine`` alone."""
    began = perf_counter()
    answers: dict[int, Answer] = {}
    waited = 0.0

    # Server: to each chosen client, the blocks the method offers it.
    requests = Requests(federation, plan, federation.round + 1)

    # Clients: merge, train the active neurons, send them back.
    def replies() -> Iterator[tuple[int, Reply]]:
        nonlocal waited
        arriving = _in_client_order(requests, engine.exchange(requests))
        while True:
            asked = perf_counter()
            found = next(arriving, None)
            waited += perf_counter() - asked
            if found is None:
                return
            client, answer = found
            answers[client] = replace(answer, reply=replace(answer.reply, payload={}))
            yield client, answer.reply

    # Server: average each entry over the clients that trained it.
    federation = absorb(federation, plan, replies())
    missing = tuple(k for k in requests if k not in answers)
    exchange = waited - requests.seconds
    server = perf_counter() - began - exchange
    return Played(federation, answers, missing, {"server": server, "clients": exchange})


def _in_client_order(
    clients: Iterable[int], answers: Iterable[tuple[int, Answer]]
) -> Iterator[tuple[int, Answer]]:
    """Answers in the order of the clients; one that is early waits."""
    left, early = deque(clients), dict[int, Answer]()
    for client, answer in answers:
        early[client] = answer
        while left and left[0] in early:
            yield left[0], early.pop(left.popleft())
    yield from ((client, early[client]) for client in left if client in early)


def play(
    plan: Plan, engine: Engine, federation: Federation, known: Accuracies
) -> Iterator[RoundReport]:
    """Play the rounds that are left; end early once every client has stopped.

    ``known`` are the accuracies judged so far: none at the beginning of a run.
    """
    if not known.personal:
        scores = engine.judge(plan.judged_clients, federation, "personal")
        known = Accuracies({k: score.accuracy for k, score in scores.items()})
    while not is_over(federation, plan):
        played = play_round(federation, plan, engine)
        report = _judge(plan, engine, played, known)
        federation, known = played.federation, report.accuracies
        yield report


def is_over(federation: Federation, plan: Plan) -> bool:
    """Whether all rounds are played, or every client has stopped (Alg. 2, line 23)."""
    return (
        federation.round >= plan.settings.rounds
        or len(federation.stopped) == plan.num_clients
    )


def _judge(
    plan: Plan,
    engine: Engine,
    played: Played,
    known: Accuracies,
) -> RoundReport:
    """Judge the models that changed; what costs every client only when it is due."""
    began = perf_counter()
    federation, answers = played.federation, played.answers
    everyone = plan.judged_clients
    personal, global_ = dict(known.personal), known.global_
    judged: dict[int, float] = {}
    if plan.method.judges_own:
        changed = [k for k in everyone if k in answers]
        scores = engine.judge(changed, federation, "personal")
        judged = {k: score.accuracy for k, score in scores.items()}
        personal.update(judged)
    is_due = is_over(federation, plan) or (
        federation.round % plan.settings.judge.every == 0
    )
    if is_due and plan.method.exchanges:
        scores = engine.judge(everyone, federation, "global")
        global_ = _mean(score.accuracy for score in scores.values())
        if not plan.uses_global and not plan.method.judges_own:
            scores = engine.judge(everyone, federation, "personal")
        if not plan.method.judges_own:
            personal = {k: score.accuracy for k, score in scores.items()}
    accuracies = Accuracies(personal, federation.met & frozenset(everyone), global_)
    return RoundReport(
        federation,
        answers,
        accuracies,
        judged,
        is_due,
        played.missing,
        {**played.seconds, "judging": perf_counter() - began},
    )


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
