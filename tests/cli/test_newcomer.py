"""What a newcomer stumbled over in a second trial: one test for each."""

import re
from pathlib import Path

import numpy as np
import pytest

from fedspu.cli.console import PLAIN
from fedspu.data import DATASETS
from tests.cli.commands import (
    Command,
    finished,
    in_process_of_its_own,
    interrupt_at_turn,
)
from tests.oracles.federation import examples

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.usefixtures("nets")
def test_a_default_number_of_rounds_is_said_at_the_start(command: Command) -> None:
    config = Path("small.toml").read_text().replace("rounds = 3\n", "")
    Path("no_rounds.toml").write_text(config)
    # It ends at once: the digits are no data for this model.
    said = command("run", "no_rounds.toml", "--data", "digits").err
    assert said.startswith("preparing: data, model\n20 rounds (the default); --rounds")
    given = command("run", "small.toml", "--out", "mine").err
    assert "the default" not in given
    both = command("compare", "no_rounds.toml", "--data", "digits").err
    assert both.startswith("20 rounds (the default); --rounds plays fewer or more\n")


def test_settings_name_the_defaults_of_data_sets(command: Command) -> None:
    said = " ".join(command("settings").out.split())
    assert (
        "digits: model = digits, clients.number = 30, data.alpha = 0.5, rounds" in said
    )
    for name, source in DATASETS.items():
        if source.defaults:
            assert f"{name}: " in said or f"{name}:FOLDER: " in said


def test_the_commands_for_an_own_model_in_the_readme_work(
    command: Command, nets: str
) -> None:
    text = README.read_text("utf-8").split("## Your own model and data")[1]
    shell = re.findall(r"```sh\n(.*?)```", text.split("\n## ")[0], re.S)
    lines = "\n".join(shell).replace("\\\n", " ").splitlines()
    commands = [line.split("#")[0].split() for line in lines if line]
    assert [words[1] for words in commands] == ["run", "compare", "report", "neurons"]
    Path("f.npz").rename("my.npz")
    Path("mynet.py").write_text(f"from {nets} import build\n")
    for words in commands:
        short = {"--rounds": "1", "--clients": "6", "--input": "1,4,4"}
        for name, value in short.items():
            if name in words:
                words[words.index(name) + 1] = value
        if words[1] in ("run", "compare"):
            words += ["--per-round", "2", "--set", "data.alpha=5", "--capacities", "1"]
        if words[1] == "compare":
            words += ["--seeds", "0"]
        result = command(*words[1:])
        assert result.code == 0, result.err
    assert Path("runs/both/report.html").exists()
    assert Path("runs/my-fedspu-seed-0/report.html").exists()


@pytest.mark.usefixtures("nets")
def test_a_run_s_table_says_what_its_numbers_are(command: Command) -> None:
    said = command("run", "small.toml", "--out", "mine").out
    assert "by the clock" in said
    assert "of CPU time" in said
    assert "paper's GB" not in said


