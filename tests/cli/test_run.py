"""``fedspu run`` as a user types it; --resume and mistakes have files of their own."""

import json
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from fedspu.federation.storage.saved_run import SavedRun
from tests.cli.commands import (
    Command,
    finished,
    in_process_of_its_own,
)
from tests.oracles.federation import folder_content


def test_a_user_s_own_model_and_data_run_with_no_code_written_here(
    command: Command, nets: str
) -> None:
    flags = "--data arrays:f.npz --clients 6 --per-round 3 --rounds 2 --lr 0.1"
    result = command("run", "--model", f"{nets}:build", *flags.split(), "--out", "mine")
    assert result.code == 0
    assert "personal accuracy" in result.out
    assert "mine" in result.out
    assert json.loads(Path("mine/summary.json").read_text())["rounds_played"] == 2
    assert [line.split()[1] for line in result.told] == ["1/2", "2/2"]


@pytest.mark.usefixtures("nets")
def test_with_json_nothing_else_is_printed(command: Command) -> None:
    result = command("run", "small.toml", "--out", "mine", "--json")
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out) == json.loads(Path("mine/summary.json").read_text())


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
    assert re.fullmatch(
        r"preparing: data, model\n(round \d/3  personal [^\n]*\n){3}", result.err
    )
    for text in (result.out, result.err):
        assert "\x1b" not in text
        assert "\r" not in text
        assert "━" not in text


# Where it ends early -----------------------------------------------------------------


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
        assert SavedRun(Path("mine")).checkpoint().federation.round > 0
        assert "NaN" not in Path("mine/clients.jsonl").read_text()


@pytest.mark.usefixtures("nets")
def test_a_folder_in_use_is_left_alone(command: Command) -> None:
    command("run", "small.toml", "--out", "mine")
    before = folder_content(Path("mine"))
    result = command("run", "small.toml", "--seed", 4, "--out", "mine")
    assert result.code == 2
    assert "mine is in use already" in result.error
    assert folder_content(Path("mine")) == before


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[[], None]]:
    """A limit for the files that a process writes."""
    # Python keeps a compiled module even if it was cut short, and then fails on it.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def limit(size: int) -> Callable[[], None]:
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def test_a_disk_that_is_full_from_the_beginning(
    nets: str, limited: Callable[[int], Callable[[], None]]
) -> None:
    process = in_process_of_its_own(
        *("run", "small.toml", "--out", "mine"), preexec_fn=limited(600)
    )
    result = finished(process)
    assert (result.code, result.out) == (2, "")
    assert "mine: cannot write" in result.error
    assert not Path("mine").exists()


def test_a_disk_that_fills_up_on_the_way_loses_nothing(
    command: Command, nets: str, limited: Callable[[int], Callable[[], None]]
) -> None:
    words = ("run", "small.toml", "--rounds", "9")
    # No model is larger; the clients' record is after some rounds.
    process = in_process_of_its_own(*words, "--out", "mine", preexec_fn=limited(3000))
    result = finished(process)
    assert (result.code, result.out) == (2, "")
    saved = int(re.findall(r"rounds up to (\d) are saved", result.error)[0])
    assert 0 < saved < 9
    assert SavedRun(Path("mine")).checkpoint().federation.round == saved
    assert command("run", "--resume", "mine", "--trust").code == 0
    command(*words, "--out", "whole")
    assert folder_content(Path("mine")) == folder_content(Path("whole"))


@pytest.mark.usefixtures("nets")
def test_a_tracker_that_is_not_installed_ends_the_run_before_it_begins(
    command: Command, monkeypatch: pytest.MonkeyPatch, played: list[int]
) -> None:
    monkeypatch.setattr("fedspu.reports.trackers.find_spec", lambda name: None)
    result = command("run", "small.toml", "--out", "mine", "--log", "mlflow")
    assert result.code == 2
    assert "--log mlflow: mlflow is not installed; install it with" in result.error
    assert played == []
    assert not Path("mine").exists()


@pytest.mark.usefixtures("nets")
def test_what_to_do_next_fits_a_method_that_brings_its_own_settings(
    command: Command,
) -> None:
    """Its settings.toml with another method would be another experiment."""
    said = command("run", "small.toml", "--method", "fedspu-plus", "--out", "mine").out
    assert "fedspu compare --methods fedspu-plus,fedspu`, with the same flags" in said
    assert "last models" in said
