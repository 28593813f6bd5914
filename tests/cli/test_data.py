"""The ``fedspu data`` commands as a user types them; bad input comes last."""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedspu.cli import data as data_commands
from fedspu.data import DATASETS
from fedspu.data.files import Download
from fedspu.data.sets import fashion_mnist, mnist
from tests.cli.commands import Command
from tests.data import files as formats
from tests.data.server import Site, serve

Data = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDSPU_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fashion_mnist, "PLACES", ())  # a Debian may have it
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def data(command: Command) -> Data:
    """Type a `fedspu data` command: its exit code, and what it printed."""

    def run(*words: object) -> tuple[int, str, str]:
        result = command("data", *words)
        return result.code, result.out, result.err

    return run


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server with four small files of MNIST, which the data set now comes from."""
    files = formats.write_mnist(tmp_path / "server", [3, 0, 9], [1, 3])
    contents = {file.name: file.read_bytes() for file in files}
    with serve(Site(contents)) as running:
        downloads = tuple(
            Download(
                f"{running.url}/{name}",
                len(content),
                f"sha256:{sha256(content).hexdigest()}",
            )
            for name, content in contents.items()
        )
        monkeypatch.setattr(mnist, "DOWNLOADS", downloads)
        yield running


def rows(text: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(text)}


# list --------------------------------------------------------------------------------


def test_the_list_names_every_data_set(data: Data) -> None:
    code, out, err = data("list")
    assert (code, err) == (0, "")
    for name in DATASETS:
        assert name in out
    assert "814,255" in out


def test_the_list_says_what_is_here_and_where(data: Data, tmp_path: Path) -> None:
    formats.write_mnist(tmp_path / "files/MNIST/raw", [0], [1])
    listed = rows(data("list", "--data-dir", "files", "--json")[1])
    assert listed["mnist"]["here"] is True
    assert listed["mnist"]["where"] == "files/MNIST/raw"
    assert listed["emnist"]["here"] is False
    assert listed["emnist"]["where"] == "files/emnist"
    assert listed["emnist"]["examples"] == 814_255
    assert listed["emnist"]["classes"] == 62
    assert listed["digits"]["where"] == "in fedspu itself"
    assert listed["arrays:FILE.npz"]["here"] is None


def test_a_part_of_the_files_is_not_here(data: Data, tmp_path: Path) -> None:
    formats.write_mnist(tmp_path / "data/mnist", [0], [1])[2].unlink()
    assert rows(data("list", "--json")[1])["mnist"]["here"] is False


# fetch -------------------------------------------------------------------------------


def test_what_is_fetched_can_be_checked(data: Data, site: Site, tmp_path: Path) -> None:
    code, out, err = data("fetch", "mnist")
    assert (code, err) == (0, "")
    assert f"{tmp_path}/data/mnist/train-images-idx3-ubyte.gz: sha256 verified" in out
    assert "Next: `fedspu data check mnist`" in out
    code, out, _ = data("check", "mnist", "--json")
    assert code == 0
    assert json.loads(out)["official"] == "yes: checksum verified"
    assert len(site.ranges) == 4


def test_a_cut_fetch_goes_on_with_the_same_data(data: Data, site: Site) -> None:
    site.cuts_after = 100
    code, _, err = data("fetch", "mnist", "--data-dir", "here")
    assert code == 2
    assert "interrupted after 100 of" in err
    assert "the same command resumes from there" in err
    site.cuts_after = None
    code, out, _ = data("fetch", "mnist", "--data-dir", "here")
    assert code == 0
    assert site.ranges[1] == "bytes=100-"
    assert "Next: `fedspu data check mnist --data-dir here`" in out


def test_a_second_fetch_gets_nothing(data: Data, site: Site) -> None:
    first = json.loads(data("fetch", "mnist", "--json")[1])
    again = json.loads(data("fetch", "mnist", "--json")[1])
    assert [file["fetched"] for file in first["files"]] == [True] * 4
    assert [file["fetched"] for file in again["files"]] == [False] * 4
    assert all(file["verified"] for file in again["files"])
    assert len(site.ranges) == 4


def test_what_lies_elsewhere_is_not_fetched(
    data: Data, site: Site, tmp_path: Path
) -> None:
    formats.write_mnist(tmp_path / "data/MNIST/raw", [0], [1])
    code, out, _ = data("fetch", "mnist")
    assert code == 0
    assert f"mnist is here already: {tmp_path}/data/MNIST/raw" in out
    assert site.ranges == []


def test_an_unknown_checksum_is_said(
    data: Data, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tuple(replace(download, checksum="") for download in mnist.DOWNLOADS)
    monkeypatch.setattr(mnist, "DOWNLOADS", bare)
    _, out, _ = data("fetch", "mnist")
    assert "ubyte.gz: size verified, no checksum is known" in out
    assert "not verified" in data("check", "mnist")[1]


def test_progress_is_shown_on_a_terminal_alone(
    data: Data, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data("fetch", "mnist")[2] == ""
    monkeypatch.setattr(
        data_commands,
        "Console",
        lambda **options: Console(**options, force_terminal=True, width=100),
    )
    _, _, err = data("fetch", "mnist", "--data-dir", "other")
    assert "train-images-idx3-ubyte.gz" in err
    assert data("fetch", "mnist", "--data-dir", "third", "--json")[2] == ""


# check -------------------------------------------------------------------------------


def test_a_check_reads_all_and_counts(data: Data, tmp_path: Path) -> None:
    formats.write_mnist(tmp_path / "data/mnist", [3, 0, 9], [1, 3])
    code, out, err = data("check", "mnist", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["examples"] == 5
    assert found["official_examples"] == 70_000
    assert found["shape"] == [1, 28, 28]
    assert found["kind"] == "uint8"
    assert found["examples_by_class"]["3"] == 2
    assert found["examples_by_class"]["8"] == 0
    pixels = formats.images(5) / 255
    assert found["mean"] == pytest.approx([pixels.mean()])
    assert found["deviation"] == pytest.approx([pixels.std()])
    assert found["sources"][0].endswith("data/mnist/train-images-idx3-ubyte.gz")
    assert found["official"].startswith("no: train-images-idx3-ubyte.gz has ")
    assert Path(found["cache"]).parent == tmp_path / "cache"


def test_a_check_is_shown_in_words(data: Data, tmp_path: Path) -> None:
    formats.write_mnist(tmp_path / "data/mnist", [3, 0, 9], [1, 3])
    code, out, _ = data("check", "mnist")
    assert code == 0
    assert "5 (official: 70,000)" in out
    assert "1 x 28 x 28, uint8" in out
    assert "a model takes   x / 255\n" in out
    assert f"{tmp_path}/cache/mnist-" in out


def test_each_channel_has_its_mean(data: Data) -> None:
    x = np.zeros((4, 2, 3, 3), dtype=np.float32)
    x[:, 1] = 7
    x[0, 1] = 3
    np.savez("mine.npz", x=x, y=np.array([0, 1, 0, 1]))
    found = json.loads(data("check", "arrays:mine.npz", "--json")[1])
    assert found["mean"] == pytest.approx([0, 6])
    assert found["deviation"] == pytest.approx([0, 3**0.5])
    assert found["cache"] is None


def test_what_ships_can_be_checked(data: Data) -> None:
    found = json.loads(data("check", "digits", "--json")[1])
    assert sum(found["examples_by_class"].values()) == found["examples"] == 1797


def test_tokens_have_no_mean(data: Data) -> None:
    np.savez("mine.npz", x=np.ones((4, 3), dtype=np.int64), y=np.array([0, 1, 0, 1]))
    code, out, _ = data("check", "arrays:mine.npz")
    assert code == 0
    assert "mean" not in out


# Mistakes: exit 2, and one clear line -------------------------------------------------


def write_bad_mnist(folder: Path) -> None:
    files = formats.write_mnist(folder / "bad/mnist", [3], [1])
    files[1].write_bytes(gzip.compress(formats.idx(np.array([77], dtype=np.uint8))))
    cut = formats.write_mnist(folder / "cut/mnist", [3], [1])
    cut[0].write_bytes(cut[0].read_bytes()[:50])
    formats.write_mnist(folder / "three/mnist", [3], [1])[3].unlink()
    (folder / "file").touch()
    (folder / "empty").mkdir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("check", "Missing argument 'NAME'"),
        ("check mnits", "expected one of .* (did you mean mnist?)"),
        ("check digits:file", "data.name = 'digits:file': expected digits"),
        ("check arrays", "data.name = 'arrays': expected arrays:FILE.npz"),
        ("check arrays:none.npz", "none.npz: No such file or directory"),
        ("check mnist --data-dir none", "--data-dir none: no such folder"),
        ("check mnist --data-dir file", "--data-dir file: is a file; expected the"),
        ("check mnist --data-dir empty", "its files are not in empty; get them with"),
        ("check mnist --data-dir bad", "the label 77; expected labels from 0 to 9"),
        ("check mnist --data-dir cut", "train-images-idx3-ubyte.gz: cannot be read ("),
        ("check mnist --data-dir three", "t10k-labels-idx1-ubyte.gz is missing"),
        ("fetch digits", "digits ships with fedspu; there is nothing to fetch"),
        ("fetch arrays:mine.npz", "is your own; there is nothing to fetch"),
        ("fetch cifar", "(did you mean cifar10?)"),
        ("fetch mnist --data-dir file", "cannot be written (Not a directory)"),
        ("list --data-dir none", "--data-dir none: no such folder"),
        ("list --wrong", "--wrong"),
        ("lst", "No such command 'lst'"),
    ],
)
def test_a_mistake_is_one_clear_line(
    data: Data, tmp_path: Path, words: str, message: str
) -> None:
    write_bad_mnist(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = data(*words.split())
    assert code == 2
    assert out == ""
    first, _, rest = message.partition(".* ")
    assert first in err.replace("\n", " ")
    assert rest in err
    if err.startswith("error: "):
        assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
