"""Wrong settings that ``fedspu run`` and ``fedspu compare`` say in the same words."""

import re
from pathlib import Path

import pytest

from tests.cli.commands import Command

WRONG: list[tuple[str, str]] = [
    ("--set train.lrr=0.1", r"^train\.lrr: no such setting .*mean train\.lr\?"),
    ("--lr fast", r"^train\.lr = 'fast': expected a number, 0 or more"),
    ("--rounds 2.5", r"^rounds = 2\.5: expected a whole number"),
    ("--workers 0", "^workers = 0: expected a whole number, 1 or more"),
    ("--capacities 0.5,2", r"^clients\.capacities = \[0\.5, 2\.0\]: expected a list"),
    ("--per-round 7", r"^clients\.per_round = 7: expected at most clients\.number"),
    ("--task sorting", "^task = 'sorting': expected one of classification"),
    ("--model digts", r"^model = 'digts': .*did you mean digits\?"),
    ("--data digitz", r"^data\.name = 'digitz': .*did you mean digits\?"),
    ("--data arrays", r"^data\.name = 'arrays': expected arrays:FILE\.npz"),
    ("--device nowhere", "^device = 'nowhere': expected auto, cpu, cuda or mps"),
    ("--set method.finetune=3", r"^method\.finetune = 3: .*has no such option; fedavg"),
    ("--set method.reading=new", r"^method\.reading = 'new': expected 'paper' or"),
    ("--set norm.policy=global", r"^norm\.policy = 'global': expected 'aggregate'"),
    ("--set server.lr=0.5", r"^server\.lr = 0\.5: has no effect with server\.opt"),
    ("--set train.schedule=step", r"^train\.schedule = 'step' needs a length"),
    ("--set judge.clients=0", r"^judge\.clients = 0: expected a whole number"),
    (
        "--set early_stopping.blend=1",
        r"^early_stopping\.blend = 1: expected a number above 0",
    ),
    ("--set data.partition=evenly", r"^data\.partition = 'evenly': expected one of"),
    ("--set train=3", "^train: no such setting, but a table"),
    ("--set =3", "^--set =3: expected key=value"),
]


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("name", ["run", "compare"])
@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_setting_is_one_line_exit_2_and_nothing_is_written(
    command: Command, played: list[int], name: str, words: str, message: str
) -> None:
    before = files_here()
    result = command(name, "small.toml", *words.split())
    assert (result.code, result.out) == (2, "")
    assert len(result.told) == 1
    assert re.search(message, result.error)
    assert played == []
    assert files_here() == before


def files_here() -> list[Path]:
    found = sorted(Path().rglob("*"))
    return [path for path in found if "__pycache__" not in path.parts]


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("name", ["run", "compare"])
def test_several_wrong_settings_are_named_together(command: Command, name: str) -> None:
    result = command(name, "small.toml", "--rounds", 0, "--lr", -1)
    assert result.code == 2
    assert "rounds = 0: expected" in result.error
    assert "train.lr = -1: expected" in result.error
