"""Comparisons are played whole, once, and only if every run can be."""

import json
import os
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fedspu
from fedspu import Comparison
from fedspu.errors import (
    DataError,
    FedSPUError,
    SettingsError,
    StorageError,
    TrainingError,
)
from fedspu.settings import Settings
from fedspu.sweeps import compare as comparing
from fedspu.sweeps import play
from fedspu.sweeps.cells import Cell
from fedspu.sweeps.play import Planned
from fedspu.sweeps.step_costs import StepCosts
from tests.oracles.federation import examples, folder_content, mlp

SUMMARY = "summary.json"


def cell(method: str, alpha: float, seed: int) -> Cell:
    return Cell(method, (("data.alpha", alpha),), seed)


def compare(
    given: dict[str, Any],
    methods: Sequence[str],
    alphas: Sequence[float],
    seeds: Sequence[int],
    out: Path,
    **more: Any,
) -> Comparison:
    """One run after the other, in this process."""
    return fedspu.compare(
        methods,
        given,
        out=out,
        seeds=list(seeds),
        vary={"data.alpha": list(alphas)},
        parallel=1,
        **more,
    )


class Begun(comparing.Watcher):
    """Notes which runs are planned and begun."""

    def __init__(self) -> None:
        self.planned: list[Cell] = []
        self.begun: list[Cell] = []

    def plan(self, out: Path, runs: Sequence[Planned], what: str) -> None:
        self.planned = [run.cell for run in runs]

    def begin(self, run: Planned) -> None:
        self.begun.append(run.cell)


