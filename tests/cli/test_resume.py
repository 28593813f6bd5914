"""An interrupted ``fedspu run``, and ``fedspu run --resume``."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fedspu
from fedspu.errors import SettingsError
from fedspu.federation.storage.run_folder import RunFolder
from fedspu.federation.storage.saved_run import SavedRun
from tests.cli.commands import (
    Command,
    finished,
    in_process_of_its_own,
    interrupt_at_turn,
)
from tests.oracles.federation import folder_content


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
    assert [line.split()[1] for line in again.told] == ["3/3"]
    assert folder_content(Path("mine")) == folder_content(Path("whole"))


def test_ctrl_c_in_mid_round_loses_that_round_alone(
    command: Command, nets: str
) -> None:
    slow = ("--model", f"{nets}:Slow", "--kernels", "torch")
    words = ("run", "small.toml", *slow, "--rounds", "6")
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
    assert SavedRun(Path("mine")).checkpoint().federation.round == saved
    assert command("run", "--resume", "mine", "--trust").code == 0
    command(*words, "--out", "whole")
    assert folder_content(Path("mine")) == folder_content(Path("whole"))


def test_ctrl_c_in_the_first_round_leaves_nothing_half_written(
    command: Command, nets: str
) -> None:
    # Compiled code would not sleep.
    slow = ("--model", f"{nets}:Slow", "--kernels", "torch", "--epochs", "60")
    process = in_process_of_its_own(
        "run", "small.toml", *slow, "--rounds", "1", "--out", "mine"
    )
    while process.poll() is None:
        if Path("mine/checkpoint/save-round-0.json").exists():
            break
        time.sleep(0.02)
    time.sleep(0.1)  # the round takes some seconds
    process.send_signal(signal.SIGINT)
    result = finished(process)
    assert result.code == 130
    assert result.error.startswith("interrupted")
    if Path("mine").exists():
        assert command("run", "--resume", "mine", "--trust").code == 0


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("words", [["run"], ["compare", "--parallel", "1"]])
def test_ctrl_c_before_anything_is_played_leaves_nothing(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedspu.prepare.make_plan", interrupted)
    result = command(*words, "small.toml", "--out", "mine")
    assert (result.code, result.out) == (130, "")
    assert result.error.startswith("interrupted")
    assert not Path("mine").exists()


@pytest.mark.usefixtures("nets")
@pytest.mark.filterwarnings("ignore:workers = ")  # there may be one core
def test_a_run_may_be_resumed_with_other_workers(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("run", "small.toml", "--out", "whole")
    with monkeypatch.context() as patch:
        interrupt_at_turn(patch, 4)
        command("run", "small.toml", "--out", "mine")
    result = command("run", "--resume", "mine", "--trust", "--workers", 2, "--json")
    assert (result.code, json.loads(result.out)["workers"]) == (0, 2)
    assert folder_content(Path("mine")) == folder_content(Path("whole"))


# Mistakes ----------------------------------------------------------------------------


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("number", ["0", "-1", "many", "1.5"])
def test_a_run_is_not_resumed_with_a_wrong_number_of_workers(
    command: Command, number: str
) -> None:
    command("run", "small.toml", "--out", "mine")
    before = folder_content(Path("mine"))
    result = command("run", "--resume", "mine", "--trust", "--workers", number)
    assert (result.code, result.out) == (2, "")
    assert len(result.told) == 1
    assert result.error.startswith("workers = ")
    assert folder_content(Path("mine")) == before


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("words", [["--lr", "9"], ["small.toml"], ["--seed", "0"]])
def test_a_run_goes_on_with_its_own_settings(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at_turn(patch, 4)
        command("run", "small.toml", "--out", "mine")
    before = folder_content(Path("mine"))
    result = command("run", *words, "--resume", "mine", "--trust")
    assert result.code == 2
    assert "cannot be changed; leave it out" in result.error
    assert folder_content(Path("mine")) == before


@pytest.mark.usefixtures("nets")
def test_a_run_that_is_being_played_cannot_be_resumed(command: Command) -> None:
    command("run", "small.toml", "--out", "mine")
    before = folder_content(Path("mine"))
    other = RunFolder.open(Path("mine"))
    result = command("run", "--resume", "mine", "--trust")
    other.close()
    assert (result.code, result.out) == (2, "")
    assert "mine is being written by another run" in result.error
    assert folder_content(Path("mine")) == before


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("name", ["nowhere", ".", "f.npz"])
def test_a_folder_that_is_no_run_cannot_be_resumed(command: Command, name: str) -> None:
    result = command("run", "--resume", name)
    assert (result.code, result.out) == (2, "")
    wrong = " is not a run folder" if Path(name).exists() else ": no such folder"
    assert f"{name}{wrong}" in result.error
    assert not Path("nowhere").exists()


@pytest.mark.usefixtures("nets")
def test_a_damaged_checkpoint_is_named(command: Command) -> None:
    command("run", "small.toml", "--out", "mine")
    for file in Path("mine/checkpoint").glob("save-round-*"):
        file.write_text("{")
    result = command("run", "--resume", "mine", "--trust")
    assert result.code == 2
    assert "save-round-3.json is damaged" in result.error
    assert "`fedspu check mine` says what can still be used" in result.error


# More rounds --------------------------------------------------------------------------


@pytest.mark.usefixtures("nets")
def test_a_finished_run_may_be_given_more_rounds(command: Command) -> None:
    command("run", "small.toml", "--rounds", "4", "--out", "whole")
    command("run", "small.toml", "--rounds", "2", "--out", "mine")
    result = command("run", "--resume", "mine", "--trust", "--rounds", "4", "--json")
    assert (result.code, json.loads(result.out)["rounds_played"]) == (0, 4)
    mine, whole = folder_content(Path("mine")), folder_content(Path("whole"))
    # The round that was the last one was judged as such.
    apart = {"rounds.jsonl", "checkpoint/clients.jsonl"}
    assert {n: c for n, c in mine.items() if n not in apart} == {
        n: c for n, c in whole.items() if n not in apart
    }
    assert "rounds = 4" in Path("mine/settings.toml").read_text()
    assert command("check", "mine").code == 0


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("number", ["2", "0", "-5", "many", "4.5"])
def test_a_run_cannot_be_given_fewer_rounds(command: Command, number: str) -> None:
    command("run", "small.toml", "--out", "mine")
    before = folder_content(Path("mine"))
    words = ("run", "--resume", "mine", "--trust", "--rounds", number)
    result = command(*words)
    assert (result.code, result.out) == (2, "")
    assert result.error == (
        f"--rounds {number}: expected a whole number, and no fewer than the run's 3"
    )
    assert folder_content(Path("mine")) == before


@pytest.mark.usefixtures("nets")
def test_more_rounds_may_be_asked_for_again(command: Command) -> None:
    """As after a kill between the two files that say how many there are."""
    command("run", "small.toml", "--rounds", "2", "--out", "mine")
    settings = Path("mine/settings.toml").read_text()
    Path("mine/settings.toml").write_text(settings.replace("rounds = 2", "rounds = 4"))
    result = command("run", "--resume", "mine", "--trust")
    assert result.code == 2
    assert "says rounds = 4, but the run began with 2; add --rounds 4" in result.error
    for _ in range(2):
        words = ("run", "--resume", "mine", "--trust", "--rounds", "4", "--json")
        assert json.loads(command(*words).out)["rounds_played"] == 4
    assert command("check", "mine").code == 0


# Code that a folder names -------------------------------------------------------------


def test_code_that_a_folder_names_is_imported_only_if_trusted(
    command: Command, nets: str
) -> None:
    command("run", "small.toml", "--out", "mine")
    before = folder_content(Path("mine"))
    sys.modules.pop(nets)
    result = command("run", "--resume", "mine")
    assert (result.code, result.out) == (2, "")
    assert result.error.startswith(f"mine names code of its own (model = '{nets}:")
    assert result.error.endswith("add --trust (in Python: trust=True)")
    with pytest.raises(SettingsError, match="names code of its own"):
        fedspu.load_personal("mine", 0)
    assert nets not in sys.modules
    assert folder_content(Path("mine")) == before
    assert command("run", "--resume", "mine", "--trust").code == 0
    assert nets in sys.modules


@pytest.mark.usefixtures("nets")
def test_trust_is_only_about_resuming(command: Command) -> None:
    result = command("run", "small.toml", "--trust", "--out", "mine")
    assert (result.code, result.error) == (
        2,
        "--trust: has no effect without --resume; leave it out",
    )
    assert not Path("mine").exists()
