"""Mistakes that are told before PyTorch is loaded, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

MISTAKES = {
    "run --log wandbb": "--log wandbb: expected one of tensorboard, mlflow, wandb",
    "run --resume nope": "nope: no such folder; there is runs/mine",
    "run --resume runs/mnie": "runs/mnie: no such folder; did you mean runs/mine?",
    "run --out full": "full is in use already: it holds something else; choose",
    "compare --out one": "one is the folder of a single run; choose another --out",
    "check nope": "nope: no such folder; there is runs/mine",
    "check runs": "runs is not a run folder: it has no checkpoint, but holds some: "
    "name runs/mine",
    "report runs": "runs is not a run folder: it has no checkpoint, but holds some: "
    "name runs/mine",
    "export nope": "nope: no such folder; there is runs/mine",
    "export nope 3": "nope: no such folder; there is runs/mine",
    "neurons digits --input 1x16x16": "--input 1x16x16: expected sizes separated by",
    "neurons digits --p 3": "--p 3: expected numbers in (0, 1]",
    "profile digitz": "model = 'digitz': expected one of",
    "profile digits --input 1x16x16": "--input 1x16x16: expected sizes separated by",
    "profile digits --memory 3": "--memory 3: expected a size with its unit, like",
    "data check digitz": "data.name = 'digitz': expected one of",
    "data show digits --data-dir no": "--data-dir no: no such folder",
    "profile digits --task sorting": "task = 'sorting': expected one of",
}

TYPE_THEM = """
import sys
from fedspu import cli

sys.modules["torch"] = None  # importing it fails
for words in sys.argv[1:]:
    sys.argv = ["fedspu", *words.split()]
    try:
        cli.main()
    except SystemExit as end:
        assert end.code == 2, words
"""


def test_a_cheap_mistake_is_told_without_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/settings.toml").touch()
    (tmp_path / "one/checkpoint").mkdir(parents=True)
    (tmp_path / "one/checkpoint/save-round-1.json").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/letter.txt").touch()
    monkeypatch.chdir(tmp_path)
    words = [sys.executable, "-c", TYPE_THEM, *MISTAKES]
    typed = subprocess.run(words, capture_output=True, text=True, check=False)
    assert typed.returncode == 0, typed.stderr
    told = typed.stderr.splitlines()
    assert len(told) == len(MISTAKES), typed.stderr
    for line, message in zip(told, MISTAKES.values(), strict=True):
        assert line.startswith(f"error: {message}")
