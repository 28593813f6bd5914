"""``fedspu data show`` as a user types it; bad input comes last."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedspu.prepare import prepare
from tests.cli.commands import Command

Show = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Show:
    """Type `fedspu data show` in a folder with a user's own data: code, out, err."""
    x, y = np.zeros((60, 2), dtype=np.float32), np.arange(60) % 3
    np.savez(tmp_path / "own.npz", x=x, y=y, client=np.repeat(["a", "b", "c"], 20))
    np.savez(tmp_path / "nobody.npz", x=x, y=y)
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        result = command("data", "show", *words)
        return result.code, result.out, result.err

    return run


def test_the_digits_are_drawn_as_a_run_would_divide_them(show: Show) -> None:
    code, out, err = show("digits")
    assert (code, err) == (0, "")
    assert out.startswith("digits: 1,797 examples of 10 classes, 30 clients; ")
    assert "dirichlet, alpha 0.5, seed 0" in out
    assert "Clients with one class: 0 of 30" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_shares_are_those_of_a_run(show: Show) -> None:
    words = "digits --alpha 0.1 --clients 12 --seed 3 --min-examples 20 --json"
    code, out, _ = show(*words.split())
    assert code == 0
    given = {"data.alpha": 0.1, "clients.number": 12, "seed": 3}
    splits = prepare({**given, "data.min_examples": 20}).examples.splits
    sizes = [len(s.train) + len(s.val) + len(s.test) for s in splits]
    found = json.loads(out)
    assert [row["examples"] for row in found["clients"]] == sizes
    assert found["data"]["alpha"] == 0.1
    assert found["seed"] == 3


def test_owners_in_one_s_own_file_divide_it(show: Show) -> None:
    words = ("arrays:own.npz", "--partition", "natural", "--clients", 3)
    code, out, _ = show(*words)
    assert code == 0
    assert "3 clients; natural, seed 0" in out
    _, out, _ = show(*words, "--json")
    assert [row["examples"] for row in json.loads(out)["clients"]] == [20, 20, 20]


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("--partition shards --shards 3", "shards, 3 each, seed 0"),
        ("--partition iid", "iid, seed 0"),
        ("--partition quantity --alpha 2", "quantity, alpha 2, seed 0"),
        ("--partition dirichlet-client", "dirichlet-client, alpha 0.5, seed 0"),
    ],
)
def test_every_partition_can_be_shown(show: Show, words: str, how: str) -> None:
    code, out, _ = show("digits", *words.split())
    assert code == 0
    assert f"30 clients; {how}\n" in out


def test_a_plot_is_written_beside(show: Show, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = show("digits", "--clients", 4, "--plot", "who.svg")
    assert code == 0
    assert "Plot: who.svg" in out
    drawn = (tmp_path / "who.svg").read_text()
    assert "digits: 1,797 examples of 10 classes, 4 clients" in drawn


def test_help_teaches_by_example(show: Show) -> None:
    code, out, _ = show("--help")
    assert code == 0
    assert "fedspu data show cifar10 --alpha 0.1" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("digit", "data.name = 'digit': expected one of"),
        ("arrays:none.npz", "none.npz: No such file"),
        ("digits --alpha 0", "data.alpha = 0.0: expected a number above 0"),
        ("digits --alpha nan", "data.alpha = nan: expected"),
        ("digits --clients 0", "clients.number = 0: expected a whole number, 1"),
        ("digits --clients 5000", "clients.number = 5000: expected a number from 1 to"),
        ("digits --clients 500", "clients.number = 500 with data.min_examples = 10"),
        ("digits --partition even", "data.partition = 'even': expected one of dir"),
        ("digits --partition shard", "(did you mean shards?)"),
        ("digits --partition natural", "'natural': the data set does not say who"),
        ("digits --partition shards --shards 0", "data.shards = 0: expected a whole"),
        ("digits --partition shards --shards 99", "data.shards = 99 makes 2970 shards"),
        ("digits --min-examples 0", "data.min_examples = 0: expected a whole"),
        ("digits --seed -1", "seed = -1: expected a whole number, 0 or more"),
        ("digits --plot who.jpg", "--plot who.jpg: expected a file that ends in"),
        ("digits --plot no/who.png", "--plot no/who.png: there is no folder no"),
        ("digits --data-dir none", "--data-dir none: no such folder"),
        ("arrays:own.npz --partition natural --clients 4", "expected at most 3"),
        ("arrays:nobody.npz --partition natural --clients 3", "add an array `client`"),
        ("arrays:own.npz --clients 61", "clients.number = 61: expected a number from"),
    ],
)
def test_a_mistake_is_one_clear_line(
    show: Show, tmp_path: Path, words: str, message: str
) -> None:
    code, out, err = show(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert {file.name for file in tmp_path.iterdir()} == {"own.npz", "nobody.npz"}


@pytest.mark.parametrize(
    ("words", "message"),
    [("digits --alpha much", "--alpha"), ("digits --clients 2.5", "--clients")],
)
def test_a_word_in_the_place_of_a_number(show: Show, words: str, message: str) -> None:
    code, _, err = show(*words.split())
    assert code == 2
    assert message in err
    assert "Traceback" not in err
