"""Runs that are there already, compared: what ``fedspu report`` prints."""

from pathlib import Path
from typing import Any

import pytest

import fedspu
from fedspu.errors import SettingsError, StorageError
from fedspu.reports.comparison.blocks import heading
from fedspu.sweeps import compare as comparing
from fedspu.sweeps.compare import compare_saved
from fedspu.sweeps.tuning import Pick
from tests.oracles.federation import folder_content


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


# Comparisons that do not match -------------------------------------------------------


def comparison(given: dict[str, Any], out: Path, *methods: str, **more: Any) -> Path:
    fedspu.compare(methods, given, out=out, seeds=[0], parallel=1, **more)
    return out


@pytest.mark.parametrize(
    ("name", "other", "cases"),
    [
        ("rounds", 3, {"rounds 2": ["fedspu"], "rounds 3": ["local"]}),
        ("clients.number", 5, {"number 6": ["fedspu"], "number 5": ["local"]}),
        ("data.split", "paper", {"three-way": ["fedspu"], "paper": ["local"]}),
        (
            "train.lr",
            0.2,
            {"alpha": ["fedspu@train.lr=0.1", "local@train.lr=0.2"]},
        ),
    ],
)
def test_comparisons_with_other_settings_are_told_apart(
    tmp_path: Path,
    given: dict[str, Any],
    name: str,
    other: Any,
    cases: dict[str, list[str]],
) -> None:
    one = comparison(given, tmp_path / "one", "fedspu")
    two = comparison({**given, name: other}, tmp_path / "two", "local")
    found = compare_saved([one, two])
    assert len(found.cases) == len(cases)
    for case, (says, methods) in zip(found.cases, cases.items(), strict=True):
        assert [row.method for row in case.rows] == methods
        assert says in heading(case)
    assert len({heading(case) for case in found.cases}) == len(cases)


def test_comparisons_with_the_same_settings_make_one_table(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    """Also if a method suggests settings of its own, or one was set for it."""
    one = comparison(given, tmp_path / "one", "fedspu-plus", "fedspu@train.lr=0.2")
    two = comparison(given, tmp_path / "two", "local")
    found = compare_saved([one, two])
    (case,) = found.cases
    assert [row.method for row in case.rows] == [
        "fedspu-plus",
        "fedspu@train.lr=0.2",
        "local",
    ]


@pytest.mark.parametrize(
    ("name", "other"),
    [("rounds", 3), ("data.split", "paper"), ("train.lr", 0.2), ("train.epochs", 5)],
)
def test_no_run_with_other_settings_is_added_to_a_comparison(
    tmp_path: Path, given: dict[str, Any], name: str, other: Any
) -> None:
    out = comparison(given, tmp_path / "out", "local")
    before = folder_content(out)
    says = rf"local-.* was played with {name} = .*, but {other} is .* another --out"
    with pytest.raises(StorageError, match=says):
        comparison({**given, name: other}, out, "fedspu")
    assert folder_content(out) == before
    comparison(given, out, "fedspu", "fedspu-plus", "fedavg@train.lr=0.2")


def picking(best: float) -> Any:
    """A search that picks this learning rate, whatever the scores."""

    def pick(cells: Any, summaries: Any) -> list[Pick]:
        first = cells[0]
        return [Pick(first.method, first.case, (("train.lr", best),), ())]

    return pick


def test_a_method_that_is_tuned_again_has_its_latest_runs_alone(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier pick is not mixed with a later one, nor taken for the same run."""
    out = tmp_path / "out"
    for best in (0.05, 0.2):
        monkeypatch.setattr(comparing, "pick", picking(best))
        grid = {"train.lr": [0.05, 0.2]}
        fedspu.compare(
            ["local"],
            given,
            out=out,
            seeds=[0, 1] if best == 0.05 else [0],
            tune=grid,
            tune_rounds=1,
            parallel=1,
        )
    found = compare_saved([out])
    ((row,),) = [case.rows for case in found.cases]
    assert (row.tuned, row.seeds) == ({"train.lr": 0.2}, (0,))
    comparison({**given, "train.lr": 0.2}, out, "local", "fedavg")
    ((local, fedavg),) = [case.rows for case in compare_saved([out]).cases]
    assert (local.tuned, fedavg.tuned) == ({}, {})
