from pathlib import Path

import numpy as np
import pytest

from fedspu import data
from fedspu.errors import DataError, SettingsError


def save(file: Path) -> None:
    np.savez(file, x=np.zeros((3, 2)), y=np.arange(3))


def test_the_digits_load_by_name() -> None:
    assert data.load("digits").name == "digits"


def test_a_relative_file_lies_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "mine.npz")
    monkeypatch.chdir(tmp_path)
    assert data.load("arrays:mine.npz").num_classes == 3


def test_a_relative_file_lies_in_the_folder_that_is_given(tmp_path: Path) -> None:
    save(tmp_path / "mine.npz")
    assert data.load("arrays:mine.npz", tmp_path).num_classes == 3


def test_an_absolute_file_is_found_whatever_the_folder(tmp_path: Path) -> None:
    save(tmp_path / "mine.npz")
    assert data.load(f"arrays:{tmp_path}/mine.npz", Path("/nowhere")).num_classes == 3


def test_a_file_in_the_home_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "mine.npz")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.load("arrays:~/mine.npz").num_classes == 3


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    with pytest.raises(
        SettingsError,
        match=r"data\.name = 'digit': expected one of arrays:FILE\.npz, cifar10, "
        r"digits, .*mnist.* \(did you mean digits\?\)$",
    ):
        data.load("digit")


def test_a_name_like_no_other_gets_the_list_alone() -> None:
    with pytest.raises(SettingsError) as caught:
        data.load("qqq")
    known = ", ".join(data.usage(name) for name in sorted(data.DATASETS))
    assert str(caught.value) == f"data.name = 'qqq': expected one of {known}"


def test_arrays_need_a_file() -> None:
    with pytest.raises(SettingsError, match=r"'arrays': expected arrays:FILE\.npz$"):
        data.load("arrays")


def test_digits_take_no_file() -> None:
    with pytest.raises(SettingsError, match=r"'digits:mine': expected digits$"):
        data.load("digits:mine")


def test_what_a_source_loads_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = data.load("digits")
    broken = data.Dataset("bad", digits.x[:5], digits.y, num_classes=10)
    source = data.Source("a broken one", lambda file, folder: broken)
    monkeypatch.setitem(data.DATASETS, "bad", source)
    with pytest.raises(DataError, match="bad: 5 examples in x but 1797 labels"):
        data.load("bad")
