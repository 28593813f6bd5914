"""A worker that does not answer in time counts as dead."""

import os
import signal
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

import fedspu
from fedspu.engines import deadline as deadline_module
from fedspu.engines import workers as workers_module
from fedspu.engines.deadline import FIRST, LEAST, TIMES, Deadline
from fedspu.engines.workers import WorkersEngine, can_fork
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf
from fedspu.federation.messages import JudgeRequest, Request, TrainRequest
from fedspu.federation.server import Federation, choose_clients
from fedspu.neurons.table import State
from tests.oracles.federation import (
    ConvNet,
    examples,
    named,
    plan_for,
    prepared_for,
    request_for,
)

TRAIN = TrainRequest(1, 0, 0, None, {}, None)
JUDGE = JudgeRequest(1, 0, 0, "personal")

needs_fork = pytest.mark.skipif(not can_fork(), reason="workers are forked")


# How long a turn may take -------------------------------------------------------------


def test_a_deadline_that_is_set_is_that_of_every_turn() -> None:
    deadline = Deadline(7.5)
    deadline.note(TRAIN, 10, 1000)
    assert deadline.seconds(TRAIN, 10) == deadline.seconds(JUDGE, 99) == 7.5


def test_zero_is_no_deadline() -> None:
    deadline = Deadline(0)
    deadline.note(TRAIN, 10, 1)
    assert deadline.seconds(TRAIN, 10) == inf


def test_without_experience_there_is_an_hour() -> None:
    deadline = Deadline(None)
    assert deadline.seconds(TRAIN, 10) == FIRST == 3600
    deadline.note(JUDGE, 10, 1)
    assert deadline.seconds(TRAIN, 10) == FIRST  # judging says nothing about training
    assert deadline.seconds(JUDGE, 10) == LEAST


def test_a_turn_may_take_many_times_as_long_as_the_slowest_by_its_length() -> None:
    deadline = Deadline(None)
    for length, seconds in ((10, 40), (20, 60), (10, 1)):  # at most 4 s for one unit
        deadline.note(TRAIN, length, seconds)
    assert deadline.seconds(TRAIN, 10) == TIMES * 40
    assert deadline.seconds(TRAIN, 30) == TIMES * 120
    assert deadline.seconds(TRAIN, 0.01) == LEAST


# Workers that hang --------------------------------------------------------------------

pytestmark = pytest.mark.filterwarnings("ignore:1 of clients' turns were lost")


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


HANGS: dict[str, Callable[[], None]] = {
    "an endless loop": sleep_for_ever,
    "a stop": stop,
}


def hanging(
    monkeypatch: pytest.MonkeyPatch,
    count: Path,
    times: int,
    is_it: Callable[[Request], bool],
    hang: Callable[[], None] = sleep_for_ever,
) -> None:
    """Let workers hang in some requests, the first so many times."""
    original = Client.reply

    def reply(self: Client, request: Request, broadcast: State | None = None) -> Any:
        if is_it(request):
            so_far = len(count.read_text()) if count.exists() else 0
            if so_far < times:
                count.write_text("x" * (so_far + 1))
                hang()
        return original(self, request, broadcast)

    monkeypatch.setattr(Client, "reply", reply)


def simulate(**given: Any) -> fedspu.Run:
    return fedspu.simulate(
        named(rounds=2, workers=2, judge__every=1, **given),
        model=ConvNet,
        data=examples(),
    )


def victim() -> int:
    plan = plan_for(rounds=2)
    return choose_clients(Federation(1, plan.initial), plan, 2)[1]


def is_turn(request: Request) -> bool:
    is_train = isinstance(request, TrainRequest)
    return is_train and (request.round, request.client) == (2, victim())


@needs_fork
@pytest.mark.parametrize("hang", HANGS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_that_hangs_is_replaced_and_its_client_asked_once_more(
    times: int, hang: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = simulate()
    before = children()
    hanging(monkeypatch, tmp_path / "count", times, is_turn, HANGS[hang])
    found = simulate(clients__deadline=3.0)
    assert children() == before
    if times == 1:
        assert found.rounds == whole.rounds
        assert [line["retried_clients"] for line in found.times] == [[], [victim()]]
    else:
        why = {str(victim()): "no answer within 3 s, 2 times"}
        assert [line["missing_clients"] for line in found.rounds] == [{}, why]
        assert found.rounds[0] == whole.rounds[0]
        assert len(found.rounds[1]["clients"]) == 2


def children() -> set[int]:
    me = os.getpid()
    found = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    return {int(child) for child in found}


@needs_fork
def test_by_default_the_deadline_is_learned_from_other_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = simulate()
    monkeypatch.setattr(deadline_module, "LEAST", 3.0)
    hanging(monkeypatch, tmp_path / "count", 1, is_turn)
    found = simulate()
    assert found.rounds == whole.rounds
    assert [line["retried_clients"] for line in found.times] == [[], [victim()]]


@needs_fork
def test_workers_that_all_hang_in_their_first_turns_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = simulate()
    monkeypatch.setattr(deadline_module, "FIRST", 2.0)
    monkeypatch.setattr(deadline_module, "LEAST", 8.0)  # the second may have this long
    counts = iter(tmp_path / name for name in "ab")
    for client in choose_clients(Federation(0, plan_for().initial), plan_for(), 1)[:2]:

        def is_first(request: Request, client: int = client) -> bool:
            is_train = isinstance(request, TrainRequest)
            return is_train and (request.round, request.client) == (1, client)

        hanging(monkeypatch, next(counts), 1, is_first)
    found = simulate()
    assert found.rounds == whole.rounds
    assert len(found.times[0]["retried_clients"]) == 2


@needs_fork
@pytest.mark.filterwarnings("ignore:1 times a client could not be judged")
def test_judging_has_a_deadline_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_judged(request: Request) -> bool:
        is_own = isinstance(request, JudgeRequest) and request.which == "personal"
        return is_own and (request.round, request.client) == (2, victim())

    hanging(monkeypatch, tmp_path / "count", 2, is_judged)
    found = simulate(clients__deadline=3.0)
    why = {str(victim()): "no answer within 3 s, 2 times"}
    assert [line["unjudged_clients"] for line in found.rounds] == [{}, why]


@needs_fork
def test_time_in_which_this_process_stood_still_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-Z and fg: the clock has jumped, the workers were stopped too."""
    ready = prepared_for(clients__deadline=60.0)
    plan = ready.plan
    hours = iter(range(10**9))
    monkeypatch.setattr(workers_module, "monotonic", lambda: 3600.0 * next(hours))
    monkeypatch.setattr(workers_module, "TICK", 0.01)
    engine = WorkersEngine(plan, ready.examples, Shelf(tmp_path), 2)
    start = Federation(0, plan.initial)
    requests = {client: request_for(plan, start, 1, client) for client in (0, 1, 2)}
    try:
        answers = dict(engine.exchange(requests))
    finally:
        engine.close()
    retried = [getattr(answer, "retried", None) for answer in answers.values()]
    assert retried == [False] * 3
