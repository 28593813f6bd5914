"""Runs that are there already, compared: what ``fedspu report`` prints."""

from pathlib import Path
from typing import Any

import pytest

import fedspu
from fedspu.errors import SettingsError, StorageError
from fedspu.sweeps.compare import compare_saved


def play(given: dict[str, Any], out: Path, **more: Any) -> Path:
    fedspu.simulate({**given, **more, "out": str(out)})
    return out


def test_single_runs_are_compared_like_a_comparison(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    given = {**given, "data.alpha": 1.0}
    paths = [
        play(given, tmp_path / f"{method}{seed}", **{"method.name": method}, seed=seed)
        for method in ("fedspu", "local")
        for seed in (0, 1)
    ]
    found = compare_saved(paths)
    played = fedspu.compare(
        ["fedspu", "local"], given, out=tmp_path / "out", seeds=[0, 1], parallel=1
    )
    names = ("personal_accuracy", "against_the_best_half_interval", "global_accuracy")
    for name in names:
        assert [r[name] for r in found.records] == [r[name] for r in played.records]


def test_other_settings_make_another_method_or_another_case(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    paths = [
        play(given, tmp_path / "a"),
        play(given, tmp_path / "b", **{"train.lr": 0.5}),
        play(given, tmp_path / "c", **{"data.alpha": 5.0}),
    ]
    found = compare_saved(paths)
    assert [[row.method for row in case.rows] for case in found.cases] == [
        ["fedspu@train.lr=0.1", "fedspu@train.lr=0.5"],
        ["fedspu@train.lr=0.1"],
    ]


def test_the_same_run_twice_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    one, other = (play(given, tmp_path / name) for name in ("a", "b"))
    with pytest.raises(SettingsError, match="are the same run"):
        compare_saved([one, other])


def test_runs_of_several_commands_in_one_folder_are_all_reported(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    first = fedspu.compare(["local"], given, out=out, seeds=[0], parallel=1)
    second = fedspu.compare(["fedspu"], given, out=out, seeds=[0], parallel=1)
    assert [r["method"] for r in first.records] == ["local"]
    assert [r["method"] for r in second.records] == ["fedspu"]
    found = compare_saved([out])
    assert {r["method"] for r in found.records} == {"local", "fedspu"}


def test_a_deleted_run_is_unfinished(tmp_path: Path, given: dict[str, Any]) -> None:
    out = tmp_path / "out"
    fedspu.compare(["local", "fedspu"], given, out=out, seeds=[0], parallel=1)
    folder = next(path for path in out.iterdir() if path.name.startswith("local"))
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    folder.rmdir()
    found = compare_saved([out])
    assert [r["method"] for r in found.records] == ["fedspu"]
    assert found.unfinished == [str(folder)]


def test_no_folder_and_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not a run folder"):
        compare_saved([tmp_path])
