"""``fedspu export`` as a user types it; mistakes come last."""

import json
import re
from pathlib import Path

import pytest

import fedspu
from tests.cli.commands import Command, finished, in_process_of_its_own
from tests.oracles.federation import ConvNet, run_for

pytestmark = pytest.mark.usefixtures("nets")


@pytest.fixture
def mine(command: Command, nets: str) -> str:
    assert command("run", "small.toml", "--rounds", 4, "--out", "mine").code == 0
    return "mine"


def test_a_client_s_model_is_written_and_the_check_is_told(
    command: Command, mine: str
) -> None:
    result = command("export", mine, 0, "--trust")
    assert (result.code, result.err) == (0, "")
    first, second = result.out.splitlines()
    assert re.fullmatch(
        r"Checked on the client's \d+ test examples, in batches and alone: the same "
        r"bits; accuracy (.*) %, in PyTorch \1 %\.",
        first,
    )
    assert re.fullmatch(
        r"Written: mine-client-0\.safetensors \(.* kB; safetensors; takes batches of "
        r"any size of 1 x 4 x 4 float32\)\.",
        second,
    )
    fedspu.load_exported("mine-client-0.safetensors", trust=True)


def test_onnx_names_its_opset_and_prints_nothing_else(mine: str) -> None:
    given = ("--format", "onnx", "--out", "a.onnx")
    # In a process of its own: here, pytest keeps logs from being printed.
    result = finished(in_process_of_its_own("export", mine, "0", "--trust", *given))
    assert (result.code, result.err) == (0, "")
    assert len(result.out.splitlines()) == 2
    assert re.search(r"Written: a\.onnx \(.*; onnx, opset \d+; takes", result.out)
    assert Path("a.onnx").stat().st_size > 500


def test_json_is_all_that_is_printed(command: Command, mine: str) -> None:
    result = command("export", mine, 0, "--trust", "--json", "--out", "a")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert (found["file"], found["format"]) == ("a", "safetensors")
    assert found["checked"]["largest_difference"] == 0
    assert found["facts"]["task"] == "classification"
    assert found["num_bytes"] == Path("a").stat().st_size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mine", "expected a client's number after the run, .*`fedspu export mine 0`"),
        ("mine 99 --trust", "client = 99: expected 0 to 5"),
        (
            "mine 0",
            r"names code of its own \(model = .*, which would be run; .*--trust",
        ),
        ("mine 0 --trust --format onxx", r"--format onxx: .* \(did you mean onnx\?\)"),
        ("mine 0 --trust --out f.npz", "f.npz: exists already; .* --force"),
        ("mine 0 --trust --out no/a", "there is no folder no; make it first"),
        ("mine 0 --trust --out mine", "mine: is a folder"),
        ("mine 0 --trust --out a.onnx", r"\.onnx is the ending of --format onnx"),
        ("nowhere 0", "nowhere: no such folder"),
        ("f.npz 0", "f.npz is not a run folder"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(
    command: Command, mine: str, words: str, message: str
) -> None:
    before = sorted(Path().iterdir())
    result = command("export", *words.split())
    assert (result.code, result.out) == (2, "")
    assert re.search(message, result.error)
    assert sorted(Path().iterdir()) == before


def test_a_file_is_replaced_by_force(command: Command, mine: str) -> None:
    result = command("export", mine, 0, "--trust", "--out", "f.npz", "--force")
    assert result.code == 0
    fedspu.load_exported("f.npz", trust=True)


def test_a_client_is_a_number(command: Command, mine: str) -> None:
    result = command("export", mine, "zero")
    assert result.code == 2
    assert "'zero' is not a valid int" in result.err


def test_a_run_whose_data_was_given_in_python_is_exported_there(
    command: Command,
) -> None:
    run_for(ConvNet, out="python", rounds=1)
    result = command("export", "python", 1, "--format", "onnx")
    assert (result.code, result.out) == (2, "")
    assert "fedspu.export('python', 1, 'onnx', data=(x, y))" in result.error


def test_a_model_whose_data_is_gone_is_not_exported(
    command: Command, mine: str
) -> None:
    Path("f.npz").unlink()
    result = command("export", mine, 0, "--trust")
    assert (result.code, result.out) == (2, "")
    assert "f.npz" in result.error


@pytest.mark.filterwarnings("always:.*has not taken part")
def test_a_client_that_never_took_part_is_told(command: Command) -> None:
    assert command("run", "small.toml", "--rounds", 1, "--out", "mine").code == 0
    results = [command("export", "mine", c, "--trust") for c in range(6)]
    assert all(result.code == 0 for result in results)
    told = [r for r in results if re.search(r"warning: client \d has not", r.err)]
    assert len(told) == 3  # three of six play in a round
