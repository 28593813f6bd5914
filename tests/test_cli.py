"""The command as a user types it; bad input comes last."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspu import cli
from fedspu.federation.client import take_turn
from fedspu.federation.folder import RunFolder, read_checkpoint
from fedspu.settings import read_toml
from tests.oracles.federation import examples, folder_content

NETS = """
import time

from torch import nn


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, x):
        time.sleep(0.01)
        return self.net(x)


class Says(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.net, self.function = build(), function

    def forward(self, x):
        return self.function(self.net(x))


def fails(scores):
    raise RuntimeError("first line\\nsecond line")


def flat(): return Says(lambda scores: scores[:, 0])
def pair(): return Says(lambda scores: (scores, scores))
def failing(): return Says(fails)
def few(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
def narrow(): return nn.Sequential(nn.Flatten(), nn.Linear(7, 3))
def number(): return 3
def nothing(): pass
def needs_more(width): return build()
constant = 3
"""

CONFIG = """
model = "NETS:build"
rounds = 3
workers = 1

[data]
name = "arrays:f.npz"
alpha = 1.0

[clients]
number = 6
per_round = 3
capacities = [0.3, 0.5, 1.0]

[train]
epochs = 1
batch_size = 8
lr = 0.1
"""


@dataclass(frozen=True)
class Result:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what is wrong."""
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(f"{lines[0]}\n")
        return lines[0].removeprefix("error: ")


Command = Callable[..., Result]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Type a command in this process."""

    def run(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["fedspu", *map(str, words)])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A working folder with a user's own models and data; the models' module."""
    name = f"nets_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(NETS)
    (tmp_path / "small.toml").write_text(CONFIG.replace("NETS", name))
    x, y = examples()
    np.savez(tmp_path / "f.npz", x=x, y=y)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def in_process_of_its_own(*words: str, **kwargs: Any) -> subprocess.Popen[str]:
    # Whoever runs the tests in the background has Ctrl-C ignored.
    heeding = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen(
        [sys.executable, "-m", "fedspu.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **{**heeding, **kwargs},
    )


def finished(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=100)
    return Result(process.returncode, out, err)


# fedspu run --------------------------------------------------------------------------


def test_a_user_s_own_model_and_data_run_with_no_code_written_here(
    command: Command, nets: str
) -> None:
    flags = "--data arrays:f.npz --clients 6 --per-round 3 --rounds 2 --lr 0.1"
    result = command("run", "--model", f"{nets}:build", *flags.split(), "--out", "mine")
    assert result.code == 0
    assert "personal accuracy" in result.out
    assert "mine" in result.out
    assert json.loads(Path("mine/summary.json").read_text())["rounds_played"] == 2
    assert [line.split()[1] for line in result.err.splitlines()] == ["1/2", "2/2"]


@pytest.mark.usefixtures("nets")
def test_with_json_nothing_else_is_printed(command: Command) -> None:
    result = command("run", "small.toml", "--out", "mine", "--json")
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out) == json.loads(Path("mine/summary.json").read_text())


@pytest.mark.usefixtures("nets")
def test_flags_go_before_set_and_set_before_the_file(command: Command) -> None:
    words = ["--set", "rounds=2", "--set", "train.lr=0.5", "--set", "seed=3"]
    flags = ["--lr", "0.25", "--capacities", "0.5,1", "--early-stopping"]
    assert command("run", "small.toml", *words, *flags, "--out", "mine").code == 0
    used = read_toml(Path("mine/settings.toml"))
    assert (used["rounds"], used["train"]["lr"], used["seed"]) == (2, 0.25, 3)
    assert used["clients"]["capacities"] == [0.5, 1.0]
    assert used["early_stopping"]["on"] is True
    assert used["train"]["epochs"] == 1


@pytest.mark.usefixtures("nets")
def test_short_forms_can_be_set(command: Command) -> None:
    words = ["--set", "method=local", "--set", "early_stopping=true"]
    assert command("run", "small.toml", *words, "--out", "mine").code == 0
    used = read_toml(Path("mine/settings.toml"))
    assert used["method"]["name"] == "local"
    assert used["early_stopping"]["on"] is True


@pytest.mark.usefixtures("nets")
def test_every_flag_stands_for_its_setting(command: Command) -> None:
    flags: dict[str, tuple[str, Any]] = {
        "--method": ("method.name", "fedavg"),
        "--data": ("data.name", "arrays:f.npz"),
        "--data-dir": ("data.dir", "."),
        "--alpha": ("data.alpha", 2.0),
        "--clients": ("clients.number", 5),
        "--per-round": ("clients.per_round", 2),
        "--rounds": ("rounds", 1),
        "--epochs": ("train.epochs", 2),
        "--batch-size": ("train.batch_size", 5),
        "--lr": ("train.lr", 0.03),
        "--seed": ("seed", 4),
        "--device": ("device", "cpu"),
        "--out": ("out", "mine"),
    }
    words = [word for flag, (_, value) in flags.items() for word in (flag, value)]
    assert command("run", "small.toml", *words, "--no-early-stopping").code == 0
    used = read_toml(Path("mine/settings.toml"))
    for name, value in flags.values():
        found: Any = used
        for part in name.split("."):
            found = found[part]
        assert found == value


@pytest.mark.usefixtures("nets")
def test_without_out_every_run_has_a_new_folder(command: Command) -> None:
    for _ in range(3):
        assert command("run", "small.toml", "--rounds", 1).code == 0
    names = sorted(path.name for path in Path("runs").iterdir())
    assert len(names) == 3
    assert all("fedspu-seed-0" in name for name in names)


@pytest.mark.usefixtures("nets")
def test_the_settings_of_a_run_can_be_fed_back(command: Command) -> None:
    command("run", "small.toml", "--seed", 8, "--early-stopping", "--out", "one")
    assert command("run", "one/settings.toml", "--out", "two").code == 0
    assert folder_content(Path("one")) == folder_content(Path("two"))


@pytest.mark.usefixtures("nets")
def test_a_path_with_brackets_is_printed_as_it_is(command: Command) -> None:
    result = command("run", "small.toml", "--rounds", 1, "--out", "a[b]c")
    assert "a[b]c" in result.out


def test_in_a_pipe_there_is_no_progress_bar(nets: str) -> None:
    result = finished(in_process_of_its_own("run", "small.toml", "--out", "mine"))
    assert result.code == 0
    assert re.fullmatch(r"(round \d/3  personal [^\n]*\n){3}", result.err)
    for text in (result.out, result.err):
        assert "\x1b" not in text
        assert "\r" not in text
        assert "━" not in text


# --resume ----------------------------------------------------------------------------


def interrupt_at_turn(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C in that turn of the whole run; once."""
    original, turns = take_turn, iter(range(10**6))

    def turn(*args: Any) -> Any:
        if next(turns) == number:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr("fedspu.engines.turns.take_turn", turn)


@pytest.mark.usefixtures("nets")
def test_an_interrupted_run_says_how_to_go_on_and_does(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("run", "small.toml", "--out", "whole")
    with monkeypatch.context() as patch:
        interrupt_at_turn(patch, 7)
        result = command("run", "small.toml", "--out", "mine")
    assert result.code == 130
    assert "rounds up to 2 are saved" in result.error
    words = re.findall(r"`fedspu (.*)`", result.error)[0].split()
    again = command(*words)
    assert again.code == 0
    assert [line.split()[1] for line in again.err.splitlines()] == ["3/3"]
    assert folder_content(Path("mine")) == folder_content(Path("whole"))


def test_ctrl_c_in_mid_round_loses_that_round_alone(
    command: Command, nets: str
) -> None:
    words = ("run", "small.toml", "--model", f"{nets}:Slow", "--rounds", "6")
    process = in_process_of_its_own(*words, "--workers", "2", "--out", "mine")
    assert process.stderr is not None
    for line in process.stderr:  # a round takes a tenth of a second
        if line.startswith("round 2/6"):
            process.send_signal(signal.SIGINT)
            break
    result = finished(process)
    assert result.code == 130
    saved = int(re.findall(r"rounds up to (\d) are saved", result.error)[0])
    assert 2 <= saved < 6
    assert read_checkpoint(Path("mine")).federation.round == saved
    assert command("run", "--resume", "mine").code == 0
    command(*words, "--out", "whole")
    assert folder_content(Path("mine")) == folder_content(Path("whole"))


def test_ctrl_c_in_the_first_round_leaves_nothing_half_written(
    command: Command, nets: str
) -> None:
    slow = ("--model", f"{nets}:Slow", "--epochs", "60", "--rounds", "1")
    process = in_process_of_its_own("run", "small.toml", *slow, "--out", "mine")
    while process.poll() is None:
        if Path("mine/checkpoint/federation.json").exists():
            break
        time.sleep(0.02)
    time.sleep(0.1)  # the round takes some seconds
    process.send_signal(signal.SIGINT)
    result = finished(process)
    assert result.code == 130
    assert result.error.startswith("interrupted")
    if Path("mine").exists():
        assert command("run", "--resume", "mine").code == 0


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("words", [["run"], ["compare"]])
def test_ctrl_c_before_anything_is_played_leaves_nothing(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedspu.runs.make_plan", interrupted)
    result = command(*words, "small.toml", "--out", "mine")
    assert (result.code, result.out) == (130, "")
    assert result.error.startswith("interrupted")
    assert not Path("mine").exists()


# fedspu compare ----------------------------------------------------------------------

COMPARE = ("compare", "small.toml", "--seeds", "0,1", "--out", "both")
CELLS = [f"{m}-alpha-1-seed-{s}" for m in ("fedspu", "local") for s in (0, 1)]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients whose turns have been played so far."""
    original = take_turn
    clients: list[int] = []

    def turn(plan: Any, model: Any, request: Any, memory: Any) -> Any:
        clients.append(request.client)
        return original(plan, model, request, memory)

    monkeypatch.setattr("fedspu.engines.turns.take_turn", turn)
    return clients


@pytest.mark.usefixtures("nets")
def test_a_comparison_plays_each_run_once(command: Command, played: list[int]) -> None:
    first = command(*COMPARE)
    assert first.code == 0
    assert len(played) == 4 * 3 * 3  # runs, rounds, clients
    assert "fedspu" in first.out
    assert "local" in first.out
    assert all(Path("both", cell, "summary.json").exists() for cell in CELLS)
    assert Path("both/comparison.md").read_text().startswith("| method |")

    second = command(*COMPARE)
    assert second.code == 0
    assert len(played) == 4 * 3 * 3
    assert second.out == first.out
    assert second.err == ""


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
    assert "the same command goes on" in result.error
    played.clear()
    assert command(*COMPARE).code == 0
    assert len(played) == 3 + 2 * 9
    for cell in CELLS:
        assert folder_content(Path("both", cell)) == folder_content(Path("whole", cell))


@pytest.mark.usefixtures("nets")
def test_a_comparison_as_json_prints_the_summaries_alone(command: Command) -> None:
    result = command(*COMPARE, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert [(s["method"], s["seed"]) for s in found] == [
        *(("fedspu", 0), ("fedspu", 1), ("local", 0), ("local", 1)),
    ]
    assert found == json.loads(Path("both/comparison.json").read_text())


@pytest.mark.usefixtures("nets")
def test_a_comparison_over_alphas_has_a_run_for_each(command: Command) -> None:
    words = ("--methods", "local", "--alphas", "0.5,2", "--seeds", "3", "--json")
    result = command("compare", "small.toml", "--out", "both", *words)
    assert [summary["alpha"] for summary in json.loads(result.out)] == [0.5, 2]


@pytest.mark.usefixtures("nets")
def test_a_seed_is_the_number_that_was_typed(command: Command) -> None:
    seed = 2**53 + 1  # no float64 holds it
    words = ("--methods", "local", "--seeds", seed, "--set", "rounds=1", "--json")
    result = command("compare", "small.toml", "--out", "both", *words)
    assert [summary["seed"] for summary in json.loads(result.out)] == [seed]


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
        (["--methods", ""], "method = ''"),
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


# fedspu neurons, profile, methods, help ----------------------------------------------


def test_a_built_in_model_s_neurons_are_printed(command: Command) -> None:
    result = command("neurons", "emnist")
    assert (result.code, result.err) == (0, "")
    assert "conv2" in result.out
    assert "64,802" in result.out  # entries at p = 1
    assert "12,434" in result.out  # at p = .2


def test_neurons_as_json(command: Command) -> None:
    result = command("neurons", "emnist", "--json", "--p", "0.2,1")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert [group["size"] for group in found["groups"]] == [20, 20]
    assert [line["entries"] for line in found["active"]] == [12434, 64802]


@pytest.mark.parametrize(
    "words", [["--input", "1,4,4"], ["--data", "arrays:f.npz"], ["--input", "16"]]
)
def test_a_user_s_own_model_s_neurons_are_printed(
    command: Command, nets: str, words: list[str]
) -> None:
    result = command("neurons", f"{nets}:build", *words)
    assert result.code == 0
    # At p = .4, 3 of 8 neurons: 3 * 16 + 3 + 3 * 3 + 3 of 163 entries.
    assert re.search(r"0\.4 +63 ", result.out)
    assert re.search(r"1 +163 ", result.out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["emnits"], r"model = 'emnits'.*did you mean emnist"),
        (["NETS:build"], r"give the shape of one example, like --input"),
        (["NETS:build", "--input", "1,x"], r"--input 1,x: expected sizes"),
        (["NETS:build", "--input", "-3"], r"--input -3: expected sizes"),
        (["NETS:build", "--input", "3,4,4"], "48|shape|example"),
        (["emnist", "--p", "0"], r"p = 0.*\(0, 1\]"),
        (["emnist", "--p", "0.5,1.5"], r"p = 1\.5.*\(0, 1\]"),
        (["emnist", "--p", "half"], "--p half: expected numbers"),
        (["emnist", "--data", "digitz"], r"did you mean digits"),
        (["NETS:number", "--input", "1,4,4"], r"int.*expected a torch\.nn\.Module"),
    ],
)
def test_neurons_that_cannot_be_shown(
    command: Command, nets: str, words: list[str], message: str
) -> None:
    result = command("neurons", *(word.replace("NETS", nets) for word in words))
    assert (result.code, result.out) == (2, "")
    assert re.search(message, result.error)


QUICK = ("--repetitions", 1, "--p", "0.5,1")
"""For tests that do not look at times."""


def test_a_model_s_steps_are_measured(command: Command, nets: str) -> None:
    result = command("profile", f"{nets}:build", "--input", "1,4,4", *QUICK)
    assert (result.code, result.err) == (0, "")
    assert f"{nets}:build, batch of 16: median CPU time of 1 x" in result.out
    assert re.search(r"\n +dense .*\d", result.out)
    for saves in ("fast", "lean"):
        assert re.search(rf"\n +0\.5 +exact +{saves} .*%", result.out)
    assert "How gradients were computed" in result.out
    assert "fits" not in result.out


def test_a_profile_as_json_is_all_that_is_printed(command: Command, nets: str) -> None:
    given = ("--data", "arrays:f.npz", "--mode", "truncated,exact", "--saves", "lean")
    result = command("profile", f"{nets}:build", *given, *QUICK, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert (found["batch_size"], found["threads"], found["budget"]) == (16, 1, None)
    settings = [(row["p"], row["mode"], row["saves"]) for row in found["rows"]]
    assert settings == [
        (p, mode, "lean") for mode in ("truncated", "exact") for p in (0.5, 1.0)
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--memory 1GB", r"p = 1 fits 1\.00 GB; nothing needs to be frozen"),
        ("--memory 1B", r"no p fits 1 B, not even p = 0\.01 \(peak \d"),
        ("--seconds 100", r"p = 1 fits 100 s.* ms\)"),
        ("--seconds 1us", r"no p fits 0\.001 ms, not even p = 0\.05 .* ms\)"),
        ("--memory 1gib --seconds 1e2", r"p = 1 fits 1\.07 GB and 100 s"),
    ],
)
def test_the_largest_share_that_fits_is_printed(
    command: Command, nets: str, words: str, message: str
) -> None:
    given = ("--input", "16", *QUICK, *words.split())
    result = command("profile", f"{nets}:build", *given)
    assert (result.code, result.err) == (0, "")
    assert re.search(f"exact fast: {message}", result.out)
    assert re.search(f"exact lean: {message}", result.out)


def test_a_profile_is_drawn(command: Command, nets: str) -> None:
    pytest.importorskip("matplotlib")
    given = ("--input", "16", *QUICK, "--plot", "costs[1].svg")
    result = command("profile", f"{nets}:build", *given)
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("Plot: costs[1].svg\n")
    assert f"{nets}:build, batch of 16" in Path("costs[1].svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--p 0", r"--p 0: expected numbers in \(0, 1\]"),
        ("--p 0.5,1.5", r"--p 1\.5: expected numbers in \(0, 1\]"),
        ("--p nan", r"--p nan: expected numbers in \(0, 1\]"),
        ("--p half", "--p half: expected numbers"),
        ("--p 0.2,,1", "--p 0.2,,1: expected numbers"),
        ("--mode exat", "--mode exat: expected exact or truncated, or both"),
        ("--mode exact,", "--mode exact,: expected exact or truncated"),
        ("--saves quick", "--saves quick: expected fast or lean"),
        ("--batch-size 0", "--batch-size 0: expected a whole number from 1 on"),
        ("--batch-size -3", "--batch-size -3: expected a whole number"),
        ("--repetitions 0", "--repetitions 0: expected a whole number"),
        ("--threads 0", r"--threads 0: expected 1 to \d+, the cores"),
        ("--threads 99999", r"--threads 99999: expected 1 to \d+, the cores"),
        ("--memory 4", "--memory 4: expected a size with its unit, like 500kB"),
        ("--memory 4XB", "--memory 4XB: expected a size"),
        ("--memory MB", "--memory MB: expected a size"),
        ("--memory -4MB", "--memory -4MB: expected a size"),
        ("--memory 0MB", "--memory 0MB: expected a size"),
        ("--memory 1.2.3MB", r"--memory 1\.2\.3MB: expected a size"),
        ("--memory 1e999MB", "--memory 1e999MB: expected a size"),
        ("--seconds soon", "--seconds soon: expected a time above 0, like 0.01"),
        ("--seconds 0", "--seconds 0: expected a time"),
        ("--seconds nan", "--seconds nan: expected a time"),
        ("--seconds 3MB", "--seconds 3MB: expected a time"),
        ("--plot plot.jpg", r"--plot plot\.jpg: expected a file that ends in \.png"),
        ("--plot no/plot.png", "there is no folder no"),
        ("--input 1,x", "--input 1,x: expected sizes"),
        ("--input 17", r"failed on two examples of shape \(17,\)"),
        ("--data digitz", "did you mean digits"),
    ],
)
def test_a_profile_that_cannot_be_measured(
    command: Command, nets: str, words: str, message: str
) -> None:
    shape = () if "--input" in words or "--data" in words else ("--input", "16")
    result = command("profile", f"{nets}:build", *shape, *words.split(), "--json")
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1
    assert re.search(message, result.error)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("flat", r"returned \(2,\) for 2 examples; expected \(2, classes\)"),
        ("pair", "returned tuple for 2 examples"),
        ("failing", r"failed on two examples of shape \(16,\): first line$"),
        ("number", r"int; expected a torch\.nn\.Module"),
        ("missing", "has no missing"),
    ],
)
def test_a_model_that_cannot_be_profiled(
    command: Command, nets: str, model: str, message: str
) -> None:
    result = command("profile", f"{nets}:{model}", "--input", "16")
    assert (result.code, result.out) == (2, "")
    assert re.search(message, result.error)


