import torch

from fedspu.data.sets import digits


def test_every_digit_is_there() -> None:
    counts = digits.load().y.bincount().tolist()
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_all_ink_is_there() -> None:
    # Sums over the images of each digit, from scikit-learn's own copy.
    dataset = digits.load()
    ink = [int((dataset.x[dataset.y == digit] * 16).sum()) for digit in range(10)]
    assert ink == [
        56415, 57007, 55566, 56151, 56239, 55915, 56336, 54289, 57408, 56392,
    ]  # fmt: skip


def test_the_first_image_is_the_well_known_zero() -> None:
    dataset = digits.load()
    rows = (dataset.x[0, 0] * 16).int().tolist()
    assert rows[:3] == [
        [0, 0, 5, 13, 9, 1, 0, 0],
        [0, 0, 13, 15, 10, 15, 5, 0],
        [0, 3, 15, 2, 0, 11, 8, 0],
    ]
    assert dataset.y[:10].tolist() == list(range(10))


def test_images_are_ready_for_a_model() -> None:
    dataset = digits.load()
    assert dataset.x.shape == (1797, 1, 8, 8)
    assert (dataset.x.dtype, dataset.y.dtype) == (torch.float32, torch.int64)
    assert (float(dataset.x.min()), float(dataset.x.max())) == (0.0, 1.0)
