"""``fedspu device`` as a user types it; mistakes come last."""

import json
import re

import pytest

from tests.cli.commands import Command

pytestmark = pytest.mark.usefixtures("nets")


def test_a_capacity_is_proposed_from_the_settings_of_a_run(command: Command) -> None:
    result = command("device", "small.toml")
    assert (result.code, result.told) == (0, [])
    # 70 % of all 120 examples, in batches of 8: 11, the last of 4.
    assert re.match(
        r"nets_\d+:build on 8\d training examples: 1 epochs in batches of 8, 11 steps",
        result.out,
    )
    assert re.search(r"\n +1 .* yes  <- proposed", result.out)
    assert "a quarter of the RAM that is free now" in result.out
    assert "Time of a turn: no limit; --round-seconds sets one." in result.out
    assert result.out.endswith("capacity = 1\n")


def test_memory_limits_it_and_the_words_say_so(command: Command) -> None:
    rows = json.loads(command("device", "small.toml", "--json").out)["rows"]
    by_share = {row["p"]: row["num_bytes"] for row in rows}
    limit = f"{(by_share[0.4] + by_share[0.6]) // 2}B"
    words = ("--memory", limit, "--p", "0.4,0.6,1")
    result = command("device", "small.toml", *words)
    assert result.code == 0
    assert "p = 0.6 is too much: a step needs" in result.out
    assert result.out.endswith("capacity = 0.4\n")
    found = json.loads(command("device", "small.toml", *words, "--json").out)
    assert found["capacity"] == 0.4
    assert [row["limited_by"] for row in found["rows"]] == [[], ["memory"], ["memory"]]
    assert found["process_bytes"] > 10**7


@pytest.mark.parametrize("words", ["--memory 1B", "--round-seconds 1us"])
def test_a_device_that_is_too_weak_for_any_share_is_told_so(
    command: Command, words: str
) -> None:
    result = command("device", "small.toml", *words.split())
    assert result.code == 2
    assert "No p fits, not even 0.05" in result.out
    assert "capacity =" not in result.out
    assert "no p fits this device; give it more" in result.error
    result = command("device", "small.toml", *words.split(), "--json")
    assert (result.code, json.loads(result.out)["capacity"]) == (2, None)


def test_a_client_s_share_of_the_data_can_be_taken(command: Command) -> None:
    whole, part = (
        json.loads(command("device", "small.toml", *words, "--p", 1, "--json").out)
        for words in ((), ("--client", 2))
    )
    assert part["examples"] < whole["examples"] / 2


def test_a_client_s_share_is_one_of_as_many_as_given(command: Command) -> None:
    words = ("--client", 1, "--p", 1, "--json")
    few, many = (
        json.loads(command("device", "small.toml", *words, "--clients", n).out)
        for n in (2, 6)
    )
    assert few["examples"] > many["examples"]


def test_kernels_are_those_of_the_settings(command: Command) -> None:
    words = ("--kernels", "torch", "--p", 1)
    assert "run by PyTorch." in command("device", "small.toml", *words).out


def test_another_method_is_named(command: Command) -> None:
    result = command("device", "small.toml", "--method", "hermes", "--p", 1)
    assert "Measured as fedspu trains; hermes may need more or less" in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--memory 64", "--memory 64: expected a size with its unit"),
        ("--memory lots", "--memory lots: expected a size"),
        ("--round-seconds 0", "--round-seconds 0: expected a time above 0"),
        ("--round-seconds soon", "--round-seconds soon: expected a time"),
        ("--p 0", r"--p 0: expected numbers in \(0, 1\]"),
        ("--p 0.5,2", r"--p 2: expected numbers in \(0, 1\]"),
        ("--p half", "--p half: expected numbers"),
        ("--set device=auto", "device = 'auto': fedspu device measures training on"),
        ("--clients 3", "--clients 3: has no effect, .* add --client NUMBER"),
        ("--alpha 1", "--alpha 1: has no effect, .* add --client NUMBER"),
        ("--client 6", "client = 6: expected 0 to 5"),
        ("--client -1", "client = -1: expected 0 to 5"),
        ("--data arrays:missing.npz", "missing.npz: No such file"),
        ("--data digitz", "did you mean digits"),
        ("--set train.lrr=1", "train.lrr: no such setting"),
        ("--batch-size 0", "train.batch_size = 0: expected a whole number"),
        ("--epochs many", "train.epochs = 'many': expected a whole number"),
        ("--model nets_none:build", "no module named nets_none"),
        ("--task segmentation", "expected a class number for each pixel"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    command: Command, words: str, message: str
) -> None:
    result = command("device", "small.toml", *words.split())
    assert (result.code, result.out) == (2, "")
    assert re.search(message, result.error)
