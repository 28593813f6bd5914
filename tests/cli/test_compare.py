"""``fedspu compare`` as a user types it; mistakes come last."""

import json
import re
from pathlib import Path

import pytest

from fedspu.sweeps.step_costs import StepCosts
from tests.cli.commands import (
    Command,
    interrupt_at_turn,
)
from tests.oracles.federation import folder_content

COMPARE = (
    *("compare", "small.toml", "--seeds", "0,1", "--parallel", "1", "--out", "both"),
)
CELLS = [f"{m}-alpha-1-seed-{s}" for m in ("fedspu", "local") for s in (0, 1)]


@pytest.fixture(autouse=True)
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring steps takes seconds; tests/sweeps/test_step_costs.py does it."""
    monkeypatch.setattr(StepCosts, "_measured", lambda self, plan, active: 1000)


@pytest.mark.usefixtures("nets")
def test_a_comparison_plays_each_run_once(command: Command, played: list[int]) -> None:
    first = command(*COMPARE)
    assert first.code == 0
    assert len(played) == 4 * 3 * 3  # runs, rounds, clients
    assert "fedspu" in first.out
    assert "local" in first.out
    assert all(Path("both", cell, "summary.json").exists() for cell in CELLS)
    assert "| method |" in Path("both/comparison.md").read_text()

    second = command(*COMPARE)
    assert second.code == 0
    assert len(played) == 4 * 3 * 3
    assert second.out == first.out
    assert second.told == []


@pytest.mark.usefixtures("nets")
def test_a_wider_comparison_plays_only_what_is_missing(
    command: Command, played: list[int]
) -> None:
    command(*COMPARE)
    played.clear()
    assert command(*COMPARE, "--methods", "local,fedavg,fedspu").code == 0
    assert len(played) == 2 * 3 * 3


@pytest.mark.usefixtures("nets")
def test_an_interrupted_comparison_goes_on_where_it_was(
    command: Command, monkeypatch: pytest.MonkeyPatch, played: list[int]
) -> None:
    command(*COMPARE[:-1], "whole")
    with monkeypatch.context() as patch:
        interrupt_at_turn(patch, 9 + 7)  # in the last round of the second run
        result = command(*COMPARE)
    assert result.code == 130
    assert "the same command resumes where it stopped" in result.error
    played.clear()
    assert command(*COMPARE).code == 0
    assert len(played) == 3 + 2 * 9
    for cell in CELLS:
        assert folder_content(Path("both", cell)) == folder_content(Path("whole", cell))


@pytest.mark.usefixtures("nets")
def test_a_comparison_as_json_prints_records_and_summaries_alone(
    command: Command,
) -> None:
    result = command(*COMPARE, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert [(s["method"], s["seed"]) for s in found["runs"]] == [
        *(("fedspu", 0), ("fedspu", 1), ("local", 0), ("local", 1)),
    ]
    assert [record["method"] for record in found["records"]] == ["fedspu", "local"]
    assert found == json.loads(Path("both/comparison.json").read_text())


@pytest.mark.usefixtures("nets")
def test_a_comparison_over_alphas_has_a_run_for_each(command: Command) -> None:
    words = ("--methods", "local", "--alphas", "0.5,2", "--seeds", "3", "--json")
    result = command("compare", "small.toml", "--out", "both", *words)
    found = json.loads(result.out)["runs"]
    assert [summary["alpha"] for summary in found] == [0.5, 2]


@pytest.mark.usefixtures("nets")
def test_a_seed_is_the_number_that_was_typed(command: Command) -> None:
    seed = 2**53 + 1  # no float64 holds it
    words = ("--methods", "local", "--seeds", seed, "--set", "rounds=1", "--json")
    result = command("compare", "small.toml", "--out", "both", *words)
    found = json.loads(result.out)["runs"]
    assert [summary["seed"] for summary in found] == [seed]


@pytest.mark.usefixtures("nets")
def test_runs_of_different_settings_are_not_mixed(
    command: Command, played: list[int]
) -> None:
    command(*COMPARE)
    before = folder_content(Path("both"))
    played.clear()
    result = command(*COMPARE, "--set", "train.epochs=2")
    assert result.code == 2
    assert "train.epochs = 1" in result.error
    assert played == []
    assert folder_content(Path("both")) == before


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "fedspu,lokal"], r"method = 'lokal'.*did you mean local"),
        (["--methods", ""], "^methods: expected names, like fedspu; got ''"),
        (
            ["--methods", "fedspu,fedspu"],
            "^methods: fedspu is given twice; leave one out$",
        ),
        (["--methods", "fedspu@train.lrr=1"], r"train\.lrr: no such setting"),
        (["--methods", "fedspu@seed=1"], "seed has no effect there; use --seeds$"),
        (["--seeds", "0,0"], "^seeds: 0 is given twice; leave one out$"),
        (["--vary", "train.lr"], "^--vary train.lr: expected a setting and its"),
        (["--vary", "train.lr="], "^--vary train.lr=: expected a setting and its"),
        (["--vary", "train.lrr=1,2"], r"train\.lrr: no such setting.*train\.lr"),
        (["--vary", "train.lr=1,x"], r"train\.lr = 'x': expected"),
        (["--vary", "train.lr=1,1"], r"train\.lr: 1 is given twice"),
        (["--vary", "seed=1,2"], "^seed cannot vary by itself; use seeds$"),
        (["--vary", "method=a,b"], "cannot vary by itself; use methods$"),
        (["--vary", "method.finetune=1,2"], "write it after the method"),
        (["--tune", "train.lr=0.1"], "at least two values to choose from"),
        (["--tune", "data.alpha=0.1,1"], "cannot be picked for one method alone"),
        (["--tune", "train.lr=0.1,1", "--tune-rounds", "0"], "--tune-rounds 0: exp"),
        (["--tune-rounds", "5"], "--tune-rounds 5: has no effect without --tune"),
        (
            ["--tune", "train.lr=.1,1", "--vary", "train.lr=.1,1"],
            "train.lr is compared, by --vary, and --tune would change it",
        ),
        (
            ["--methods", "fedspu@train.lr=1", "--vary", "train.lr=.1,1"],
            "train.lr is set for this method, and it varies for all",
        ),
        (
            ["--tune", "train.lr=0.1,1", "--set", "data.split=paper"],
            "validation examples are the test examples",
        ),
        (
            ["--tune", "train.lr=.1,1", "--methods", "fedspu@train.lr=1"],
            "is set for this method, and --tune would change it",
        ),
        (["--parallel", "0"], "^--parallel 0: expected at least 1$"),
        (["--format", "pdf"], "^--format pdf: expected one of table, md"),
        (["--alphas", "1,-1"], r"data\.alpha = -1"),
        (["--alphas", "1,x"], r"--alphas 1,x: expected numbers"),
        (["--seeds", "0,-1"], "seed = -1"),
        (["--seeds", "0,1.5"], "1.5"),
        (["--seeds", "0,x"], "--seeds 0,x: expected"),
        (["--seeds", "0,nan"], "--seeds 0,nan: expected"),
        (["--seeds", "inf"], "--seeds inf: expected"),
        (["--seeds", ""], "--seeds"),
        (["--set", "train.lrr=1"], r"did you mean train\.lr"),
        (["--set", "rounds=0"], "rounds = 0"),
        (["--set", "seed=3"], "^--set seed=3: has no effect in .*; use --seeds$"),
        (["--set", "method.name=local"], "method.name=local: .*; use --methods$"),
        (["--set", "method=local"], "^--set method=local: .*; use --methods$"),
        (["--set", "out=other"], "^--set out=other: .*; use --out$"),
    ],
)
def test_a_comparison_that_cannot_be_played_whole_is_not_begun(
    command: Command, played: list[int], words: list[str], message: str
) -> None:
    result = command(*COMPARE, *words)
    assert result.code == 2
    assert re.search(message, result.error)
    assert played == []
    assert not Path("both").exists()
