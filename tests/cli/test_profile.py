"""``fedspu profile`` as a user types it; mistakes come last."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.commands import (
    Command,
)

QUICK = ("--repetitions", 1, "--p", "0.5,1")
"""For tests that do not look at times."""


def test_a_model_s_steps_are_measured(command: Command, nets: str) -> None:
    result = command("profile", f"{nets}:build", "--input", "1,4,4", *QUICK)
    assert (result.code, result.told) == (0, [])
    assert f"{nets}:build, batch of 16: median CPU time of 1 x" in result.out
    assert re.search(r"\n +dense .*\d", result.out)
    for saves in ("fast", "lean"):
        assert re.search(rf"\n +0\.5 +exact +{saves} .*%", result.out)
    assert "How gradients were computed" in result.out
    assert "fits" not in result.out


def test_a_profile_as_json_is_all_that_is_printed(command: Command, nets: str) -> None:
    given = ("--data", "arrays:f.npz", "--mode", "truncated,exact", "--saves", "lean")
    result = command("profile", f"{nets}:build", *given, *QUICK, "--json")
    assert (result.code, result.told) == (0, [])
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
    if "no p fits" in message:
        assert result.code == 1
        assert result.error.startswith("no p fits; allow more with --memory or")
    else:
        assert (result.code, result.told) == (0, [])
    assert re.search(f"exact fast: {message}", result.out)
    assert re.search(f"exact lean: {message}", result.out)


def test_a_profile_is_drawn(command: Command, nets: str) -> None:
    pytest.importorskip("matplotlib")
    given = ("--input", "16", *QUICK, "--plot", "costs[1].svg")
    result = command("profile", f"{nets}:build", *given)
    assert (result.code, result.told) == (0, [])
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
        ("--batch-size 0", "--batch-size 0: expected a whole number, at least 1"),
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
    assert len(result.told) == 1
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
