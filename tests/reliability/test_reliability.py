"""A few accidents of each kind; ``benchmarks/reliability.py`` makes thousands."""

import errno
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedspu
from tests.oracles.federation import examples, folder_content, mlp
from tests.reliability.power_cut import Disk as Left
from tests.reliability.small_run import compare_two, play, take_up
from tests.reliability.trials import (
    cut_power,
    damage,
    fail_at,
    fill_up_at,
    finish,
    flip,
    kill_at,
    load_damaged,
    recorded,
    resume_damaged,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    path = tmp_path_factory.mktemp("whole") / "run"
    play(path)
    return path


@pytest.fixture(scope="module")
def expected(whole: Path) -> dict[str, bytes]:
    return folder_content(whole)


def some(count: int, every: int) -> range:
    """One of so many, beginning somewhere else for each test."""
    return range(count % every, count, every)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_kill_at_any_operation_loses_nothing(
    tmp_path: Path, expected: dict[str, bytes], workers: int
) -> None:
    count = len(recorded(tmp_path, lambda _: play(tmp_path / "0")))
    for number in some(count, 16 * workers):
        path = tmp_path / f"{number}"
        kill_at(
            path,
            number,
            lambda p=path: play(p, workers=workers),  # type: ignore[misc]  # bound now
            lambda p=path: finish(p, expected, workers=workers),  # type: ignore[misc]  # bound now
        )


def test_a_comparison_killed_at_any_operation_goes_on(tmp_path: Path) -> None:
    compare_two(tmp_path / "whole")
    expected = folder_content(tmp_path / "whole")

    def after(path: Path) -> None:
        compare_two(path)
        assert folder_content(path) == expected

    for number in (0, 3, 20, 70, 130):
        path = tmp_path / f"{number}"
        kill_at(
            path,
            number,
            lambda p=path: compare_two(p),  # type: ignore[misc]  # bound now
            lambda p=path: after(p),  # type: ignore[misc]  # bound now
        )


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_disk_at_any_operation_loses_nothing(
    tmp_path: Path, expected: dict[str, bytes], error: int
) -> None:
    reached = [
        fail_at(tmp_path / "run", number, error, expected)
        for number in some(150 + error % 7, 12)
    ]
    assert sum(reached) > 7


def test_a_disk_that_fills_up_within_a_write_loses_nothing(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    reached = [fill_up_at(tmp_path / "run", n, expected) for n in range(0, 35, 4)]
    assert all(reached)


def test_a_power_cut_at_any_moment_loses_nothing(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    root, rng = tmp_path / "disk", random.Random(7)
    root.mkdir()
    start, name = Left.of(root), Path("runs/run")
    log = recorded(root, lambda watch: play(root / name, watch))
    to = tmp_path / "after"
    for moment in (*some(len(log), 8), len(log)):
        cut_power(root, name, start, log, moment, rng, to, expected)


def test_a_power_cut_without_fsync_is_seen_to_lose_a_run(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """The trial above must be able to fail."""
    root, rng = tmp_path / "disk", random.Random(7)
    root.mkdir()
    start, name = Left.of(root), Path("runs/run")
    log = recorded(root, lambda watch: play(root / name, watch, store__durable=False))
    lost = 0
    for _ in range(5):
        try:
            cut_power(
                root, name, start, log, len(log), rng, tmp_path / "after", expected
            )
        except (fedspu.FedSPUError, AssertionError):
            lost += 1
    assert lost


def test_any_damage_is_noticed_or_without_effect(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    rng, found = random.Random(3), list[str]()
    path, half = tmp_path / "run", tmp_path / "half"

    def watch(plan: Any, played: Any) -> None:
        if played.federation.round == 2:
            shutil.copytree(path, half)

    play(path, watch)
    names = sorted(str(f.relative_to(half)) for f in half.rglob("*") if f.is_file())
    for name in names:
        length = (half / name).stat().st_size
        if not length:
            continue
        for _ in range(2):
            change = flip(rng.randrange(length), rng.randrange(8))
            damage(half, path, name, change)
            found.append(resume_damaged(path, expected))
        end = rng.randrange(length)
        damage(half, path, name, lambda content, n=end: content[:n])  # type: ignore[misc]  # bound now
        found.append(resume_damaged(path, expected))
    assert {"same", "refused"} == set(found)


def test_a_damaged_personal_model_is_never_another(whole: Path, tmp_path: Path) -> None:
    rng, found = random.Random(5), list[str]()
    saves = [fedspu.load_personal(whole, 0, mlp, examples()).state_dict()]
    earlier = tmp_path / "earlier"
    shutil.copytree(whole, earlier)
    (earlier / "checkpoint/save-round-3.json").unlink()
    saves.append(fedspu.load_personal(earlier, 0, mlp, examples()).state_dict())
    names = [n for n in sorted(folder_content(whole)) if "client-0" in n]
    names += ["checkpoint/clients.jsonl", "checkpoint/save-round-3.json"]
    names += ["checkpoint/plan.json", "checkpoint/global-round-3.safetensors"]
    for name in names:
        for _ in range(4):
            length = (whole / name).stat().st_size
            change = flip(rng.randrange(length), rng.randrange(8))
            damage(whole, tmp_path / "run", name, change)
            found.append(load_damaged(tmp_path / "run", 0, saves))
    assert {"same", "refused"} == set(found)


def test_a_run_that_never_stopped_is_left_as_it_is(
    whole: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    take_up(tmp_path / "run")
    assert folder_content(tmp_path / "run") == expected
