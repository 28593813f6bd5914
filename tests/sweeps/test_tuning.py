"""Settings are picked on validation examples, with the same budget for all."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedspu
from fedspu.errors import SettingsError
from fedspu.sweeps.cells import Cell, make_sweep
from fedspu.sweeps.tuning import Search, pick

GRID = {"train.lr": (0.01, 0.1, 1.0)}
CASE = (("data.alpha", 1.0),)


def tried(score: float | None, lr: float, higher: bool = True) -> tuple[Cell, Any]:
    cell = Cell("fedspu", CASE, 0, (("train.lr", lr),))
    summary = {
        "metric": "accuracy",
        "higher_is_better": higher,
        "personal_val_accuracy": score,
        "personal_accuracy": 1 - (score or 0),  # must not be looked at
    }
    return cell, summary


def picked(*listed: tuple[Cell, Any]) -> Any:
    cells = [cell for cell, _ in listed]
    (found,) = pick(cells, {c: s for c, s in listed if s is not None})
    return found


def test_the_best_on_validation_examples_is_picked() -> None:
    found = picked(tried(0.2, 0.01), tried(0.9, 0.1), tried(0.5, 1.0))
    assert found.chosen == (("train.lr", 0.1),)
    assert found.at_the_edge(GRID) == []


def test_the_lowest_is_picked_where_lower_is_better() -> None:
    listed = [tried(s, lr, higher=False) for s, lr in ((3.0, 0.01), (2.0, 1.0))]
    found = picked(*listed)
    assert found.chosen == (("train.lr", 1.0),)
    assert found.at_the_edge(GRID) == ["train.lr"]


def test_a_choice_that_failed_or_was_not_judged_is_never_picked() -> None:
    failed = (tried(0.0, 0.01)[0], None)
    assert picked(failed, tried(None, 0.1), tried(0.1, 1.0)).chosen == (
        ("train.lr", 1.0),
    )
    with pytest.raises(SettingsError, match="every choice failed for fedspu"):
        picked(failed)


def test_every_method_and_case_gets_the_same_tries() -> None:
    sweep = make_sweep(["a", "b"], [5, 6], {"data.alpha": [0.1, 1.0]})
    cells = Search(GRID, 3).cells(sweep)
    assert len(cells) == 2 * 2 * 3
    assert {cell.seed for cell in cells} == {5}


def test_a_tuned_comparison_from_end_to_end(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    found = fedspu.compare(
        ["fedspu", "local"],
        given,
        out=tmp_path / "out",
        seeds=[0, 1],
        tune={"train.lr": [1e-9, 0.1, 1e38]},  # nothing learned, learned, overflow
        tune_rounds=2,
        parallel=1,
    )
    assert [record["picked_train.lr"] for record in found.records] == [0.1, 0.1]
    assert "picked" in str(found)
    text = (tmp_path / "out/tuning/picks.json").read_text()
    picks = json.loads(text)
    assert picks["tries_for_each_method"] == 3
    assert [p["at_the_edge_of_the_grid"] for p in picks["picks"]] == [[], []]
    scores = picks["picks"][0]["scores"]
    assert scores["train.lr 1e+38"] is None
    # What was picked is what is played, and the validation score is the run's own.
    tuned = tmp_path / "out/tuning/fedspu-alpha-1-train.lr-0.1-seed-0"
    summary = json.loads((tuned / "summary.json").read_text())
    assert scores["train.lr 0.1"] == summary["personal_val_accuracy"]
    run = tmp_path / "out/fedspu-alpha-1-train.lr-0.1-seed-1"
    assert fedspu.load_run(run).settings["train"]["lr"] == 0.1
