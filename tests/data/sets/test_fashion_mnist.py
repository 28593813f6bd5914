from pathlib import Path

import numpy as np
import pytest
import torch

from fedspu import data
from fedspu.data.sets import fashion_mnist, mnist
from fedspu.errors import DataError
from tests.data import files as formats

TRAIN, TEST = [3, 0, 9], [1, 3]


def test_training_and_test_images_are_joined_in_order(tmp_path: Path) -> None:
    formats.write_mnist(tmp_path / "fashion-mnist", TRAIN, TEST)
    dataset = data.load("fashion-mnist", tmp_path)
    assert dataset.name == "fashion-mnist"
    assert dataset.y.tolist() == [3, 0, 9, 1, 3]
    assert dataset.num_outputs == 10
    assert dataset.x.dtype == torch.uint8
    assert np.array_equal(dataset.x[:, 0].numpy(), formats.images(5))


@pytest.mark.parametrize(
    "place", ["fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "."]
)
def test_the_files_are_found_where_they_may_lie(tmp_path: Path, place: str) -> None:
    files = formats.write_mnist(tmp_path / place, TRAIN, TEST)
    assert fashion_mnist.find(tmp_path) == files


def test_it_is_found_where_debian_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats.write_mnist(tmp_path / "debian", TRAIN, TEST)
    places = ("FashionMNIST/raw", str(tmp_path / "debian"))
    monkeypatch.setattr(fashion_mnist, "PLACES", places)
    dataset = data.load("fashion-mnist", tmp_path / "elsewhere")
    assert dataset.classes[int(dataset.y[2])] == "ankle boot"


def test_debians_place_is_searched_for_fashion_alone() -> None:
    assert fashion_mnist.DEBIAN in fashion_mnist.PLACES
    assert fashion_mnist.DEBIAN not in mnist.PLACES


def test_digits_are_not_taken_for_clothes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever is installed on this machine.
    places = tuple(set(fashion_mnist.PLACES) - {fashion_mnist.DEBIAN})
    monkeypatch.setattr(fashion_mnist, "PLACES", places)
    formats.write_mnist(tmp_path / "MNIST/raw", TRAIN, TEST)
    assert fashion_mnist.find(tmp_path) == []


def test_what_is_not_here_is_told_file_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fashion_mnist, "PLACES", ())
    with pytest.raises(DataError) as caught:
        data.load("fashion-mnist", tmp_path)
    message = str(caught.value)
    assert f"fedspu data fetch fashion-mnist --data-dir {tmp_path}`" in message
    assert "train-images-idx3-ubyte.gz (26,421,880 bytes, sha256:3aede38d" in message
    assert message.count("sha256:") == 4
    assert message.endswith(f"into {tmp_path}/fashion-mnist")
