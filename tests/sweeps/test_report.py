"""A report of real run folders: what is read, and what happens if something is gone."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspu.errors import StorageError
from fedspu.reports.page.facts import Labels
from fedspu.run_records import load_run
from fedspu.runs import simulate
from fedspu.sweeps import report
from fedspu.sweeps.compare import Comparison, compare_saved
from fedspu.sweeps.compare import compare as play
from fedspu.sweeps.report import Given, facts_of
from fedspu.sweeps.step_costs import StepCosts
from tests.oracles.federation import examples, mlp, named


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two methods, with early stopping."""
    out = tmp_path_factory.mktemp("runs")
    x, y = examples()
    np.savez(out / "f.npz", x=x, y=y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCosts, "_measured", lambda self, plan, active: 1000)
        play(
            ["fedspu", "local"],
            {
                **named(rounds=3),
                "model": "tests.oracles.federation:mlp",
                "data.name": f"arrays:{out / 'f.npz'}",
                "early_stopping.on": True,
            },
            seeds=[0],
            out=out / "both",
            parallel=1,
        )
    return out


@pytest.fixture
def runs(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(folder / "both", tmp_path / "both"))


def facts(found: Comparison, given: Given | None = None) -> Any:
    return facts_of(found.cases, found.listed, found.unfinished, given)


def test_a_comparison_writes_its_report_and_says_the_same_later(runs: Path) -> None:
    html = (runs / "report.html").read_text()
    assert "fedspu report" in html
    found = facts(compare_saved([runs]))
    assert [run.method for run in found.cases[0].runs] == ["fedspu", "local"]
    assert len(found.cases[0].runs[0].rounds) == 3
    assert found.cases[0].runs[0].summary["environment"]["torch"]


def test_labels_are_those_of_the_run_s_clients(runs: Path) -> None:
    labels = facts(compare_saved([runs])).cases[0].labels
    assert isinstance(labels, Labels)
    _, y = examples()
    assert labels.counts.counts.sum(0).tolist() == np.bincount(y).tolist()


def test_data_that_are_gone_or_changed_are_said(runs: Path, folder: Path) -> None:
    x, y = examples()
    kept = (folder / "f.npz").read_bytes()
    try:
        np.savez(folder / "f.npz", x=x, y=np.roll(y, 1))
        changed = facts(compare_saved([runs])).cases[0].labels
        (folder / "f.npz").unlink()
        gone = facts(compare_saved([runs])).cases[0].labels
    finally:
        (folder / "f.npz").write_bytes(kept)
    assert changed == "The data are no longer what they were when this was played."
    assert gone.startswith("The data are not here: ")


def test_a_report_runs_no_code_that_a_folder_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_data.py").write_text(
        "from tests.oracles.federation import examples as load\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = {**named(rounds=1), "data.name": "own_data:load", "out": tmp_path / "run"}
    simulate({**given, "model": "mlp"}, model=mlp)
    found = compare_saved([tmp_path / "run"])
    labels = facts(found).cases[0].labels
    assert labels == "The runs' data or task are code, which a report does not run."
    trusted = facts(found, Given(is_trusted=True)).cases[0].labels
    assert isinstance(trusted, Labels)


def test_an_unfinished_run_is_shown_beside_the_others(runs: Path) -> None:
    # As if it had been interrupted: the save before the last has no summary.
    run = next(path for path in runs.iterdir() if path.name.startswith("local"))
    (run / "checkpoint/save-round-3.json").unlink()
    found = compare_saved([runs])
    assert found.unfinished == [str(run)]
    (begun,) = facts(found).unfinished
    assert (begun.method, begun.rounds) == ("local", 3)
    assert "Not finished yet" in found.to_html()


def test_damaged_records_are_one_clear_line(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare_saved([runs])

    def damaged(path: Any) -> Any:
        records = load_run(path)
        for client in records.clients:
            client.pop("capacity")
        records.rounds[0].pop("bytes_up")
        return records

    monkeypatch.setattr(report, "load_run", damaged)
    with pytest.raises(StorageError, match=r"records of these runs are damaged"):
        found.to_html()
