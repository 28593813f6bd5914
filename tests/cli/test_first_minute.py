"""What a newcomer meets in the first minute: each stumble of a trial, once."""

import os
import pty
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fedspu.cli.console import LOADING
from tests.cli.commands import Command, interrupt_at_turn
from tests.oracles.federation import examples

FEDSPU = (sys.executable, "-c", "from fedspu.cli import main; main()")
NO_TORCH = (
    sys.executable,
    "-c",
    "import sys; sys.modules['torch'] = None\nfrom fedspu.cli import main; main()",
)


@pytest.mark.parametrize("flag", ["--version", "-h", "--help"])
def test_the_usual_questions_are_answered(command: Command, flag: str) -> None:
    result = command(flag)
    assert (result.code, result.err) == (0, "")
    said = r"^fedspu \d+\.\d+" if flag == "--version" else r"Usage: .*fedspu"
    assert re.search(said, result.out)
    assert command("run", "-h").code == 0


@pytest.mark.parametrize("name", ["profile", "deploy init"])
def test_help_fills_its_lines(name: str) -> None:
    """A word that would have fitted into the line above is a line broken twice."""
    done = subprocess.run(
        [*FEDSPU, *name.split(), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80", "PYTHONPATH": _sources()},
    )
    lines = [line.strip() for line in done.stdout.partition("╭")[0].splitlines()]
    for line, following in pairwise(lines):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > 78, line


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "settings",
        "run --help",
        "run --set train.lrr=1",
        "run --lr abc",
        "run --method lokal",
        "run --data imgs.npz",
        "run --model a/b.py:build",
        "run --device gpu",
        "compare --methods fedspu,lokal",
        "compare --methods fedspu@train.lrr=1",
        "compare --vary train.lr=x",
        "report no-such-folder",
        "rum",
    ],
)
def test_help_and_wrong_settings_need_no_pytorch(words: str) -> None:
    done = subprocess.run(
        [*NO_TORCH, *words.split()], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    is_right = words.split()[-1] in ("--help", "--version", "settings")
    assert done.returncode == (0 if is_right else 2)


def test_a_terminal_is_told_that_pytorch_is_being_loaded(tmp_path: Path) -> None:
    # A module called torch that says what a terminal showed before it.
    (tmp_path / "torch.py").write_text("raise SystemExit(7)\n")
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*FEDSPU, "methods"],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{_sources()}"},
    )
    os.close(theirs)
    said = os.read(ours, 10_000).decode()
    os.close(ours)
    assert done.returncode == 7
    assert said.startswith(LOADING)