def test_the_methods_are_listed(command: Command) -> None:
    result = command("methods", "--json")
    assert result.code == 0
    rows = {(row["method"], row["reading"]): row for row in json.loads(result.out)}
    assert len(rows) == len(json.loads(result.out))
    assert rows.keys() >= {("fedspu", "paper"), ("fedavg", "paper"), ("local", "paper")}
    assert rows.keys() >= {("fjord", "paper"), ("fjord", "original")}
    # Name, reading, four answers, options, reference.
    assert len(rows["local", "paper"]) == 8
    assert rows["fedavg", "paper"]["options"] == "method.finetune"
    plain = command("methods")
    assert plain.code == 0
    assert all(name in plain.out for name, _ in rows)
    assert "original reading" in plain.out


@pytest.mark.parametrize("name", ["run", "compare", "neurons", "profile", "methods"])
def test_help_teaches_by_example(command: Command, name: str) -> None:
    result = command(name, "--help")
    assert result.code == 0
    assert "Usage" in result.out
    if name != "methods":
        assert f"fedspu {name} " in result.out


# Bad input ---------------------------------------------------------------------------
#
# Each mistake: exit 2, one clear line, and no folder.

BAD_WORDS: list[tuple[str, str]] = [
    ("--set train.lrr=0.1", r"train\.lrr: no such setting .*did you mean train\.lr\?"),
    ("--set zzz=1", "zzz: no such setting"),
    ("--set rounds", "--set rounds: expected key=value"),
    ("--method fedspoo", r"method = 'fedspoo'.*did you mean fedspu\?"),
    ("--set method=fedavgg", r"'fedavgg'.*did you mean fedavg\?"),
    ("--capacities 0", r"clients\.capacities = \[0\.0\]: .*greater than 0"),
    ("--capacities 0.5,1.2", r"clients\.capacities = .*less than or equal to 1"),
    ("--capacities 0.5,-1", r"clients\.capacities = .*greater than 0"),
    ("--capacities half", "--capacities half: expected numbers"),
    ("--alpha 0", r"data\.alpha = 0\.0: .*greater than 0"),
    ("--alpha -2", r"data\.alpha = -2\.0: .*greater than 0"),
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
    ("--device nowhere", "device = 'nowhere'.*try cpu"),
    ("--data digitz", r"data\.name = 'digitz'.*did you mean digits\?"),
    ("--data arrays", r"data\.name = 'arrays': expected arrays:FILE\.npz"),
    ("--data arrays:none.npz", r"none\.npz: No such file"),
    ("--data arrays:small.toml", r"small\.toml is not an \.npz file"),
    ("--data arrays:nan.npz", r"NaN .*x\[7\]"),
    ("--data arrays:six.npz", "scores for 3 classes.*go up to 5"),
    ("--data arrays:negative.npz", r"y\[2\] = -1"),
    ("--data arrays:floats.npz", "y holds float64; expected integers"),
    ("--data arrays:short.npz", "120 examples in x but 100 labels in y"),
    ("--data arrays:x_only.npz", "holds x; expected"),
    ("--model NETS:few", "scores for 2 classes.*go up to 2"),
    ("--model NETS:flat", r"returned \(2,\) .*expected \(2, 3\)"),
    ("--model NETS:pair", r"returned tuple .*expected \(2, 3\)"),
    ("--model NETS:narrow", r"failed on two examples of shape \(1, 4, 4\)"),
    ("--model NETS:failing", "failed on two examples.*first line"),
    ("--model NETS:number", r"returned a int; expected a torch\.nn\.Module"),
    ("--model NETS:nothing", r"returned a NoneType; expected a torch\.nn\.Module"),
    ("--model NETS:constant", "constant is a int"),
    ("--model NETS:needs_more", "function without arguments.*width"),
    ("--model NETS:missing", "has no missing"),
    ("--model nosuchmodule:build", "no module named nosuchmodule"),
    ("--model digts", r"model = 'digts'.*did you mean digits\?"),
    ("--out f.npz", r"f\.npz is in use already"),
    ("--resume nowhere", r"--resume goes on|not a run folder"),
]


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
    before = sorted(path.name for path in Path().iterdir())

    out = () if "--out" in words else ("--out", "mine")
    result = command("run", "small.toml", *words.replace("NETS", nets).split(), *out)

    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1
    assert re.search(message, result.error)
    left = {path.name for path in Path().iterdir()} - {"__pycache__"}
    assert sorted(left) == before


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"none\.toml: no such configuration file"),
        ("rounds = \n", r"none\.toml: not valid TOML"),
        ("[train]\nlrr = 3\n", r"train\.lrr: no such setting"),
        ("train = 3\n", "train: no such setting"),
        ("rounds = 'many'\n", "rounds = 'many'"),
    ],
)
def test_a_configuration_that_cannot_be_used(
    command: Command, content: str | None, message: str
) -> None:
    if content is not None:
        Path("none.toml").write_text(content)
    result = command("run", "none.toml", "--out", "mine")
    assert (result.code, result.out) == (2, "")
    assert re.search(message, result.error)
    assert not Path("mine").exists()


