"""What a program reads from stdout is the result, and nothing else."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import Command, finished, in_process_of_its_own

TALKATIVE = """
print("importing")
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        print("building")
        self.net = nn.Linear(16, 3)

    def forward(self, x):
        print("at work", flush=True)
        return self.net(x.flatten(1))
"""


@pytest.fixture
def talkative(nets: str) -> str:
    Path(f"loud_{nets}.py").write_text(TALKATIVE)
    return f"loud_{nets}:Net"


def test_what_a_user_s_model_prints_does_not_spoil_json(talkative: str) -> None:
    words = ("small.toml", "--model", talkative, "--rounds", "1", "--workers", "2")
    result = finished(in_process_of_its_own("run", *words, "--json"))
    assert "method" in json.loads(result.out)
    for said in ("importing", "building", "at work"):
        assert said in result.err


def test_what_a_user_s_model_prints_does_not_spoil_a_table(
    command: Command, talkative: str
) -> None:
    words = ("--model", talkative, "--rounds", 1, "--seeds", 0, "--out", "both")
    result = command("compare", "small.toml", *words, "--format", "csv")
    assert result.out.startswith("dataset,")
    assert "importing" not in result.out
    assert "importing" in result.err


def test_tables_for_people_are_printed_as_usual_afterwards(command: Command) -> None:
    assert json.loads(command("settings", "--json").out)
    assert "train.lr" in command("settings").out
