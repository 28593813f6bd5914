import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from fedspu import data
from fedspu.data.sets import mnist
from fedspu.errors import DataError
from tests.data import files as formats

TRAIN, TEST = [3, 0, 9], [1, 3]


def test_training_and_test_images_are_joined_in_order(tmp_path: Path) -> None:
    formats.write_mnist(tmp_path / "mnist", TRAIN, TEST)
    dataset = data.load("mnist", tmp_path)
    assert dataset.y.tolist() == [3, 0, 9, 1, 3]
    assert dataset.x.dtype == torch.uint8
    assert np.array_equal(dataset.x[:, 0].numpy(), formats.images(5))


def test_pixels_are_from_0_to_1_as_they_are_taken(tmp_path: Path) -> None:
    formats.write_mnist(tmp_path / "mnist", TRAIN, TEST)
    x, _ = data.load("mnist", tmp_path).take(slice(1))
    torch.testing.assert_close(x[0, 0, 0, :3], torch.tensor([0.0, 1 / 255, 2 / 255]))


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "MNIST", "."])
def test_the_files_are_found_where_they_may_lie(tmp_path: Path, place: str) -> None:
    files = formats.write_mnist(tmp_path / place, TRAIN, TEST)
    assert mnist.find(tmp_path) == files


def test_unpacked_files_give_the_same(tmp_path: Path) -> None:
    for file in formats.write_mnist(tmp_path / "mnist", TRAIN, TEST):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    assert data.load("mnist", tmp_path).y.tolist() == [3, 0, 9, 1, 3]


def test_without_a_folder_the_data_folder_is_searched(own_folders: Path) -> None:
    formats.write_mnist(own_folders / "data/mnist", TRAIN, TEST)
    assert len(data.load("mnist").y) == 5


def test_a_digit_is_called_what_it_is(tmp_path: Path) -> None:
    formats.write_mnist(tmp_path / "mnist", TRAIN, TEST)
    dataset = data.load("mnist", tmp_path)
    assert [dataset.classes[y] for y in dataset.y] == ["3", "0", "9", "1", "3"]
    assert dataset.num_outputs == 10


def test_clothes_are_not_taken_for_digits(tmp_path: Path) -> None:
    formats.write_mnist(tmp_path / "FashionMNIST/raw", TRAIN, TEST)
    assert mnist.find(tmp_path) == []


def test_what_is_not_here_is_told_file_by_file(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        data.load("mnist", tmp_path)
    message = str(caught.value)
    assert f"fedspu data fetch mnist --data-dir {tmp_path}`" in message
    assert "train-images-idx3-ubyte.gz (9,912,422 bytes, sha256:440fcabf" in message
    assert message.count("sha256:") == 4
    assert message.endswith(f"into {tmp_path}/mnist")


@pytest.mark.parametrize(
    ("which", "array", "says"),
    [
        (1, np.array([3, 0], dtype=np.uint8), "2 labels; expected 3, one for each"),
        (1, np.array([3, 0, 10], dtype=np.uint8), "the label 10; expected labels from"),
        (2, np.zeros((2, 27, 28), dtype=np.uint8), "27 x 28; expected 28 x 28"),
        (3, np.zeros(0, dtype=np.uint8), "0 numbers; expected at least one example"),
    ],
)
def test_files_that_do_not_fit_give_an_error_and_no_cache(
    tmp_path: Path,
    own_folders: Path,
    which: int,
    array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    says: str,
) -> None:
    files = formats.write_mnist(tmp_path / "mnist", TRAIN, TEST)
    files[which].write_bytes(gzip.compress(formats.idx(array)))
    with pytest.raises(DataError, match=says) as caught:
        data.load("mnist", tmp_path)
    assert str(caught.value).startswith(str(files[which]))
    assert not (own_folders / "cache").exists()
