import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedspu
from fedspu.engines import workers
from fedspu.engines.crew import Turns
from fedspu.engines.local import LocalEngine
from fedspu.engines.workers import WorkersEngine, can_fork
from fedspu.errors import FedSPUError, StorageError, TrainingError
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf, ShelfError
from fedspu.federation.messages import Packet, TrainRequest, unpack_request
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Round, judge
from fedspu.federation.server import Federation, TrainRequests, choose_clients
from fedspu.methods.method import Memory, Which
from fedspu.neurons.table import State
from fedspu.prepare import Prepared
from tests.oracles.federation import (
    ConvNet,
    examples,
    folder_content,
    named,
    plan_for,
    prepared_for,
)

pytestmark = pytest.mark.skipif(not can_fork(), reason="workers are forked")


def run(path: Path, **given: Any) -> fedspu.Run:
    settings = named(rounds=4, clients__per_round=5, **given)
    settings["out"] = str(path)
    return fedspu.simulate(settings, model=ConvNet, data=examples())


# The same bits -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:workers = 4")  # more than there are cores
@pytest.mark.parametrize("method", ["fedspu", "hermes", "fedavg"])
def test_neither_workers_nor_the_cache_of_models_change_a_byte(
    method: str, tmp_path: Path
) -> None:
    expected = folder_content_of(tmp_path / "alone", method, workers=1)
    for workers_, cache in ((4, 200.0), (4, 0.0), (2, 0.0), (1, 0.0), (2, 200.0)):
        path = tmp_path / f"{workers_}-{cache}"
        found = folder_content_of(path, method, workers=workers_, store__cache=cache)
        assert found == expected


def folder_content_of(path: Path, method: str, **given: Any) -> dict[str, bytes]:
    run(path, method=method, **given)
    return folder_content(path)


def turns_of_all_clients(window: int = 24) -> tuple[Prepared, Turns]:
    ready = prepared_for(clients__per_round=6)
    plan = ready.plan
    requests = TrainRequests(Federation(0, plan.initial), plan, 1)
    return ready, Turns(plan, ready.examples, requests, window)


