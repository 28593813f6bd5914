from pathlib import Path

import pytest

from fedspu.data import DATASETS
from fedspu.data.files import Download, data_folder, not_here, places

FILE = Download("https://example.org/a/b.zip", 1234, "sha256:00ff")


def test_a_download_is_named_by_the_end_of_its_address() -> None:
    assert FILE.name == "b.zip"
    assert str(FILE) == "b.zip (1,234 bytes, sha256:00ff)"


def test_an_unknown_checksum_is_called_so() -> None:
    assert str(Download("https://x/y", 5)) == "y (5 bytes, checksum not known)"


def test_the_data_folder_is_the_users_unless_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FEDSPU_DATA")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    assert data_folder() == Path("/home/ada/.local/share/fedspu")
    monkeypatch.setenv("XDG_DATA_HOME", "/all")
    assert data_folder() == Path("/all/fedspu")
    monkeypatch.setenv("FEDSPU_DATA", "~/data")
    assert data_folder() == Path("/home/ada/data")
    assert data_folder(Path("~/here")) == Path("/home/ada/here")


def test_places_go_from_the_likeliest_to_the_folder_itself(tmp_path: Path) -> None:
    found = list(places("n", tmp_path, ["N/raw", "/usr/share/n"]))
    assert found == [
        tmp_path / "n",
        tmp_path / "N/raw",
        Path("/usr/share/n"),
        tmp_path,
    ]


def test_the_common_data_folder_itself_is_no_place(own_folders: Path) -> None:
    assert list(places("n", None)) == [own_folders / "data/n"]


def test_what_is_missing_is_told_with_file_folder_size_and_checksum(
    tmp_path: Path,
) -> None:
    assert str(not_here("n", tmp_path, [FILE])) == (
        f"n: its files are not in {tmp_path}; get them with `fedspu data fetch n "
        f"--data-dir {tmp_path}`, or put b.zip (1,234 bytes, sha256:00ff) into "
        f"{tmp_path}/n"
    )


@pytest.mark.parametrize("name", DATASETS)
def test_every_checksum_is_a_whole_one(name: str) -> None:
    digits = {"sha256": 64, "md5": 32}
    for download in DATASETS[name].downloads:
        kind, _, value = download.checksum.partition(":")
        assert len(value) == digits[kind]
        assert set(value) <= set("0123456789abcdef")
        assert download.size > 1000
