"""play_round, and the loop over rounds."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fedspu.core.evaluation import Score
from fedspu.core.types import State
from fedspu.federation.messages import Reply, Request
from fedspu.federation.plan import Plan
from fedspu.federation.server import (
    Federation,
    absorb,
    build_request,
    choose_clients,
)
from fedspu.methods.method import global_model


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


class Engine(Protocol):
    """A way to reach clients."""

    def exchange(self, requests: Mapping[int, Request]) -> dict[int, Answer]:
        """Carry each request to its client, and its reply back."""

    def judge(self, clients: Iterable[int], state: State | None) -> dict[int, Score]:
        """Score ``state`` on clients' test parts; None: each client's own model."""


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


def play_round(
    federation: Federation, plan: Plan, engine: Engine
) -> tuple[Federation, dict[int, Answer]]:
    """Play one round; clients are reached through ``engine`` alone."""
    t = federation.round + 1

    # Server: to each chosen client, the blocks the method offers it.
    requests = {
        client: build_request(federation, plan, t, client)
        for client in choose_clients(federation, plan, t)
    }

    # Clients: merge, train the active neurons, send them back.
    answers = engine.exchange(requests)

    # Server: average each entry over the clients that trained it.
    replies = {client: answer.reply for client, answer in answers.items()}
    return absorb(federation, plan, replies), answers


def play(
    plan: Plan, engine: Engine, federation: Federation, known: Accuracies
) -> Iterator[RoundReport]:
    """Play the rounds that are left; end early once every client has stopped.

    ``known`` are the accuracies judged so far: none at the beginning of a run.
    """
    if not known.personal:  # every client's model is w0
        scores = engine.judge(plan.judged_clients, plan.initial)
        known = Accuracies({k: score.accuracy for k, score in scores.items()})
    while not is_over(federation, plan):
        federation, answers = play_round(federation, plan, engine)
        report = _judge(plan, engine, federation, answers, known)
        known = report.accuracies
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
    federation: Federation,
    answers: dict[int, Answer],
    known: Accuracies,
) -> RoundReport:
    """Judge the models that changed; what costs every client only when it is due."""
    everyone = plan.judged_clients
    personal, global_ = dict(known.personal), known.global_
    judged: dict[int, float] = {}
    if plan.method.judge is not global_model:
        scores = engine.judge([k for k in everyone if k in answers], None)
        judged = {k: score.accuracy for k, score in scores.items()}
        personal.update(judged)
    is_due = is_over(federation, plan) or (
        federation.round % plan.settings.judge.every == 0
    )
    if is_due and plan.method.exchanges:
        scores = engine.judge(everyone, federation.global_state)
        global_ = _mean(score.accuracy for score in scores.values())
        if plan.method.judge is global_model:
            personal = {k: score.accuracy for k, score in scores.items()}
    accuracies = Accuracies(personal, federation.met & frozenset(everyone), global_)
    return RoundReport(federation, answers, accuracies, judged, is_due)


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
