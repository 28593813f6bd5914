import errno
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedspu
from fedspu import runs
from fedspu.engines import workers
from fedspu.engines.local import LocalEngine
from fedspu.engines.turns import play_turn
from fedspu.engines.workers import WorkersEngine, can_fork
from fedspu.errors import SettingsError, StorageError, TrainingError
from fedspu.federation.memory import Entry, Memories, Shelf, ShelfError
from fedspu.federation.plan import Plan
from fedspu.federation.server import Federation, Requests, choose_clients
from fedspu.methods import READINGS
from fedspu.methods.method import Method
from tests.oracles.federation import ConvNet, examples, folder_content, named, plan_for

pytestmark = pytest.mark.skipif(not can_fork(), reason="workers are forked")


def run(path: Path, **given: Any) -> fedspu.Run:
    settings = named(rounds=4, clients__per_round=5, **given)
    settings["out"] = str(path)
    return fedspu.simulate(settings, model=ConvNet, data=examples())


# The same bits -----------------------------------------------------------------------


@pytest.mark.parametrize("method", READINGS, ids=lambda m: f"{m.name} {m.reading}")
def test_the_number_of_workers_changes_no_byte(method: Method, tmp_path: Path) -> None:
    given = {"method": method.name, "method__reading": method.reading}
    for number in (1, 2):
        run(tmp_path / str(number), workers=number, early_stopping=True, **given)
    assert folder_content(tmp_path / "1") == folder_content(tmp_path / "2")


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


def test_the_longest_turns_begin_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(clients__per_round=6)
    requests = Requests(Federation(0, plan.initial), plan, 1)
    turns = workers._Turns(plan, Memories(), requests, 2)
    begun = []
    while (job := turns.next()) is not None:
        begun.append(job.client)
    lengths = [plan.num_examples(k) * (1 + float(plan.capacity(k))) for k in begun]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(begun) == list(range(6))


def test_few_replies_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "window", lambda num_workers: num_workers)
    plan = plan_for(clients__per_round=6)
    requests = Requests(Federation(0, plan.initial), plan, 1)
    turns = workers._Turns(plan, Memories(), requests, 2)
    begun = [job.client for job in iter(turns.next, None)]
    assert sorted(begun) == [0, 1]  # no further ahead


# A worker that dies ------------------------------------------------------------------


def dying(
    plan: Plan, t: int, client: int, times: int, count: Path
) -> Callable[..., Any]:
    """A turn in which the worker is killed, the first so many times."""

    def turn(plan: Plan, workspace: Any, shelf: Shelf, down: Any, entry: Any) -> Any:
        if struct.unpack("<II?", down.header)[:2] == (t, client):
            killed = len(count.read_text()) if count.exists() else 0
            if killed < times:
                count.write_text("x" * (killed + 1))
                os.kill(os.getpid(), signal.SIGKILL)
        return play_turn(plan, workspace, shelf, down, entry)

    return turn


@pytest.fixture
def victim() -> int:
    plan = plan_for(rounds=4)
    return choose_clients(Federation(1, plan.initial), plan, 2)[1]


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
    turn = dying(whole.plan, 2, victim, times, count)
    monkeypatch.setattr(workers, "play_turn", turn)
    found = simulate()
    missing = [line["missing_clients"] for line in found.rounds]
    retried = [line["retried_clients"] for line in found.times]
    if times == 1:
        assert found.rounds == whole.rounds
        assert retried == [[], [victim], [], []]
        assert found.summary["missing_turns"] == 0
    else:
        assert missing == [[], [victim], [], []]
        assert victim not in found.rounds[1]["clients"]
        assert found.rounds[0] == whole.rounds[0]
        assert found.summary["missing_turns"] == 1
        assert len(found.rounds) == 4


def test_an_error_in_a_worker_is_raised_here_as_it_was_there() -> None:
    with pytest.raises(TrainingError, match=r"round 1, client \d: .*lower train.lr"):
        fedspu.simulate(
            named(workers=2, train__lr=1e30), model=ConvNet, data=examples()
        )


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
    assert len(list(room.iterdir())) == len(taken_part)  # the last of each, no more
    del found
    assert not list(tmp_path.iterdir())


def children() -> set[int]:
    me = os.getpid()
    found = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    return {int(child) for child in found}


# How many ----------------------------------------------------------------------------


def test_no_workers_at_all_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"workers = 0: expected greater than"):
        plan_for(workers=0)


def test_more_workers_than_cores_are_taken_and_remarked_on() -> None:
    with pytest.warns(UserWarning, match=r"workers = 99: more than the \d+ cores"):
        found = fedspu.simulate(
            named(workers=99, rounds=1), model=ConvNet, data=examples()
        )
    assert found.summary["workers"] == 3  # no more than take part


def test_where_nothing_can_be_forked_one_process_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "can_fork", lambda: False)
    with pytest.warns(UserWarning, match=r"workers = 2: one process, as this system"):
        found = fedspu.simulate(
            named(workers=2, rounds=1), model=ConvNet, data=examples()
        )
    assert found.summary["workers"] == 1


def test_without_memory_to_share_one_process_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*args: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(workers, "mmap", none_left)
    with pytest.warns(UserWarning, match=r"workers = 2: one process, as no other can"):
        found = fedspu.simulate(
            named(workers=2, rounds=1), model=ConvNet, data=examples()
        )
    assert found.summary["workers"] == 1


def test_a_full_disk_in_a_worker_says_what_is_saved_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole", workers=2)
    put = Shelf.put

    def full(shelf: Shelf, client: int, t: int, memory: Any) -> Entry:
        if t == 3:
            raise ShelfError(f"{shelf.folder}: cannot write (No space left on device)")
        return put(shelf, client, t, memory)

    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "put", full)
        with pytest.raises(StorageError, match=r"No space left.*rounds up to 2 are"):
            run(path, workers=2)
    fedspu.resume(path, model=ConvNet, data=examples())
    assert folder_content(path) == folder_content(tmp_path / "whole")


def test_a_resumed_run_may_have_other_workers(tmp_path: Path) -> None:
    run(tmp_path / "whole", workers=1)

    def stop(plan: Plan, report: Any) -> None:
        if report.federation.round == 2:
            raise KeyboardInterrupt

    settings = {**named(rounds=4, clients__per_round=5, workers=1)}
    settings["out"] = str(tmp_path / "part")
    with pytest.raises(KeyboardInterrupt):
        fedspu.simulate(settings, model=ConvNet, data=examples(), watch=stop)
    fedspu.resume(tmp_path / "part", model=ConvNet, data=examples(), workers=2)
    assert folder_content(tmp_path / "part") == folder_content(tmp_path / "whole")


# Judging -----------------------------------------------------------------------------


def test_workers_judge_as_one_process_does() -> None:
    plan = plan_for(method="fjord")
    federation = Federation(0, plan.initial)
    engine = WorkersEngine(plan, Memories(), 2)
    try:
        for which in ("personal", "global"):
            alone = LocalEngine(plan).judge(range(6), federation, which)
            assert engine.judge(range(6), federation, which) == alone
            assert list(engine.judge([4, 1], federation, which)) == [4, 1]
    finally:
        engine.close()
