import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import fedspu
from fedspu import sweeps
from fedspu.errors import FedSPUError, SettingsError, StorageError
from fedspu.settings import Settings
from fedspu.sweeps import Cell, compare
from tests.oracles.federation import examples, folder_content, named


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """Settings of a small experiment on a file of made examples."""
    x, y = examples()
    np.savez(tmp_path / "f.npz", x=x, y=y)
    return {
        **named(rounds=2),
        "model": "tests.oracles.federation:mlp",
        "data.name": f"arrays:{tmp_path / 'f.npz'}",
    }


def test_every_cell_is_played_and_has_a_folder(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    begun: list[tuple[Cell, bool]] = []
    summaries = compare(
        given,
        ["fedspu", "local"],
        [0.5, 2.0],
        [0, 1],
        tmp_path / "out",
        lambda cell, is_done: begun.append((cell, is_done)),
    )
    cells = [
        Cell(method, alpha, seed)
        for method in ("fedspu", "local")
        for alpha in (0.5, 2.0)
        for seed in (0, 1)
    ]
    assert begun == [(cell, False) for cell in cells]
    assert [(s["method"], s["alpha"], s["seed"]) for s in summaries] == [
        (cell.method, cell.alpha, cell.seed) for cell in cells
    ]
    for cell, summary in zip(cells, summaries, strict=True):
        folder = tmp_path / "out" / cell.name
        assert json.loads((folder / "summary.json").read_text()) == summary


def test_the_same_clients_meet_every_method(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    compare(given, ["fedspu", "fedavg", "local"], [1.0], [0], tmp_path / "out")
    turns = set()
    for name in ("fedspu", "fedavg", "local"):
        file = tmp_path / "out" / Cell(name, 1.0, 0).name / "clients.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        turns.add(str([(c["round"], c["client"], c["num_examples"]) for c in lines]))
    assert len(turns) == 1


def test_what_is_finished_is_read_and_not_played(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compare(given, ["local"], [1.0], [0, 1], tmp_path / "out")

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(sweeps, "simulate", never)
    monkeypatch.setattr(sweeps, "resume", never)
    assert compare(given, ["local"], [1.0], [0, 1], tmp_path / "out") == first


def test_a_run_of_a_comparison_is_the_run_alone(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    compare(given, ["fedspu"], [0.5], [3], tmp_path / "out")
    alone = {**given, "data.alpha": 0.5, "seed": 3, "out": tmp_path / "alone"}
    fedspu.simulate(alone)
    played = folder_content(tmp_path / "out" / Cell("fedspu", 0.5, 3).name)
    assert played == folder_content(tmp_path / "alone")


def test_two_runs_never_share_a_folder() -> None:
    near = [0.1, 0.1000001, 0.12345678, 0.12345679, 1.0, 1000000.0, 1000001.0]
    assert len({Cell("fedspu", alpha, 0).name for alpha in near}) == len(near)


def test_a_cell_s_folder_is_named_by_what_makes_it() -> None:
    assert Cell("fedspu", 0.1, 2).name == "fedspu-alpha-0.1-seed-2"
    assert Cell("local", 1.0, 0).name == "local-alpha-1-seed-0"


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
    done: list[bool] = []
    compare(
        {**given, "wire.values": "float32"},
        ["local"],
        [1.0],
        [0],
        tmp_path / "out",
        lambda cell, is_done: done.append(is_done),
    )
    assert done == [True]
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
    cell = tmp_path / "out" / Cell("local", 1.0, 0).name
    cell.mkdir(parents=True)
    (cell / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="not a run folder"):
        compare(given, ["local"], [1.0], [0], tmp_path / "out")
    assert [file.name for file in cell.iterdir()] == ["notes.txt"]


def test_a_damaged_summary_is_noticed_and_made_again(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    before = compare(given, ["local"], [1.0], [0], tmp_path / "out")
    file = tmp_path / "out" / Cell("local", 1.0, 0).name / "summary.json"
    text = file.read_text()
    file.write_text(text.replace('"personal_accuracy": 0.', '"personal_accuracy": 1.'))
    with pytest.warns(UserWarning, match=r"summary.json is damaged"):
        after = compare(given, ["local"], [1.0], [0], tmp_path / "out")
    assert after[0]["personal_accuracy"] == before[0]["personal_accuracy"]


def test_a_comparison_that_was_killed_before_its_first_save_begins_again(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    cell = tmp_path / "out" / Cell("local", 1.0, 0).name
    (cell / "checkpoint").mkdir(parents=True)
    (cell / ".lock").touch()
    (cell / "settings.toml").write_text("seed = 1")
    (cell / "checkpoint/plan.json.part").write_text("{")
    compare(given, ["local"], [1.0], [0], tmp_path / "out")
    assert (cell / "summary.json").exists()
    assert not list(cell.rglob("*.part"))


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

    monkeypatch.setattr(sweeps, "simulate", never)
    monkeypatch.setattr(sweeps, "resume", never)


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
    begun: list[Cell] = []
    with pytest.raises(SettingsError, match=says):
        compare(
            {**given, **more},
            methods,
            ALPHAS,
            SEEDS,
            tmp_path / "out",
            lambda cell, is_done: begun.append(cell),
        )
    assert begun == []
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
    summaries = compare(given, methods, [1.0], [0], tmp_path / "out")
    assert [summary["label"] for summary in summaries] == methods
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert names == ["fedavg-alpha-1-seed-0", "fedavg-finetune-2-alpha-1-seed-0"]
