import pytest
import torch

from fedspu.data.dataset import Dataset, check
from fedspu.errors import DataError


def test_sound_examples_pass() -> None:
    check(Dataset("mine", torch.zeros(3, 2), torch.tensor([0, 1, 1]), num_classes=2))


def test_tokens_pass() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    check(Dataset("mine", tokens, torch.tensor([0, 1]), num_classes=2))


def test_broken_examples_are_counted_and_the_first_is_named() -> None:
    x = torch.zeros(4, 1, 2, 2)
    x[1, 0, 0, 0] = float("nan")
    x[3, 0, 1, 1] = float("inf")
    x[3, 0, 1, 0] = float("-inf")
    dataset = Dataset("mine", x, torch.zeros(4, dtype=torch.int64), num_classes=1)
    with pytest.raises(DataError, match=r"^mine: 2 of 4 examples .* first is x\[1\]$"):
        check(dataset)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_outside_the_classes_is_refused(label: int) -> None:
    dataset = Dataset("mine", torch.zeros(2, 2), torch.tensor([0, label]), 3)
    with pytest.raises(
        DataError, match=rf"mine: 1 of 2 .* 0\.\.2; .* y\[1\] = {label}"
    ):
        check(dataset)


def test_the_largest_class_is_inside() -> None:
    check(Dataset("mine", torch.zeros(2, 2), torch.tensor([0, 2]), num_classes=3))


def test_lengths_that_differ_are_refused() -> None:
    dataset = Dataset("mine", torch.zeros(3, 2), torch.tensor([0, 0]), num_classes=1)
    with pytest.raises(DataError, match="mine: 3 examples in x but 2 labels in y"):
        check(dataset)


def test_an_empty_data_set_is_refused() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(DataError, match="mine: no examples"):
        check(Dataset("mine", torch.zeros(0, 2), empty, num_classes=1))
