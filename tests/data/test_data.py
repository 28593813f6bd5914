import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedspu import data
from fedspu.data.dataset import Dataset
from fedspu.errors import DataError, SettingsError
from fedspu.tasks import find_task


def save(file: Path) -> None:
    np.savez(file, x=np.zeros((3, 2)), y=np.arange(3))


def test_the_digits_load_by_name() -> None:
    assert data.load("digits").name == "digits"


def test_a_relative_file_lies_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "mine.npz")
    monkeypatch.chdir(tmp_path)
    assert data.load("arrays:mine.npz").num_outputs == 3


def test_a_relative_file_lies_in_the_folder_that_is_given(tmp_path: Path) -> None:
    save(tmp_path / "mine.npz")
    assert data.load("arrays:mine.npz", tmp_path).num_outputs == 3


def test_an_absolute_file_is_found_whatever_the_folder(tmp_path: Path) -> None:
    save(tmp_path / "mine.npz")
    assert data.load(f"arrays:{tmp_path}/mine.npz", Path("/nowhere")).num_outputs == 3


def test_a_file_in_the_home_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "mine.npz")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.load("arrays:~/mine.npz").num_outputs == 3


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
    wanted = f"data.name = 'qqq': expected one of {known}, package.module:load"
    assert str(caught.value) == wanted


def test_arrays_need_a_file() -> None:
    with pytest.raises(SettingsError, match=r"'arrays': expected arrays:FILE\.npz$"):
        data.load("arrays")


def test_digits_take_no_file() -> None:
    with pytest.raises(SettingsError, match=r"'digits:mine': expected digits$"):
        data.load("digits:mine")


def test_what_a_source_loads_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = data.load("digits")
    module = ModuleType("fedspu.data.sets.bad")
    broken = Dataset("bad", digits.x[:5], digits.y, num_outputs=10)
    monkeypatch.setattr(module, "load", lambda folder: broken, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(data.DATASETS, "bad", data.Source("a broken one", "sets.bad"))
    with pytest.raises(DataError, match="bad: 5 examples in x but 1797 targets"):
        data.load("bad")


def test_data_is_loaded_for_a_task(tmp_path: Path) -> None:
    save(tmp_path / "mine.npz")
    numbers = data.load("arrays:mine.npz", tmp_path, find_task("regression"))
    assert numbers.y.is_floating_point()
    with pytest.raises(DataError, match=r"mine\.npz: .* expected token numbers"):
        data.load("arrays:mine.npz", tmp_path, find_task("language-model"))


# The catalogue ------------------------------------------------------------------------


@pytest.mark.parametrize("name", data.DATASETS)
def test_a_data_set_names_the_function_that_reads_it(name: str) -> None:
    source = data.DATASETS[name]
    function = source.place.partition(":")[2] or "load"
    assert callable(getattr(source.module, function))


@pytest.mark.parametrize("name", data.DATASETS)
def test_published_files_can_be_found_and_fetched_and_others_not(name: str) -> None:
    source = data.DATASETS[name]
    is_published = name not in (
        "digits",
        *(n for n, s in data.DATASETS.items() if s.file),
    )
    assert (source.find(Path("/nowhere")) is not None) == is_published
    assert (len(source.downloads) > 0) == is_published


@pytest.mark.parametrize("name", data.DATASETS)
def test_only_a_user_s_own_data_has_a_file_behind_its_name(name: str) -> None:
    source = data.DATASETS[name]
    assert bool(source.file) == (source.num_examples is None)
    assert bool(source.file) == (source.num_classes is None)
    assert data.usage(name) == (f"{name}:{source.file}" if source.file else name)


def test_the_digits_have_the_numbers_of_the_catalogue() -> None:
    source, digits = data.DATASETS["digits"], data.load("digits")
    assert len(digits.y) == source.num_examples
    assert digits.num_outputs == source.num_classes


# A function of the user's own ---------------------------------------------------------

LOADERS = """
import numpy as np

def load():
    return np.zeros((5, 3), np.float32), np.arange(5)

def tokens():
    return (np.ones((5, 3), np.int64),)

def wrong():
    return 3

def fails():
    raise ValueError("no disk")
"""


@pytest.fixture
def loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loaders.py").write_text(LOADERS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("loaders")
def test_data_comes_from_a_function() -> None:
    found = data.load("own_loaders:load")
    assert (found.name, len(found.y), found.num_outputs) == ("own_loaders:load", 5, 5)


@pytest.mark.usefixtures("loaders")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_loaders:wrong", "it returned a int; expected a tuple"),
        ("own_loaders:fails", r"it raised ValueError: no disk"),
        ("own_loaders:lod", r"has no lod \(did you mean load\?\)"),
        ("no_such_module:load", "no module named no_such_module"),
        ("own_loaders:tokens", "has no targets"),
    ],
)
def test_a_function_that_gives_no_data_is_refused(name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        data.load(name)