def test_the_longest_turns_begin_first() -> None:
    ready, turns = turns_of_all_clients()
    begun = [job.client for job in iter(turns.next, None)]
    lengths = [
        ready.examples.num_examples(k) * (1 + float(ready.plan.capacity(k)))
        for k in begun
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(begun) == list(range(6))


def test_a_turn_made_ahead_is_the_one_that_would_be_next() -> None:
    _, turns = turns_of_all_clients()
    wanted = [job.client for job in iter(turns.next, None)]
    _, turns = turns_of_all_clients()
    found = []
    for _ in wanted:
        turns.make_ahead()
        turns.make_ahead()  # it is there already
        job = turns.next()
        assert job is not None
        found.append(job.client)
    assert found == wanted
    turns.make_ahead()
    assert turns.next() is None


def test_few_replies_wait_for_their_turn() -> None:
    _, turns = turns_of_all_clients(window=2)
    begun = [job.client for job in iter(turns.next, None)]
    assert sorted(begun) == [0, 1]  # no further ahead
    turns.end(0)
    turns.end(1)
    begun = [job.client for job in iter(turns.next, None)]
    assert sorted(begun) == [2, 3]


# A worker that dies ------------------------------------------------------------------


def dying(t: int, victim: int, times: int, count: Path) -> Callable[..., Packet]:
    """An answer during which the worker is killed, the first so many times."""
    original = Client.answer

    def answer(client: Client, packet: Packet, broadcast: State | None) -> Packet:
        request = unpack_request(client.plan, packet)
        is_turn = isinstance(request, TrainRequest)
        if is_turn and (request.round, request.client) == (t, victim):
            killed = len(count.read_text()) if count.exists() else 0
            if killed < times:
                count.write_text("x" * (killed + 1))
                os.kill(os.getpid(), signal.SIGKILL)
        return original(client, packet, broadcast)

    return answer


@pytest.fixture
def victim() -> int:
    plan = plan_for(rounds=4)
    return choose_clients(Federation(1, plan.initial), plan, 2)[1]


@pytest.mark.filterwarnings("ignore:1 of clients' turns")
@pytest.mark.parametrize("times", [1, 2])
def test_a_killed_worker_s_client_is_asked_once_more_and_then_missed(
    times: int, victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulate() -> fedspu.Run:
        return fedspu.simulate(
            named(rounds=4, workers=2), model=ConvNet, data=examples()
        )

    whole = simulate()
    count = tmp_path / "count"
    monkeypatch.setattr(Client, "answer", dying(2, victim, times, count))
    found = simulate()
    missing = [line["missing_clients"] for line in found.rounds]
    retried = [line["retried_clients"] for line in found.times]
    if times == 1:
        assert found.rounds == whole.rounds
        assert retried == [[], [victim], [], []]
        assert found.summary["missing_turns"] == 0
    else:
        assert missing == [{}, {str(victim): workers.DIED}, {}, {}]
        assert victim not in found.rounds[1]["clients"]
        assert found.rounds[0] == whole.rounds[0]
        assert found.summary["missing_turns"] == 1
        assert len(found.rounds) == 4


def test_an_error_in_a_worker_is_raised_here_as_it_was_there() -> None:
    with pytest.raises(TrainingError, match=r"round 1, client \d: .*lower train.lr"):
        fedspu.simulate(
            named(workers=2, train__lr=1e30), model=ConvNet, data=examples()
        )


def test_a_worker_that_cannot_be_replaced_is_one_line(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    original = WorkersEngine._hire
    hired: list[workers.Worker] = []

    def hire(self: WorkersEngine) -> workers.Worker:
        if len(hired) == 2:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        hired.append(original(self))
        return hired[-1]

    monkeypatch.setattr(WorkersEngine, "_hire", hire)
    monkeypatch.setattr(Client, "answer", dying(2, victim, 1, tmp_path / "count"))
    wanted = (
        r"^no new worker can be started \(Cannot allocate memory\); lower --workers, "
        r"or resume later$"
    )
    with pytest.raises(FedSPUError, match=wanted):
        fedspu.simulate(named(rounds=4, workers=2), model=ConvNet, data=examples())
    assert children() == before


def test_after_an_error_no_worker_is_left() -> None:
    before = children()
    with pytest.raises(TrainingError):
        fedspu.simulate(
            named(workers=2, train__lr=1e30), model=ConvNet, data=examples()
        )
    assert children() == before


def test_a_finished_run_leaves_no_worker_and_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = children()
    found = fedspu.simulate(named(workers=2), model=ConvNet, data=examples())
    assert children() == before
    client = found.rounds[-1]["clients"][0]
    found.personal_model(client)  # what clients keep is there as long as the run is
    (room,) = tmp_path.iterdir()
    taken_part = {k for line in found.rounds for k in line["clients"]}
    models = list(room.glob("client-*"))
    assert len(models) == len(taken_part)  # the last of each, no more
    del found
    assert not list(tmp_path.iterdir())


def children() -> set[int]:
    me = os.getpid()
    found = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    return {int(child) for child in found}


# Going on ----------------------------------------------------------------------------


def test_a_full_disk_in_a_worker_says_what_is_saved_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole", workers=2)
    put = Shelf.put

    def full(shelf: Shelf, client: int, t: int, memory: Memory) -> None:
        if t == 3:
            raise ShelfError(f"{shelf.folder}: cannot write (No space left on device)")
        put(shelf, client, t, memory)

    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "put", full)
        with pytest.raises(StorageError, match=r"No space left.*rounds up to 2 are"):
            run(path, workers=2)
    fedspu.resume(path, model=ConvNet, data=examples())
    assert folder_content(path) == folder_content(tmp_path / "whole")


def test_a_resumed_run_may_have_other_workers(tmp_path: Path) -> None:
    run(tmp_path / "whole", workers=1)

    def stop(plan: Plan, played: Round) -> None:
        if played.federation.round == 2:
            raise KeyboardInterrupt

    settings = {**named(rounds=4, clients__per_round=5, workers=1)}
    settings["out"] = str(tmp_path / "part")
    with pytest.raises(KeyboardInterrupt):
        fedspu.simulate(settings, model=ConvNet, data=examples(), watch=stop)
    fedspu.resume(tmp_path / "part", model=ConvNet, data=examples(), workers=2)
    assert folder_content(tmp_path / "part") == folder_content(tmp_path / "whole")


# Judging -----------------------------------------------------------------------------


def test_workers_judge_as_one_process_does(tmp_path: Path) -> None:
    ready = prepared_for(method="fjord")
    plan = ready.plan
    alone = LocalEngine(plan, ready.examples)
    engine = WorkersEngine(plan, ready.examples, Shelf(tmp_path), 2)
    try:
        for t in (0, 1):  # another state later is not taken for the first
            state = {name: values + t for name, values in plan.initial.items()}
            federation = Federation(t, state)
            for which in WHICH:
                expected = judge(plan, alone, federation, range(6), which)
                assert judge(plan, engine, federation, range(6), which) == expected
                two = judge(plan, engine, federation, [4, 1], which)
                assert list(two.scores) == [4, 1]
    finally:
        engine.close()


WHICH: tuple[Which, ...] = ("personal", "global")