def test_every_cell_is_played_and_has_a_folder(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    watcher = Begun()
    found = compare(
        given,
        ["fedspu", "local"],
        [0.5, 2.0],
        [0, 1],
        tmp_path / "out",
        watcher=watcher,
    )
    cells = [
        cell(method, alpha, seed)
        for alpha in (0.5, 2.0)
        for method in ("fedspu", "local")
        for seed in (0, 1)
    ]
    assert watcher.planned == watcher.begun == cells
    assert [(s["method"], s["alpha"], s["seed"]) for s in found.runs] == [
        (c.method, dict(c.case)["data.alpha"], c.seed) for c in cells
    ]
    for one, summary in zip(cells, found.runs, strict=True):
        folder = tmp_path / "out" / one.name
        assert json.loads((folder / SUMMARY).read_text()) == summary


def test_the_same_clients_meet_every_method(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    compare(given, ["fedspu", "fedavg", "local"], [1.0], [0], tmp_path / "out")
    turns = set()
    for name in ("fedspu", "fedavg", "local"):
        file = tmp_path / "out" / cell(name, 1.0, 0).name / "clients.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        turns.add(str([(c["round"], c["client"], c["num_examples"]) for c in lines]))
    assert len(turns) == 1


def test_what_is_finished_is_read_and_not_played(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compare(given, ["local"], [1.0], [0, 1], tmp_path / "out")

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(play, "simulate", never)
    monkeypatch.setattr(play, "resume", never)
    monkeypatch.setattr(StepCosts, "by_capacity", never)  # nor are its steps measured
    assert compare(given, ["local"], [1.0], [0, 1], tmp_path / "out") == first


def test_a_run_of_a_comparison_is_the_run_alone(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    compare(given, ["fedspu"], [0.5], [3], tmp_path / "out")
    alone = {**given, "data.alpha": 0.5, "seed": 3, "out": tmp_path / "alone"}
    fedspu.simulate(alone)
    played = folder_content(tmp_path / "out" / cell("fedspu", 0.5, 3).name)
    assert played == folder_content(tmp_path / "alone")


def test_two_runs_never_share_a_folder() -> None:
    near = [0.1, 0.1000001, 0.12345678, 0.12345679, 1.0, 1000000.0, 1000001.0]
    assert len({cell("fedspu", alpha, 0).name for alpha in near}) == len(near)


def test_a_cell_s_folder_is_named_by_what_makes_it() -> None:
    assert cell("fedspu", 0.1, 2).name == "fedspu-alpha-0.1-seed-2"
    assert cell("local", 1.0, 0).name == "local-alpha-1-seed-0"


def test_other_settings_than_those_played_are_refused(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    compare(given, ["local"], [1.0], [0], tmp_path / "out")
    before = folder_content(tmp_path / "out")
    with pytest.raises(StorageError, match=r"train\.lr = 0\.1.*0\.7 is asked for"):
        compare({**given, "train.lr": 0.7}, ["local"], [1.0], [0], tmp_path / "out")
    assert folder_content(tmp_path / "out") == before


def test_runs_from_before_a_setting_have_its_default(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Settings.to_toml

    def old(settings: Settings) -> str:
        found = tomllib.loads(real(settings))
        return tomli_w.dumps({n: v for n, v in found.items() if n != "wire"})

    with monkeypatch.context() as before:
        before.setattr(Settings, "to_toml", old)
        compare(given, ["local"], [1.0], [0], tmp_path / "out")
    watcher = Begun()
    same = {**given, "wire.values": "float32"}
    compare(same, ["local"], [1.0], [0], tmp_path / "out", watcher=watcher)
    assert watcher.begun == []
    now = {**given, "wire.values": "float16"}
    with pytest.raises(StorageError, match=r"wire\.values = float32, but float16 is"):
        compare(now, ["local"], [1.0], [0], tmp_path / "out")


def test_an_unknown_method_is_refused_before_anything_is_played(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError, match="did you mean local"):
        compare(given, ["fedspu", "locale"], [1.0], [0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_run_is_refused_and_left_alone(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    folder = tmp_path / "out" / cell("local", 1.0, 0).name
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="not a run folder"):
        compare(given, ["local"], [1.0], [0], tmp_path / "out")
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]


def test_a_damaged_summary_is_noticed_and_made_again(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    before = compare(given, ["local"], [1.0], [0], tmp_path / "out")
    file = tmp_path / "out" / cell("local", 1.0, 0).name / "summary.json"
    text = file.read_text()
    file.write_text(text.replace('"personal_accuracy": 0.', '"personal_accuracy": 1.'))
    with pytest.warns(UserWarning, match=r"summary.json is damaged"):
        after = compare(given, ["local"], [1.0], [0], tmp_path / "out")
    assert (
        after.records[0]["personal_accuracy"] == before.records[0]["personal_accuracy"]
    )


def test_a_comparison_that_was_killed_before_its_first_save_begins_again(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    folder = tmp_path / "out" / cell("local", 1.0, 0).name
    (folder / "checkpoint").mkdir(parents=True)
    (folder / ".lock").touch()
    (folder / "settings.toml").write_text("seed = 1")
    (folder / "checkpoint/plan.json.part").write_text("{")
    compare(given, ["local"], [1.0], [0], tmp_path / "out")
    assert (folder / "summary.json").exists()
    assert not list(folder.rglob("*.part"))


def test_a_table_that_cannot_be_written_is_a_storage_error(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    compare(given, ["local"], [1.0], [0], tmp_path / "out")
    (tmp_path / "out/comparison.md").unlink()
    (tmp_path / "out/comparison.md").mkdir()  # nothing can be written there
    with pytest.raises(FedSPUError, match=r"comparison\.md|cannot write"):
        compare(given, ["local"], [1.0], [0], tmp_path / "out")


# All settings are checked first ------------------------------------------------------

ALPHAS, SEEDS = (0.5, 1.0, 2.0), range(5)


@pytest.fixture
def never_played(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a run was begun")

    monkeypatch.setattr(play, "simulate", never)
    monkeypatch.setattr(play, "resume", never)


@pytest.mark.usefixtures("never_played")
@pytest.mark.parametrize(
    ("last", "more", "says"),
    [
        ("fedavg@finetun=1", {}, r"method\.finetun = 1: .*did you mean finetune\?"),
        ("fedavg@finetune=few", {}, r"method\.finetune = 'few': expected"),
        ("fedavg@finetune=-1", {}, r"method\.finetune = -1: expected"),
        ("fedavg@finetune", {}, "fedavg@finetune: expected a reading"),
        ("local@finetune=1", {}, r"local \(paper\) has no such option; fedavg"),
        (
            "fedavg@original",
            {},
            r"method\.reading = 'original': fedavg has only paper here",
        ),
        ("fedavgg", {}, r"method = 'fedavgg'.*did you mean fedavg\?"),
        (
            "fedavg",
            {"norm.policy": "local"},
            r"norm\.policy = 'local': clients of fedavg keep no model",
        ),
        (
            "heterofl",
            {"task": "regression", "data.partition": "iid"},
            r"task = 'regression': heterofl \(original\) learns only classification",
        ),
    ],
)
def test_45_runs_are_all_checked_before_the_first_begins(
    tmp_path: Path, given: dict[str, Any], last: str, more: dict[str, Any], says: str
) -> None:
    methods = ["fedspu", "hermes", last]
    with pytest.raises(SettingsError, match=says):
        compare({**given, **more}, methods, ALPHAS, SEEDS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_last_of_45_runs_is_compared_with_its_folder_before_the_first_begins(
    tmp_path: Path, given: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    methods = ["fedspu", "hermes", "local"]
    out = tmp_path / "out"
    compare({**given, "rounds": 1}, methods[-1:], ALPHAS[-1:], SEEDS[-1:], out)
    before = folder_content(out)
    request.getfixturevalue("never_played")
    with pytest.raises(StorageError, match=r"rounds = 1, but 2 is asked for"):
        compare(given, methods, ALPHAS, SEEDS, out)
    assert folder_content(out) == before


def test_a_method_is_compared_with_itself_with_another_option(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    methods = ["fedavg", "fedavg@finetune=2"]
    found = compare(given, methods, [1.0], [0], tmp_path / "out")
    assert [record["method"] for record in found.records] == methods
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert names == ["fedavg-alpha-1-seed-0", "fedavg@finetune=2-alpha-1-seed-0"]


# Several at once, and failures -------------------------------------------------------


def test_runs_at_once_reach_the_same_bits(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    methods = ["fedspu", "local"]
    compare(given, methods, [1.0], [0, 1], tmp_path / "one")
    at_once = fedspu.compare(
        methods,
        given,
        out=tmp_path / "two",
        seeds=[0, 1],
        vary={"data.alpha": [1.0]},
        parallel=2,
    )
    assert len(at_once.runs) == 4
    for method in methods:
        for seed in (0, 1):
            name = cell(method, 1.0, seed).name
            one = folder_content(tmp_path / "one" / name)
            assert one == folder_content(tmp_path / "two" / name)


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_run_that_fails_does_not_end_the_others(
    tmp_path: Path, given: dict[str, Any], parallel: int
) -> None:
    # So high a learning rate overflows in the first step.
    methods = ["local@train.lr=1e38", "local", "fedspu"]
    with pytest.raises(FedSPUError, match=r"1 of 3 runs failed; local@train\.lr=1e38"):
        fedspu.compare(
            methods, given, out=tmp_path / "out", seeds=[0], parallel=parallel
        )
    found = comparing.compare_saved([tmp_path / "out"])
    assert [record["method"] for record in found.records] == methods[1:]
    assert len(found.unfinished) == 1
    assert (tmp_path / "out/comparison.md").exists()


def test_a_process_that_dies_is_one_failed_run(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fedspu.simulate

    def dying(settings: Settings, **more: Any) -> Any:
        if settings.seed == 1:
            os._exit(9)
        return real(settings, **more)

    monkeypatch.setattr(play, "simulate", dying)
    with pytest.raises(FedSPUError, match=r"1 of 2 runs failed; .*its process died"):
        fedspu.compare(["local"], given, out=tmp_path / "out", seeds=[0, 1], parallel=2)
    assert (tmp_path / "out/comparison.md").exists()


def test_warnings_of_runs_at_once_say_which_run(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fedspu.simulate

    def remarking(settings: Settings, **more: Any) -> Any:
        if settings.seed == 1:
            warnings.warn("this seed is odd", stacklevel=1)
        return real(settings, **more)

    monkeypatch.setattr(play, "simulate", remarking)
    with pytest.warns(UserWarning, match="local-alpha-1-seed-1: this seed is odd"):
        fedspu.compare(["local"], given, out=tmp_path / "out", seeds=[0, 1], parallel=2)


IN_A_NOTEBOOK = """
import sys, torch, fedspu
from tests.oracles.federation import examples, mlp, named

assert torch.get_num_threads() == 2
assert not (torch.zeros(1_000_000) < 0).any()  # starts threads; no fork has them
fedspu.compare(
    ["local"], named(rounds=1, train__epochs=1), model=mlp, data=examples(40_000),
    out=sys.argv[1], seeds=[0, 1], parallel=2,
)
"""


def test_runs_at_once_do_not_wait_for_threads_of_the_process_they_came_from(
    tmp_path: Path,
) -> None:
    subprocess.run(
        [sys.executable, "-c", IN_A_NOTEBOOK, str(tmp_path / "out")],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        timeout=60,
        check=True,
    )
    assert (tmp_path / "out/comparison.md").exists()


# From Python --------------------------------------------------------------------------


def test_a_model_and_data_of_one_s_own(tmp_path: Path, given: dict[str, Any]) -> None:
    own = {n: v for n, v in given.items() if n not in ("model", "data.name")}
    found = fedspu.compare(
        ["fedspu", "local"],
        own,
        out=tmp_path / "out",
        seeds=[0, 1],
        model=mlp,
        data=examples(),
        parallel=2,
    )
    assert len(found.records) == 2
    assert "fedspu" in str(found)
    assert repr(found).startswith("Comparison(2 methods, 1 cases, 4 runs")
    again = fedspu.compare(
        ["fedspu", "local"],
        own,
        out=tmp_path / "out",
        seeds=[0, 1],
        model=mlp,
        data=examples(),
    )
    assert again == found


def test_wrong_input_that_the_first_run_meets_ends_all(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    missing = {**given, "data.name": f"arrays:{tmp_path / 'none.npz'}"}
    watcher = Begun()
    with pytest.raises(DataError, match=r"none\.npz"):
        compare(missing, ["local"], [1.0], [0, 1], tmp_path / "out", watcher=watcher)
    assert len(watcher.begun) == 1
    assert not (tmp_path / "out").exists()


def test_if_every_run_fails_nothing_is_left(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(settings: Settings, **more: Any) -> Any:
        raise TrainingError("it overflowed")

    monkeypatch.setattr(play, "simulate", failing)
    with pytest.raises(FedSPUError, match=r"2 of 2 runs failed; .*; so did 1 more"):
        compare(given, ["local"], [1.0], [0, 1], tmp_path / "some/where/out")
    assert not (tmp_path / "some").exists()


def test_a_comparison_of_other_data_is_not_mixed_into_a_folder(tmp_path: Path) -> None:
    """Not even if its runs would have other names, by another alpha."""
    given = {"rounds": 1, "clients.number": 5, "clients.per_round": 2}
    alone: dict[str, Any] = {"seeds": [0], "out": tmp_path / "both", "parallel": 1}
    fedspu.compare(["local"], given, model=mlp, data=examples(), **alone)
    before = folder_content(tmp_path / "both")
    says = "holds a comparison on .* and this one is on digits with digits; choose"
    with pytest.raises(StorageError, match=says):
        fedspu.compare(["local"], {**given, "data.alpha": 5.0}, **alone)
    assert folder_content(tmp_path / "both") == before
