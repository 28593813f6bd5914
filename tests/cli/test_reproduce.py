"""``fedspu reproduce`` as a user types it; mistakes come last."""

import re
from pathlib import Path

import numpy as np
import pytest

from fedspu.reproduce import experiments
from fedspu.sweeps.step_costs import StepCosts
from tests.cli.commands import Command


def test_a_table_is_played_from_end_to_end(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (1500, 3, 32, 32), dtype=np.uint8)
    np.savez(tmp_path / "few.npz", x=x, y=rng.integers(0, 10, 1500))
    monkeypatch.setattr(experiments, "_seconds_per_round", lambda settings: 1000.0)
    monkeypatch.setattr(StepCosts, "_measured", lambda self, plan, active: 1000)
    words = ["reproduce", "table4", "--datasets", "cifar10,emnist"]
    use = ["--use", f"cifar10=arrays:{tmp_path / 'few.npz'}", "--data-dir", "nowhere"]
    out = ["--out", str(tmp_path / "out"), "--parallel", "1"]
    found = command(*words, *use, *out)
    assert found.code == 0, found.err
    shown = " ".join(found.out.split())
    assert re.search(r"CIFAR10, alpha 0\.1 2 of 2 171 of 500 - 66 %", shown)
    assert "Cut to fit 10min: 2 of 500 rounds" in shown
    assert "EMNIST is not played" in shown
    assert "nowhere/emnist. CIFAR10 is not" in shown  # two sentences
    assert "measuring how long a round takes" in found.err
    assert max(map(len, found.out.splitlines())) <= 80 + len(str(tmp_path))
    assert "CIFAR10 is not the paper's data but arrays:" in shown
    assert (tmp_path / "out/table4.md").exists()
    again = command(*words, *use, *out)
    assert again.out == found.out
    assert "measuring how long" not in again.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("table5", "table5: no such table; expected one of table1"),
        ("table1 --budget 1d", "--budget 1d: expected one of 10min, 1h, full"),
        ("table1 --datasets mnist", "--datasets mnist: expected one of emnist"),
        ("table1 --use speech", "--use speech: expected a data set and what to use"),
        ("table1 --format pdf", "--format pdf: expected one of table, md, json"),
        ("table1 --released-quirks all", "--released-quirks all: expected one of leak"),
        ("table4 --parallel 0", "--parallel 0: expected at least 1"),
        ("memory --out FILE", "FILE is no folder; choose another --out"),
        ("table4 --out FILE/in/it", "FILE is no folder; choose another --out"),
        (
            "table1 --released-quirks leak,leak",
            "--released-quirks: leak is given twice; leave one out",
        ),
        (
            "memory --released-quirks leak",
            "--released-quirks: they have no effect on memory; leave them out",
        ),
        (
            "table1 --datasets emnist --use emnist=digits",
            "--use emnist=digits: its examples are 1 x 8 x 8, but the network of "
            "EMNIST takes 1 x 28 x 28",
        ),
        ("table1 --data-dir nowhere", "no data to play with: emnist"),
    ],
)
def test_wrong_words_are_one_line(
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    file.touch()
    found = command("reproduce", *words.replace("FILE", str(file)).split())
    assert (found.code, found.out) == (2, "")
    assert found.error.startswith(says.replace("FILE", str(file)))
    assert len(found.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [file]  # nothing is left behind
