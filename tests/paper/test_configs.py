"""The files in configs/: one for each experiment of the paper, with its numbers."""

from itertools import product
from pathlib import Path

import pytest

from fedspu.models import MODELS
from fedspu.resolve import resolve
from fedspu.settings import Settings
from fedspu.settings_text import flatten, read_toml

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
ALPHAS = (0.1, 0.5, 1.0)
STEPS = {"emnist": (2e-4, 16), "cifar10": (0.1, 128), "speech": (5e-4, 16)}


def settings_of(file: Path) -> Settings:
    return resolve(read_toml(file))


def test_there_is_one_file_for_each_experiment() -> None:
    found = [settings_of(file) for file in FILES]
    cells = [(s.data.name, s.data.alpha, s.early_stopping.on) for s in found]
    assert sorted(cells) == sorted(product(STEPS, ALPHAS, (False, True)))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.stem))
def test_a_file_has_the_paper_s_numbers(file: Path) -> None:
    settings = settings_of(file)
    name = settings.data.name
    assert (settings.train.lr, settings.train.batch_size) == STEPS[name]
    assert settings.model == name
    assert name in MODELS
    # They stand in the file, and are not only what the data set suggests.
    written = dict(flatten(read_toml(file)))
    assert {"model", "data.name", "train.lr", "train.batch_size"} <= set(written)
    # All the rest is as by default, which is the paper's.
    own = {"model", "data.name", "data.alpha", "early_stopping.on"}
    own |= {"train.lr", "train.batch_size"}
    values = settings.model_dump()
    given = {key: _value(values, key) for key in own}
    assert resolve(given) == settings


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.stem))
def test_a_file_is_called_what_it_is(file: Path) -> None:
    settings = settings_of(file)
    name = f"{settings.data.name}-alpha-{settings.data.alpha}"
    assert file.stem == name + "-early-stopping" * settings.early_stopping.on
    assert f"fedspu compare configs/{file.name} " in file.read_text()


def _value(values: dict[str, object], key: str) -> object:
    found: object = values
    for part in key.split("."):
        assert isinstance(found, dict)
        found = found[part]
    return found
