"""Commands besides run that take ``--task``: neurons, profile, data check and show."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspu.tasks import TASKS
from tests.cli.commands import Command

NETS = """
from torch import nn

def classification(): return mlp(2)
def regression(): return mlp(2)
def language_model():
    hidden = nn.Linear(8, 8), nn.ReLU()
    return nn.Sequential(nn.Embedding(7, 8), *hidden, nn.Linear(8, 7))
def segmentation():
    first = nn.Conv2d(1, 8, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(8, 3, 1))
def mlp(size):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, size))
"""

NUMBER = 40


@dataclass(frozen=True)
class Mine:
    """A model and a data file of a task, as they are named in commands."""

    task: str
    model: str
    data: str


def arrays(task: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(NUMBER, 4)).astype(np.float32)
    images = rng.normal(size=(NUMBER, 1, 3, 3)).astype(np.float32)
    found: dict[str, dict[str, Any]] = {
        "classification": {"x": vectors, "y": np.arange(NUMBER) % 2},
        "regression": {"x": vectors, "y": vectors[:, :2]},
        "language-model": {"x": np.arange(NUMBER * 5).reshape(NUMBER, 5) % 7},
        "segmentation": {"x": images, "y": np.arange(NUMBER * 9).reshape(-1, 3, 3) % 3},
    }
    return found[task]


@pytest.fixture(params=TASKS)
def mine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mine]:
    """A working folder with a model and data of a task."""
    task, module = request.param, f"nets_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(NETS)
    np.savez(tmp_path / "mine.npz", **arrays(task))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield Mine(task, f"{module}:{task.replace('-', '_')}", "arrays:mine.npz")
    sys.modules.pop(module, None)


def test_models_of_every_task_are_mapped(command: Command, mine: Mine) -> None:
    words = ("--data", mine.data, "--task", mine.task, "--json")
    result = command("neurons", mine.model, *words)
    assert (result.code, result.told) == (0, [])
    assert {group["size"] for group in json.loads(result.out)["groups"]} == {8}


def test_models_of_every_task_are_profiled(command: Command, mine: Mine) -> None:
    words = ("--data", mine.data, "--task", mine.task, "--repetitions", 1, "--p", 1)
    result = command("profile", mine.model, *words)
    assert (result.code, result.told) == (0, [])
    assert re.search(r"\n +1 +exact +fast .*%", result.out)


@pytest.mark.parametrize("mine", ["regression", "language-model"], indirect=True)
def test_without_data_there_are_no_targets_to_profile_with(
    command: Command, mine: Mine
) -> None:
    result = command("profile", mine.model, "--input", 4, "--task", mine.task)
    assert (result.code, result.out) == (2, "")
    assert result.error == (
        f"--task {mine.task}: needs examples with targets; give a data set, like "
        "--data arrays:FILE.npz"
    )


@pytest.mark.parametrize("mine", ["segmentation"], indirect=True)
def test_an_output_for_another_task_says_to_name_it(
    command: Command, mine: Mine
) -> None:
    result = command("profile", mine.model, "--input", "1,3,3")
    assert result.code == 2
    assert result.error.endswith("for other tasks give --task and --data")


def test_data_of_every_task_is_checked(command: Command, mine: Mine) -> None:
    words = ("data", "check", mine.data, "--task", mine.task)
    result = command(*words, "--json")
    assert (result.code, result.told) == (0, [])
    found = json.loads(result.out)
    assert (found["task"], found["examples"]) == (mine.task, NUMBER)
    assert (found["classes"], found["outputs"], found["scored_targets"]) == {
        "classification": (2, 2, NUMBER),
        "regression": (None, 2, 2 * NUMBER),
        "language-model": (None, 7, 4 * NUMBER),
        "segmentation": (3, 3, 9 * NUMBER),
    }[mine.task]
    by_class = found["examples_by_class"], found["targets_by_class"]
    assert by_class == {
        "classification": ({"0": 20, "1": 20}, None),
        "segmentation": (None, {"0": 120, "1": 120, "2": 120}),
    }.get(mine.task, (None, None))
    assert (found["target_range"] is not None) == (mine.task == "regression")
    shown = command(*words)
    assert (shown.code, shown.told) == (0, [])
    assert ("classes" in shown.out) == (found["classes"] is not None)


def test_data_of_every_task_is_shown_as_a_run_would_divide_it(
    command: Command, mine: Mine
) -> None:
    words = ("data", "show", mine.data, "--task", mine.task, "--clients", 3)
    result = command(*words, "--json")
    assert (result.code, result.told) == (0, [])
    found = json.loads(result.out)
    assert sum(row["examples"] for row in found["clients"]) == NUMBER
    wanted = {"classification": 2, "regression": 10, "segmentation": 3}
    assert len(found["clients"][0]["by_class"]) == wanted.get(mine.task, 1)
    is_text = mine.task == "language-model"
    assert found["data"]["partition"] == ("iid" if is_text else "dirichlet")
    shown = command(*words)
    assert (shown.code, shown.told) == (0, [])
    of = {"regression": " of 10 bins", "language-model": ""}
    classes = of.get(mine.task, f" of {wanted.get(mine.task)} classes")
    assert f"40 examples{classes}, 3 clients" in shown.out.replace("\n", " ")
    assert ("entropy" in shown.out) == (not is_text)


@pytest.mark.parametrize("mine", ["classification"], indirect=True)
@pytest.mark.parametrize(
    "words", ["neurons mlp --input 4", "profile mlp --input 4", "data check DATA"]
)
def test_an_unknown_task_is_one_clear_line(
    command: Command, mine: Mine, words: str
) -> None:
    typed = words.replace("DATA", mine.data).split()
    result = command(*typed, "--task", "regresion")
    assert (result.code, result.out) == (2, "")
    assert result.error.endswith("(did you mean regression?)")


@pytest.mark.parametrize("mine", ["language-model"], indirect=True)
def test_texts_are_not_shown_by_classes(command: Command, mine: Mine) -> None:
    words = ("--task", mine.task, "--clients", 3, "--partition", "shards")
    result = command("data", "show", mine.data, *words)
    assert result.code == 2
    assert "language-model have no classes to divide by; use one of iid" in result.error
