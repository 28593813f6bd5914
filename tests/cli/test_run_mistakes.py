"""Mistakes in ``fedspu run``: each is exit 2, one clear line, and no folder."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.cli.commands import Command
from tests.oracles.federation import examples

BAD_WORDS: list[tuple[str, str]] = [
    ("--set train.lrr=0.1", r"train\.lrr: no such setting .*did you mean train\.lr\?"),
    ("--set zzz=1", "zzz: no such setting"),
    ("--set rounds", "--set rounds: expected key=value"),
    ("--method fedspoo", r"method = 'fedspoo'.*did you mean fedspu\?"),
    ("--set method=fedavgg", r"'fedavgg'.*did you mean fedavg\?"),
    ("--capacities 0", r"clients\.capacities = \[0\.0\]: .*above 0"),
    ("--capacities 0.5,1.2", r"clients\.capacities = .*at most 1"),
    ("--capacities 0.5,-1", r"clients\.capacities = .*above 0"),
    ("--capacities half", "--capacities half: expected numbers"),
    ("--alpha 0", r"data\.alpha = 0: .*above 0"),
    ("--alpha -2", r"data\.alpha = -2: .*above 0"),
    ("--alpha nan", r"data\.alpha = nan"),
    ("--clients 121", r"clients\.number = 121"),
    ("--clients 13", r"clients\.number = 13 with data\.min_examples = 10"),
    (
        "--clients 60 --set data.min_examples=2 --set data.partition=iid",
        "client 0: .*2 examples.*data.min_examples",
    ),
    ("--set data.partition=round-robin", r"data\.partition = 'round-robin'"),
    ("--per-round 7", r"clients\.per_round = 7: .*clients\.number = 6"),
    ("--rounds 0", "rounds = 0"),
    ("--lr -1", r"train\.lr = -1"),
    ("--engine rey", "engine = 'rey': expected 'here', 'ray' or 'flower'"),
    ("--ray-address auto", "ray_address = auto: has no effect with engine = 'here'"),
    ("--engine ray --ray-address nohost", "'nohost': expected auto or host:port"),
    ("--engine ray --ray-address h:0", "'h:0': expected auto or host:port"),
    ("--engine ray --ray-address h:70000", "'h:70000': expected auto or host:port"),
    ("--engine ray --ray-address ray://h:1", "run fedspu on a node of the cluster"),
    ("--device nowhere", "device = 'nowhere': expected auto, cpu, cuda or mps"),
    ("--data digitz", r"data\.name = 'digitz'.*did you mean digits\?"),
    ("--data arrays", r"data\.name = 'arrays': expected arrays:FILE\.npz"),
    ("--data arrays:none.npz", r"none\.npz: No such file"),
    ("--data arrays:small.toml", r"small\.toml is not an \.npz file"),
    ("--data arrays:nan.npz", r"NaN .*x\[7\]"),
    ("--data arrays:six.npz", "scores for 3 classes.*go up to 5"),
    ("--data arrays:negative.npz", r"y\[2\] = -1"),
    ("--data arrays:floats.npz", "y holds float64; expected integers"),
    ("--data arrays:short.npz", "120 examples in x but 100 targets in y"),
    (
        "--data arrays:x_only.npz",
        "has no targets .array y., but .*classification needs",
    ),
    ("--model NETS:few", "scores for 2 classes.*go up to 2"),
    ("--model NETS:flat", r"returned \(2,\) .*expected \(2, 3\)"),
    ("--model NETS:pair", "returned a tuple; expected a tensor"),
    ("--model NETS:narrow", r"failed on two examples of shape \(1, 4, 4\)"),
    ("--model NETS:failing", "failed on two examples.*first line"),
    ("--model NETS:number", r"returned an int; expected a torch\.nn\.Module"),
    ("--model NETS:nothing", r"returned a NoneType; expected a torch\.nn\.Module"),
    ("--model NETS:constant", "constant': it is an int; expected a function"),
    ("--model NETS:needs_more", "function without arguments.*width"),
    ("--model NETS:missing", "has no missing"),
    ("--model NETS:raising", r"raising': it raised KeyError: 'no such key' \(nets_\d+"),
    (
        "--model broken:build",
        r"importing broken raised ZeroDivisionError: .* \(broken\.py, line 2\)",
    ),
    (
        "--model wrong:build",
        r"importing wrong raised SyntaxError: .*\(wrong\.py, line 1",
    ),
    ("--data cifar10 --model NETS:missing", "has no missing"),
    ("--method broken:record", "method = 'broken:record': importing broken raised"),
    ("--task broken:task", "task = 'broken:task': importing broken raised"),
    ("--method half:record", r"importing half raised TypeError: .*'offer' \(half\.py"),
    ("--method half2:make", r"it raised RuntimeError: no \(half2\.py, line 5\)"),
    ("--method half2:number", r"returned a int; expected a fedspu\.methods"),
    ("--model nosuchmodule:build", "no module named nosuchmodule"),
    ("--model digts", r"model = 'digts'.*did you mean digits\?"),
    ("--out f.npz", r"f\.npz is in use already"),
    ("--resume nowhere", "--resume takes the settings in nowhere"),
]

MODULES = {
    "broken": "a = 0\nb = 1 / a\n",
    "wrong": "def build(:\n",
    "half": "from fedspu.methods.method import Method\n\n\n"
    "record = Method(name='m', reference='r', in_words=('a',) * 4, judged_by='own')\n",
    "half2": "from fedspu.methods.options import Options\n\n\n"
    "def make(options: Options):\n    raise RuntimeError('no')\n\n\n"
    "def number(options: Options):\n    return 3\n",
}
"""A user's own modules, each with a mistake."""


@pytest.mark.parametrize(("words", "message"), BAD_WORDS)
def test_a_mistake_is_one_clear_line_and_leaves_no_folder(
    command: Command, nets: str, words: str, message: str
) -> None:
    x, y = examples()
    np.savez("six.npz", x=x, y=y + 3)
    np.savez("negative.npz", x=x, y=y - (np.arange(120) == 2) * 3)
    np.savez("floats.npz", x=x, y=y.astype(float))
    np.savez("short.npz", x=x, y=y[:100])
    np.savez("x_only.npz", x=x)
    np.savez(
        "nan.npz", x=np.where(np.arange(120)[:, None, None, None] == 7, np.nan, x), y=y
    )
    for name, text in MODULES.items():
        Path(f"{name}.py").write_text(text, encoding="utf-8")
    before = sorted(path.name for path in Path().iterdir())

    out = () if "--out" in words else ("--out", "mine")
    result = command("run", "small.toml", *words.replace("NETS", nets).split(), *out)

    assert (result.code, result.out) == (2, "")
    assert len(result.told) == 1
    assert re.search(message, result.error)
    left = {path.name for path in Path().iterdir()} - {"__pycache__"}
    assert sorted(left) == before


@pytest.mark.usefixtures("nets")
def test_with_json_a_mistake_prints_nothing_on_stdout(command: Command) -> None:
    result = command("run", "small.toml", "--rounds", 0, "--json")
    assert (result.code, result.out) == (2, "")
    assert "rounds = 0" in result.error


def test_a_file_of_data_instead_of_settings_says_how_to_name_it(
    command: Command,
) -> None:
    result = command("run", "mine.npz")
    assert result.code == 2
    assert result.err == (
        "error: mine.npz: expected a TOML file with settings; for data, use --data "
        "arrays:mine.npz\n"
    )
