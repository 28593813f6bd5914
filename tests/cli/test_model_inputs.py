from pathlib import Path

import numpy as np
import pytest
import torch

from fedspu import map_neurons
from fedspu.cli.model_inputs import model_and_batch, model_and_example
from fedspu.errors import FedSPUError, ModelError, SettingsError
from tests.oracles.federation import examples


def test_the_example_comes_from_the_shape_the_data_or_the_model_itself() -> None:
    assert model_and_example("emnist", None, None)[1].shape == (2, 1, 28, 28)
    assert model_and_example("digits", None, "digits")[1].shape == (2, 1, 8, 8)
    assert model_and_example("cifar10", "3,64,64", None)[1].shape == (2, 3, 64, 64)


@pytest.mark.parametrize(
    "shape", ["", "3,", "3,x", "3.5", "-1", "1,-28,28", "9" * 13, "9" * 30]
)
def test_a_shape_that_is_none_is_refused(shape: str) -> None:
    with pytest.raises(SettingsError, match=r"--input .*expected sizes"):
        model_and_example("emnist", shape, None)


def test_a_shape_the_model_cannot_take_is_refused() -> None:
    with pytest.raises(FedSPUError):
        map_neurons(*model_and_example("emnist", "3,7,7", None))


def test_a_batch_of_a_data_set_has_its_labels_and_begins_again_at_the_end() -> None:
    _, x, y = model_and_batch("digits", None, "digits", 1800)
    assert x.shape == (1800, 1, 8, 8)
    assert torch.equal(x[1797:], x[:3])
    assert torch.equal(y[1797:], y[:3])


def test_a_random_batch_is_the_same_each_time() -> None:
    _, x, y = model_and_batch("emnist", None, None, 5)
    _, again, _ = model_and_batch("emnist", None, None, 5)
    assert x.shape == (5, 1, 28, 28)
    assert y.shape == (5,)
    assert torch.equal(x, again)


@pytest.mark.parametrize("size", [10**13, 10**30])
def test_a_batch_that_is_too_large_is_refused(size: int) -> None:
    with pytest.raises(SettingsError, match=f"--batch-size {size}: too many"):
        model_and_batch("emnist", None, None, size)


def test_labels_that_the_model_has_no_score_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = examples()
    np.savez(tmp_path / "six.npz", x=x, y=y + 3)
    (tmp_path / "small_nets.py").write_text(
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=r"scores for 3 classes.*go up to 5"):
        model_and_batch("small_nets:build", None, f"arrays:{tmp_path}/six.npz", 16)