@pytest.mark.parametrize(
    ("words", "said"), [("methods --json", f"{LOADING}\n"), ("run --quiet", "")]
)
def test_a_pipe_is_told_too_but_not_if_it_is_to_be_quiet(
    tmp_path: Path, words: str, said: str
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(7)\n")
    done = subprocess.run(
        [*FEDSPU, *words.split()],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{_sources()}"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "", said)


def _sources() -> str:
    return str(Path(__file__).parents[2] / "src")


def test_a_suggestion_is_made_once(command: Command) -> None:
    assert command("rum").err.count("Did you mean") == 1


@pytest.mark.parametrize("words", [["settings"], ["data", "show", "digits"]])
def test_output_without_our_letters_is_printed_all_the_same(words: list[str]) -> None:
    done = subprocess.run(
        [*FEDSPU, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) in ((0, ""), (0, "loading PyTorch ...\n"))
    assert done.stdout.isascii()
    assert len(done.stdout) > 500


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*FEDSPU, "settings"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == (
        "error: the output cannot be written: No space left on device\n"
    )


def test_who_reads_a_pipe_may_stop() -> None:
    running = subprocess.Popen(
        [*FEDSPU, "settings"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()
    with running.stderr as said:
        assert said.read() == b""
    assert running.wait(60) in (1, 2)


@pytest.mark.usefixtures("nets")
def test_a_run_s_settings_can_be_played_again(command: Command) -> None:
    command("run", "small.toml", "--out", "mine")
    again = command("run", "mine/settings.toml")
    assert again.code == 0
    (other,) = Path("runs").iterdir()
    assert (other / "rounds.jsonl").read_bytes() == Path(
        "mine/rounds.jsonl"
    ).read_bytes()


@pytest.mark.usefixtures("nets")
def test_data_are_found_beside_their_file_and_from_anywhere_later(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command("run", "../small.toml", "--out", "mine").code == 0
    stored = tomllib.loads(Path("mine/settings.toml").read_text())
    assert stored["data"]["name"] == f"arrays:{tmp_path / 'f.npz'}"
    monkeypatch.chdir("/")
    run = tmp_path / "elsewhere/mine"
    more = ("--trust", "--rounds", "4")
    assert command("run", "--resume", run, *more).code == 0


@pytest.mark.usefixtures("nets")
def test_a_flag_s_path_is_seen_from_the_working_folder(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "f.npz").rename(tmp_path / "own/f.npz")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path / "own")
    words = ("run", "../small.toml", "--data", "arrays:f.npz", "--out", "mine")
    assert command(*words).code == 0


@pytest.mark.usefixtures("nets")
def test_resuming_a_finished_run_says_so(command: Command) -> None:
    command("run", "small.toml", "--out", "mine")
    result = command("run", "--resume", "mine", "--trust")
    assert "mine was finished already, and nothing was played" in result.out
    more = command("run", "--resume", "mine", "--trust", "--rounds", "4")
    assert "finished already" not in more.out


@pytest.mark.usefixtures("nets")
def test_bytes_of_a_resumed_run_go_on_where_they_were(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = command("run", "small.toml", "--out", "whole").err.splitlines()
    with monkeypatch.context() as patch:
        interrupt_at_turn(patch, 7)  # in the last round
        command("run", "small.toml", "--out", "mine")
    resumed = command("run", "--resume", "mine", "--trust").err.splitlines()
    assert resumed[-1] == whole[-1]


@pytest.mark.usefixtures("nets")
def test_a_quiet_run_says_nothing(command: Command) -> None:
    result = command("run", "small.toml", "--out", "mine", "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "")


@pytest.mark.usefixtures("nets")
def test_a_run_takes_options_of_a_method_as_compare_does(command: Command) -> None:
    words = ("run", "small.toml", "--method", "fedavg@finetune=2", "--out", "mine")
    assert command(*words).code == 0
    stored = tomllib.loads(Path("mine/settings.toml").read_text())
    finishes = {"finish": 0, "finish_last": 0}
    assert stored["method"] == {"name": "fedavg", "finetune": 2, **finishes}


def test_a_run_says_how_to_see_it(command: Command, nets: str) -> None:
    said = command("run", "small.toml", "--out", "mine").out
    assert "Curves and clients: `fedspu report mine`" in said


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('data = "digits"', r"^data: .*did you mean data\.name = 'digits'\?"),
        ("\ufeffrounds = 0", "^rounds = 0: expected"),
        (
            "rounds = 0\nsed = 1\n[train]\nlr = -1",
            r"sed: no such .*rounds = 0: expected.*train\.lr = -1: expected",
        ),
    ],
)
def test_all_that_is_wrong_in_a_file_is_said_at_once(
    command: Command, tmp_path: Path, toml: str, message: str
) -> None:
    (tmp_path / "a.toml").write_text(toml, encoding="utf-8")
    result = command("run", tmp_path / "a.toml")
    assert result.code == 2
    assert re.search(message, result.error)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--data", "imgs.npz"], "arrays:imgs.npz"),
        (["--data", "."], "images:. or sounds:."),
        (["--model", "./mylab/nets.py:build"], "mylab.nets:build"),
        (["--model", "nets.py"], "nets:build"),
    ],
)
def test_a_path_is_answered_with_what_was_meant(
    command: Command, words: list[str], meant: str
) -> None:
    assert f"(did you mean {meant}?)" in command("run", *words).error


@pytest.mark.usefixtures("nets")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (["--lr", "0"], "train.lr = 0: nothing will be learned"),
        (["--alpha", "1e-9"], "data.alpha = 1e-09: almost every class"),
        (["--data", "arrays:one.npz"], "all examples have the same class"),
        (
            ["--set", "train.optimizer=adam", "--set", "train.momentum=0.9"],
            "train.momentum = 0.9: has no effect with train.optimizer = 'adam'",
        ),
    ],
)
def test_what_is_probably_a_mistake_is_a_warning(
    command: Command, words: list[str], warning: str
) -> None:
    x, _ = examples()
    np.savez("one.npz", x=x, y=np.zeros(len(x), dtype=np.int64))
    result = command("run", "small.toml", "--rounds", "1", *words, "--out", "mine")
    assert result.code == 0
    assert f"warning: {warning}" in result.err


@pytest.mark.usefixtures("nets")
def test_names_of_classes_are_labels_too(command: Command) -> None:
    x, y = examples()
    np.savez("names.npz", x=x, y=np.array(["ant", "bee", "cat"])[y])
    for data, out in (("f.npz", "numbers"), ("names.npz", "names")):
        command("run", "small.toml", "--data", f"arrays:{data}", "--out", out)
    same = [Path(out, "rounds.jsonl").read_bytes() for out in ("numbers", "names")]
    assert same[0] == same[1]
    shown = command("report", "names")
    assert shown.code == 0
    assert "class ant" in Path("names/report.html").read_text() or (
        ">ant<" in Path("names/report.html").read_text()
    )
