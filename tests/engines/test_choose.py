import errno
from pathlib import Path
from typing import Any

import pytest

import fedspu
from fedspu.engines import choose, workers
from fedspu.engines.choose import num_workers
from fedspu.engines.machine import Space, num_cores
from fedspu.engines.workers import can_fork
from fedspu.errors import SettingsError
from tests.oracles.federation import ConvNet, examples, named, plan_for, run_for

needs_fork = pytest.mark.skipif(not can_fork(), reason="workers are forked")


def run(**given: Any) -> fedspu.Run:
    return fedspu.simulate(named(rounds=1, **given), model=ConvNet, data=examples())


# How many workers --------------------------------------------------------------------


def test_no_workers_at_all_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"workers = 0: expected a whole number"):
        plan_for(workers=0)


@needs_fork
def test_there_are_as_many_workers_as_cores_and_no_more_than_take_part() -> None:
    settings = plan_for(workers=None, clients__per_round=6).settings
    assert num_workers(settings) == min(num_cores(), 6)
    few = plan_for(workers=None, clients__per_round=1).settings
    assert num_workers(few) == 1


@needs_fork
def test_more_workers_than_cores_are_taken_and_remarked_on() -> None:
    with pytest.warns(UserWarning, match=r"workers = 99: more than the \d+ cores"):
        found = run(workers=99)
    assert found.summary["workers"] == 3  # no more than take part


def test_where_nothing_can_be_forked_one_process_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose, "can_fork", lambda: False)
    with pytest.warns(
        UserWarning,
        match=r"workers = 2: falling back to one process, because this system cannot",
    ):
        found = run(workers=2)
    assert found.summary["workers"] == 1


@needs_fork
def test_without_memory_to_share_one_process_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*args: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(workers, "mmap", none_left)
    with pytest.warns(
        UserWarning,
        match=r"workers = 2: falling back to one process, because no more can .*Cannot",
    ):
        found = run(workers=2)
    assert found.summary["workers"] == 1
    found.personal_model(found.rounds[0]["clients"][0])  # what it keeps is there


# Is there room -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "says"),
    [
        (
            Space(ram=1e12, disk=100),
            r"the models of 6 clients need up to .* of disk, but .* another --out",
        ),
        (
            Space(ram=100, disk=1e12),
            r"about .* of RAM are needed besides data .* lower --workers",
        ),
    ],
)
def test_what_will_be_short_is_said_before_the_run_begins(
    free: Space, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "memory_here", lambda folder: free)
    with pytest.warns(UserWarning, match=says):
        run_for(out=tmp_path / "run")


def test_nothing_is_said_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plenty = Space(ram=1e12, disk=1e12)
    monkeypatch.setattr(choose, "memory_here", lambda folder: plenty)
    run_for(out=tmp_path / "run", rounds=1)  # a warning is an error here