@pytest.mark.usefixtures("nets")
def test_a_model_is_asked_for_where_none_is_suggested(command: Command) -> None:
    result = command("run", "--data", "arrays:f.npz", "--out", "mine")
    assert result.code == 2
    assert re.search("^model: not given.*--model", result.error)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("run --nosuchflag", "--nosuchflag"),
        ("walk", "walk"),
        ("run --lr fast", "--lr"),
        ("neurons", "model"),
        ("run one.toml two.toml", "two.toml"),
    ],
)
def test_a_word_the_command_does_not_know(
    command: Command, words: str, named: str
) -> None:
    result = command(*words.split())
    assert (result.code, result.out) == (2, "")
    assert "Traceback" not in result.err
    assert named in result.err.lower()


@pytest.mark.usefixtures("nets")
def test_with_json_a_mistake_prints_nothing_on_stdout(command: Command) -> None:
    result = command("run", "small.toml", "--rounds", 0, "--json")
    assert (result.code, result.out) == (2, "")
    assert "rounds = 0" in result.error


@pytest.mark.usefixtures("nets")
def test_a_folder_in_use_is_left_alone(command: Command) -> None:
    command("run", "small.toml", "--out", "mine")
    before = folder_content(Path("mine"))
    result = command("run", "small.toml", "--seed", 4, "--out", "mine")
    assert result.code == 2
    assert "mine is in use already" in result.error
    assert folder_content(Path("mine")) == before


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("lr", ["1e10", "1e30", "1e39"])
def test_a_diverging_loss_says_what_to_lower_and_leaves_no_empty_folder(
    command: Command, lr: str
) -> None:
    words = ("--lr", lr, "--epochs", 5, "--rounds", 9)
    result = command("run", "small.toml", *words, "--out", "mine")
    assert (result.code, result.out) == (2, "")
    assert re.search(r"round \d, client \d: .*train\.lr", result.error)
    if Path("mine").exists():
        assert read_checkpoint(Path("mine")).federation.round > 0
        assert "NaN" not in Path("mine/clients.jsonl").read_text()


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("words", [["--rounds", "9"], ["small.toml"], ["--seed", "0"]])
def test_a_run_goes_on_with_its_own_settings(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at_turn(patch, 4)
        command("run", "small.toml", "--out", "mine")
    before = folder_content(Path("mine"))
    result = command("run", *words, "--resume", "mine")
    assert result.code == 2
    assert "cannot be changed on the way" in result.error
    assert folder_content(Path("mine")) == before


@pytest.mark.usefixtures("nets")
def test_a_run_that_is_being_played_cannot_be_resumed(command: Command) -> None:
    command("run", "small.toml", "--out", "mine")
    before = folder_content(Path("mine"))
    other = RunFolder.open(Path("mine"))
    result = command("run", "--resume", "mine")
    other.close()
    assert (result.code, result.out) == (2, "")
    assert "mine is being written by another run" in result.error
    assert folder_content(Path("mine")) == before


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("name", ["nowhere", ".", "f.npz"])
def test_a_folder_that_is_no_run_cannot_be_resumed(command: Command, name: str) -> None:
    result = command("run", "--resume", name)
    assert (result.code, result.out) == (2, "")
    assert f"{name} is not a run folder" in result.error
    assert not Path("nowhere").exists()


@pytest.mark.usefixtures("nets")
def test_a_damaged_checkpoint_is_named(command: Command) -> None:
    command("run", "small.toml", "--out", "mine")
    Path("mine/checkpoint/federation.json").write_text("{")
    result = command("run", "--resume", "mine")
    assert result.code == 2
    assert "mine: its checkpoint is damaged" in result.error


def limited(size: int) -> Callable[[], None]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def test_a_disk_that_is_full_from_the_beginning(nets: str) -> None:
    process = in_process_of_its_own(
        *("run", "small.toml", "--out", "mine"), preexec_fn=limited(600)
    )
    result = finished(process)
    assert (result.code, result.out) == (2, "")
    assert "mine: cannot write" in result.error
    assert not Path("mine").exists()


def test_a_disk_that_fills_up_on_the_way_loses_nothing(
    command: Command, nets: str
) -> None:
    words = ("run", "small.toml", "--rounds", "9")
    # No model is larger; the clients' record is after some rounds.
    process = in_process_of_its_own(*words, "--out", "mine", preexec_fn=limited(3000))
    result = finished(process)
    assert (result.code, result.out) == (2, "")
    saved = int(re.findall(r"rounds up to (\d) are saved", result.error)[0])
    assert 0 < saved < 9
    assert read_checkpoint(Path("mine")).federation.round == saved
    assert command("run", "--resume", "mine").code == 0
    command(*words, "--out", "whole")
    assert folder_content(Path("mine")) == folder_content(Path("whole"))


def test_a_bug_of_ours_shows_its_traceback(nets: str) -> None:
    """Exit 1 is kept for what is no mistake of the user's."""
    code = "import fedspu.runs as s, fedspu.cli as c; s.simulate = None; c.main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "run", "small.toml", "--out", "mine"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_the_command_needs_no_more_than_is_installed_with_it() -> None:
    """Not what only the extras bring, and what they bring along."""
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'flwr', 'ray', 'pytest', 'hypothesis'):\n"
        "    sys.modules[name] = None\n"
        "import fedspu.cli\n"
        "sys.argv = ['fedspu', 'methods']\n"
        "fedspu.cli.main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "fedspu" in result.stdout
