"""``fedspu neurons`` as a user types it; mistakes come last."""

import json
import re

import pytest

from tests.cli.commands import (
    Command,
)


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
        (["emnist", "--p", "0"], r"--p 0: .*\(0, 1\]"),
        (["emnist", "--p", "0.5,1.5"], r"--p 1\.5: .*\(0, 1\]"),
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


def test_a_shape_that_does_not_fit_says_what_was_tried(
    command: Command, nets: str
) -> None:
    error = command("neurons", f"{nets}:build", "--input", "3,32").error
    assert error.startswith("--input 3,32: two examples of this shape were tried: ")
    assert error.endswith("give a data set instead, like --data arrays:FILE.npz")
