"""From the command line and a file to settings."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from fedspu.cli.flags import FLAGS, with_whole_paths
from fedspu.engines.local import LocalEngine
from fedspu.settings_text import read_toml
from tests.cli.commands import Command


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


def test_every_flag_stands_for_its_setting(
    command: Command, nets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedspu.engines.choose._ray_engine", LocalEngine)
    flags: dict[str, tuple[str, Any]] = {
        "--task": ("task", "classification"),
        "--model": ("model", f"{nets}:narrower"),
        "--workers": ("workers", 2),
        "--engine": ("engine", "ray"),
        "--ray-address": ("ray_address", "auto"),
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
        "--kernels": ("train.kernels", "torch"),
        "--seed": ("seed", 4),
        "--device": ("device", "cpu"),
        "--out": ("out", "mine"),
    }
    words = [word for flag, (_, value) in flags.items() for word in (flag, value)]
    words += ["--capacities", "0.5,1", "--early-stopping"]
    flags["--capacities"] = ("clients.capacities", [0.5, 1.0])
    flags["--early-stopping"] = ("early_stopping.on", True)
    assert {flag: name for flag, (name, _) in FLAGS.items()} == {
        flag: name for flag, (name, _) in flags.items()
    }
    assert command("run", "small.toml", *words).code == 0
    used = read_toml(Path("mine/settings.toml"))
    for name, value in flags.values():
        found: Any = used
        for part in name.split("."):
            found = found[part]
        whole = {"arrays:f.npz": f"arrays:{Path('f.npz').absolute()}", ".": os.getcwd()}
        assert found == whole.get(str(value), value)


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ({"model": "hf:net"}, {"model": "hf:/there/net"}),
        ({"model": "hf:/net"}, {"model": "hf:/net"}),
        ({"model": "nets:build"}, {"model": "nets:build"}),
        ({"data.name": "hf:texts"}, {"data.name": "hf:/there/texts"}),
        ({"data.name": "mine:load"}, {"data.name": "mine:load"}),
        ({"data.dir": "../d"}, {"data.dir": "/d"}),
    ],
)
def test_paths_become_whole_and_names_of_code_stay(
    given: dict[str, Any], whole: dict[str, Any]
) -> None:
    assert with_whole_paths(given, Path("/there")) == whole


@pytest.mark.usefixtures("nets")
def test_a_flag_can_take_back_what_the_file_says(command: Command) -> None:
    Path("on.toml").write_text(
        Path("small.toml").read_text() + "[early_stopping]\non = true\n"
    )
    words = ("--no-early-stopping", "--rounds", 1, "--out", "mine")
    assert command("run", "on.toml", *words).code == 0
    assert read_toml(Path("mine/settings.toml"))["early_stopping"]["on"] is False


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("name", ["3", "1.5", "2026-05-01", "true", "[1]"])
def test_a_folder_may_have_a_name_that_looks_like_a_value(
    command: Command, name: str
) -> None:
    result = command("run", "small.toml", "--rounds", 1, "--out", name)
    assert (result.code, result.out.count("Results and models")) == (0, 1)
    assert Path(name, "summary.json").exists()


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"none\.toml: no such configuration file"),
        ("rounds = \n", r"none\.toml: not valid TOML"),
        ("[train]\nlrr = 3\n", r"train\.lrr: no such setting"),
        ("train = 3\n", "train: no such setting"),
        ("rounds = 'many'\n", "rounds = 'many'"),
        ("[method]\nname = 'fedspu'\nfinetune = 1\n", r"method\.finetune = 1: fedspu"),
        ("\xff", r"none\.toml: "),
    ],
)
def test_a_configuration_that_cannot_be_used(
    command: Command, content: str | None, message: str
) -> None:
    if content is not None:
        Path("none.toml").write_bytes(content.encode("latin-1"))
    result = command("run", "none.toml", "--out", "mine")
    assert (result.code, result.out) == (2, "")
    assert len(result.told) == 1
    assert re.search(message, result.error)
    assert not Path("mine").exists()


@pytest.mark.usefixtures("nets")
def test_a_model_is_asked_for_where_none_is_suggested(command: Command) -> None:
    result = command("run", "--data", "arrays:f.npz", "--out", "mine")
    assert result.code == 2
    assert re.search("^model: not given.*--model", result.error)