@pytest.mark.usefixtures("nets")
def test_check_names_a_command_that_works_as_printed(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at_turn(patch, 4)
        command("run", "small.toml", "--out", "mine")
    said = command("check", "mine").out
    found = re.search(r"`fedspu (run --resume mine.*?)`", said)
    assert found
    assert command(*found[1].split()).code == 0


@pytest.mark.usefixtures("nets")
def test_a_run_folder_that_cannot_be_used_says_why(command: Command) -> None:
    error = command("run", "--resume", "runs/no").error
    assert error.startswith("runs/no: no such folder; there is no run folder in runs/")
    command("run", "small.toml", "--out", "mine")
    Path("mine/rounds.jsonl").rename("rounds.jsonl")
    assert "`fedspu check mine`" in command("run", "--resume", "mine").error
    Path("rounds.jsonl").rename("mine/rounds.jsonl")
    for file in Path("mine/checkpoint").iterdir():
        file.unlink()
    error = command("run", "--resume", "mine", "--trust").error
    assert "its checkpoint is empty" in error
    assert "before its first save" not in error


@pytest.mark.usefixtures("nets")
def test_a_comparison_is_not_a_run_and_runs_are_named(command: Command) -> None:
    words = ("--methods", "fedspu", "--seeds", "0", "--rounds", "1", "--out", "runs/a")
    assert command("compare", "small.toml", *words).code == 0
    (run,) = (one for one in Path("runs/a").iterdir() if one.is_dir())
    error = command("check", "runs/a").error
    assert (
        f"runs/a is a comparison, not a run; name one of its runs, like {run}" == error
    )
    assert command("report", "nothing").error.endswith("; there is runs/a")


def test_where_there_is_no_run_the_report_says_how_to_make_one(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "`fedspu run` makes one" in command("report", "nothing").error


@pytest.mark.usefixtures("nets")
def test_a_mistake_in_a_file_names_the_file(command: Command) -> None:
    Path("bad.toml").write_text(Path("small.toml").read_text().replace("= 3", "= 0", 1))
    assert command("run", "bad.toml").error.endswith("(in bad.toml)")
    assert "in bad.toml" not in command("run", "bad.toml", "--rounds", "-1").error
    assert "in small" not in command("run", "small.toml", "--lr", "-1").error


def test_a_table_is_answered_with_how_to_make_an_npz(command: Command) -> None:
    error = command("data", "check", "reg.csv").error
    assert ".csv files are not read" in error
    assert "np.savez('my.npz', x=x, y=y)" in error
    assert "arrays:my.npz" in error


@pytest.mark.usefixtures("nets")
def test_own_data_without_a_model_says_how_to_name_one(command: Command) -> None:
    error = command("run", "--data", "arrays:f.npz").error
    assert "--model package.module:build" in error


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("spoilt", "1.0.weight of the new model is not finite .* before any training"),
        ("net", "it is a Sequential itself; name the function that builds it"),
    ],
)
def test_a_model_that_cannot_be_right_is_refused_before_training(
    command: Command, nets: str, model: str, message: str
) -> None:
    Path(f"bad_{nets}.py").write_text(
        "from torch import nn\n\n\n"
        "def spoilt():\n"
        "    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))\n"
        "    nn.init.constant_(net[0].weight, float('nan'))\n"
        "    return nn.Sequential(nn.Flatten(), net)\n\n\n"
        "net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))\n"
    )
    error = command("run", "small.toml", "--model", f"bad_{nets}:{model}").error
    assert re.search(message, error)
    assert "train.lr" not in error


@pytest.mark.usefixtures("nets")
@pytest.mark.filterwarnings("default")
def test_only_methods_that_use_p_warn_of_a_small_one(command: Command) -> None:
    words = ("run", "small.toml", "--rounds", "1", "--capacities", "0.05,1")
    assert "less than one neuron" in command(*words, "--out", "a").err
    alone = command(*words, "--method", "local", "--out", "b")
    assert (alone.code, "less than one neuron" in alone.err) == (0, False)


@pytest.mark.usefixtures("nets")
@pytest.mark.filterwarnings("default")
def test_a_single_class_is_warned_of_before_training(command: Command) -> None:
    x, _ = examples()
    np.savez("one.npz", x=x, y=np.zeros(len(x), dtype=np.int64))
    said = command("run", "small.toml", "--data", "arrays:one.npz", "--rounds", "1").err
    assert said.index("all examples have the same class") < said.index("round 1/1")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.usefixtures("nets")
def test_a_full_disk_behind_the_output_says_where_the_results_are() -> None:
    with open("/dev/full", "w") as full:
        words = ("run", "small.toml", "--rounds", "1", "--out", "mine")
        result = finished(in_process_of_its_own(*words, stdout=full))
    assert result.code == 2
    assert result.error.endswith("No space left on device; the results are in mine")


@pytest.mark.usefixtures("nets")
def test_classes_are_shown_by_their_names(command: Command) -> None:
    x, y = examples()
    np.savez("names.npz", x=x, y=np.array(["grasshopper", "bee", "cat"])[y])
    said = command("data", "show", "arrays:names.npz", "--clients", "4").out
    assert re.search(r"client +bee +cat +grasshopper +examples", said)


def test_bytes_that_are_only_divided_are_said_so(
    command: Command, tmp_path: Path
) -> None:
    pixels = np.zeros((6, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "pixels.npz", x=pixels, y=np.array([0, 1] * 3))
    said = command("data", "check", f"arrays:{tmp_path}/pixels.npz").out
    assert re.search(r"a model takes +x / 255$", said, re.M)


def test_names_of_tensors_are_never_cut(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = command("neurons", "mobilenet", "--input", "3,32,32").out
    assert "…" not in said
    assert max(map(len, said.split("permutable: ")[0].splitlines())) <= 80


def test_plain_letters_replace_those_that_an_encoding_lacks() -> None:
    assert "3.1 ± 0.2 ≈ 4 …".encode("ascii", PLAIN) == b"3.1 +/- 0.2 ~ 4 ..."
    assert "x ± ∮".encode("latin-1", PLAIN) == b"x \xb1 ?"
