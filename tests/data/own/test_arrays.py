import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspu import data
from fedspu.data.dataset import NO_TARGETS, with_targets
from fedspu.data.own.arrays import from_arrays, load
from fedspu.errors import DataError
from fedspu.tasks import find_task
from fedspu.tasks.classification import classification
from fedspu.tasks.language_model import language_model
from fedspu.tasks.regression import regression
from fedspu.tasks.segmentation import segmentation
from fedspu.tasks.task import IGNORED

GREY = np.full((4, 5, 6), 51, dtype=np.uint8)
LABELS = np.array([0, 1, 2, 1])


def saved(folder: Path, **arrays: Any) -> Path:
    file = folder / "mine.npz"
    np.savez(file, **arrays)
    return file


def test_grey_pixels_are_scaled_and_get_a_channel() -> None:
    dataset = from_arrays(GREY, LABELS)
    x, _ = dataset.take(slice(None))
    assert dataset.x.shape == x.shape == (4, 1, 5, 6)
    torch.testing.assert_close(x, torch.full((4, 1, 5, 6), 0.2))


def test_colour_pixels_are_scaled_and_keep_their_shape() -> None:
    pixels = np.full((4, 3, 5, 6), 255, dtype=np.uint8)
    x, _ = from_arrays(pixels, LABELS).take(slice(None))
    torch.testing.assert_close(x, torch.ones(4, 3, 5, 6))


def test_pixels_may_be_a_file_in_memory_and_are_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", GREY)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    dataset = from_arrays(mapped, LABELS)
    assert dataset.x.dtype == torch.uint8
    assert dataset.x.numpy().ctypes.data == mapped.ctypes.data


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_tokens_are_kept(dtype: type[np.integer]) -> None:
    tokens = np.arange(8, dtype=dtype).reshape(4, 2)
    x = from_arrays(tokens, LABELS).x
    assert x.dtype == torch.int64
    assert x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_kept_as_float32(dtype: type[np.floating]) -> None:
    x = from_arrays(np.full((4, 5, 6), 2.5, dtype=dtype), LABELS).x
    assert x.dtype == torch.float32
    assert torch.equal(x, torch.full((4, 5, 6), 2.5))


def test_classes_run_to_the_largest_label() -> None:
    given = from_arrays(GREY, np.array([0, 0, 6, 1], dtype=np.uint8))
    dataset = with_targets(given, classification)
    assert dataset.num_outputs == 7
    assert dataset.y.dtype == torch.int64


def test_how_many_outputs_there_are_a_task_has_yet_to_say() -> None:
    assert from_arrays(GREY, LABELS).num_outputs == 0


def test_tensors_are_as_good_as_arrays() -> None:
    x = torch.full((4, 2), 0.5, dtype=torch.bfloat16, requires_grad=True)
    dataset = from_arrays(x, torch.tensor([0, 1, 2, 1], dtype=torch.int32))
    assert torch.equal(dataset.x, torch.full((4, 2), 0.5))
    assert dataset.y.tolist() == [0, 1, 2, 1]


def test_the_data_set_does_not_follow_later_changes_of_the_arrays() -> None:
    x, y = np.zeros((4, 2), dtype=np.float32), np.array([0, 1, 2, 1])
    dataset = from_arrays(x, y)
    x[:], y[:] = 9, 9
    assert float(dataset.x.sum()) == 0
    assert dataset.y.tolist() == [0, 1, 2, 1]


def test_a_file_gives_what_its_arrays_give(tmp_path: Path) -> None:
    file = saved(tmp_path, x=GREY, y=LABELS)
    dataset = load(file)
    assert dataset.name == str(file)
    assert torch.equal(dataset.x, from_arrays(GREY, LABELS).x)
    assert dataset.y.tolist() == LABELS.tolist()


@pytest.mark.parametrize(
    "client",
    [[30, 7, 30, 8], ["eve", "ada", "eve", "bob"], [b"eve", b"ada", b"eve", b"bob"]],
)
def test_a_client_array_says_whose_each_example_is(
    tmp_path: Path, client: list[Any]
) -> None:
    owners = load(saved(tmp_path, x=GREY, y=LABELS, client=np.array(client))).owners
    assert owners is not None
    assert owners.dtype == torch.int64
    assert owners.tolist() == [2, 0, 2, 1]


def test_owners_may_be_given_from_memory() -> None:
    owners = from_arrays(GREY, LABELS, owners=torch.tensor([1, 1, 5, 5])).owners
    assert owners is not None
    assert owners.tolist() == [0, 0, 1, 1]


def test_without_a_client_array_nobody_is_known_to_own_anything() -> None:
    assert from_arrays(GREY, LABELS).owners is None


# Targets of every kind ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_whole_targets_are_int64(dtype: type[np.integer]) -> None:
    y = from_arrays(GREY, LABELS.astype(dtype)).y
    assert y.dtype == torch.int64
    assert y.tolist() == [0, 1, 2, 1]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_float_targets_are_float32_in_the_end(dtype: type[np.floating]) -> None:
    given = from_arrays(GREY, np.array([0.5, -2, 8, 0], dtype=dtype))
    y = with_targets(given, regression).y
    assert y.dtype == torch.float32
    assert y.tolist() == [0.5, -2, 8, 0]


def test_a_target_too_large_for_float32_is_named() -> None:
    given = from_arrays(GREY, np.array([0, 1e300, 1, 2]))
    with pytest.raises(DataError, match=r"^arrays: y\[1\] is not finite; expected"):
        with_targets(given, regression)


def test_targets_may_have_any_shape_until_a_task_says_otherwise() -> None:
    assert from_arrays(GREY, np.zeros((4, 3))).y.shape == (4, 3)
    assert from_arrays(GREY, np.zeros((4, 5, 6), dtype=int)).y.shape == (4, 5, 6)


def test_grey_images_and_a_class_for_each_of_their_pixels_go_together() -> None:
    masks = np.zeros((4, 5, 6), dtype=np.uint8)
    masks[0, 0, 0] = 3
    dataset = with_targets(from_arrays(GREY, masks), segmentation)
    assert dataset.x.shape == (4, 1, 5, 6)
    assert dataset.y.dtype == torch.int64
    assert dataset.num_outputs == 4


@pytest.mark.parametrize(
    ("task", "y", "outputs"),
    [
        ("classification", LABELS, 3),
        ("regression", LABELS / 3, 1),
        ("regression", np.ones((4, 2)), 2),
        ("segmentation", np.full((4, 5, 6), 4), 5),
    ],
)
def test_a_file_has_the_targets_of_its_task(
    tmp_path: Path, task: str, y: Any, outputs: int
) -> None:
    file = saved(tmp_path, x=GREY, y=y)
    dataset = data.load("arrays:mine.npz", tmp_path, find_task(task))
    assert dataset.name == str(file)
    assert dataset.y.shape == y.shape
    assert dataset.num_outputs == outputs


def test_a_file_of_tokens_needs_no_targets(tmp_path: Path) -> None:
    tokens = np.array([[3, 1, 4], [1, 5, 9]], dtype=np.uint16)
    saved(tmp_path, x=tokens, client=np.array(["ada", "bob"]))
    dataset = data.load("arrays:mine.npz", tmp_path, language_model)
    assert dataset.x.tolist() == tokens.tolist()
    assert dataset.y.tolist() == [[1, 4, IGNORED], [5, 9, IGNORED]]
    assert dataset.num_outputs == 10
    assert dataset.owners is not None


def test_without_targets_there_are_none_until_a_task_makes_them() -> None:
    assert from_arrays(GREY, None).y is NO_TARGETS


def test_a_single_number_is_no_target_of_several_examples() -> None:
    with pytest.raises(DataError, match=r"^arrays: y has shape \(\); expected"):
        with_targets(from_arrays(GREY, 3), classification)


# Texts of unequal lengths -------------------------------------------------------------


RAGGED = [[3, 1, 4], [1], [5, 9]]


def rows_of(kind: str) -> Any:
    """The texts as lists, as arrays of some integers, or as tensors."""
    if kind == "lists":
        return RAGGED
    if kind == "tensors":
        return tuple(torch.tensor(row, dtype=torch.int32) for row in RAGGED)
    return [np.array(row, dtype=kind) for row in RAGGED]


KINDS = ["lists", "tensors", "int32", "int64", "uint16", "uint32"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_padded_at_their_ends(kind: str) -> None:
    dataset = with_targets(from_arrays(rows_of(kind), [0, 1, 1]), classification)
    assert dataset.x.dtype == torch.int64
    assert dataset.x.tolist() == [[3, 1, 4], [1, 0, 0], [5, 9, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_predicted_where_targets_are_padded(kind: str) -> None:
    dataset = with_targets(from_arrays(RAGGED, rows_of(kind)), language_model)
    assert dataset.x.tolist() == [[3, 1, 4], [1, 0, 0], [5, 9, 0]]
    assert dataset.y.tolist() == [
        [3, 1, 4],
        [1, IGNORED, IGNORED],
        [5, 9, IGNORED],
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_texts_without_targets_is_not_predicted(kind: str) -> None:
    rows = rows_of(kind)
    given = from_arrays([rows[0], rows[2]], None)
    dataset = with_targets(given, language_model)
    assert dataset.x.tolist() == [[3, 1, 4], [5, 9, 0]]
    assert dataset.y.tolist() == [[1, 4, IGNORED], [9, IGNORED, IGNORED]]
    assert dataset.num_outputs == 10


def test_a_text_of_one_token_has_nothing_to_predict() -> None:
    with pytest.raises(DataError, match=r"no target of example 1 is scored; remove it"):
        with_targets(from_arrays(RAGGED, None), language_model)


def test_texts_of_equal_lengths_are_as_good_in_a_list() -> None:
    dataset = from_arrays([[1, 2], [3, 4]], [[2, 3], [4, 5]])
    assert dataset.x.tolist() == [[1, 2], [3, 4]]
    assert dataset.y.tolist() == [[2, 3], [4, 5]]


def test_numbers_to_predict_are_not_padded() -> None:
    # -100 would be learned as a number like any other.
    with pytest.raises(DataError, match=r"^arrays: y\b.*expected"):
        with_targets(from_arrays(GREY[:2], [[0.5], [1.0, 2.0]]), regression)


# Mistakes -----------------------------------------------------------------------------


NAN = np.zeros((4, 2))
NAN[2, 1] = np.nan


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"x": GREY}, "has no targets .array y., but task classification needs them"),
        ({"y": LABELS}, "holds y; expected .* x .* and y"),
        ({"images": GREY, "y": LABELS}, "holds images, y; expected .* x .* and y"),
        ({}, "holds nothing; expected .* x .* and y"),
        ({"x": np.array([None] * 4), "y": LABELS}, "cannot be read .*Object arrays"),
        ({"x": np.full((4, 2), "a"), "y": LABELS}, "x holds text; expected"),
        ({"x": np.full((4, 2), True), "y": LABELS}, "x holds bool; expected"),
        ({"x": np.zeros(4), "y": LABELS}, r"x has shape \(4,\); expected one row"),
        ({"x": GREY, "y": LABELS / 2}, "y holds float64; expected integers"),
        ({"x": GREY, "y": np.full((4, 2), "a")}, "y holds <U1; expected whole numbers"),
        ({"x": GREY, "y": np.full(4, True)}, "y holds bool; expected whole numbers"),
        ({"x": GREY, "y": np.array(3)}, r"y has shape \(\); expected"),
        ({"x": GREY, "y": LABELS.reshape(4, 1)}, r"y has shape \(4, 1\); expected"),
        ({"x": GREY, "y": np.array([0, 1, -1, -2])}, r"y\[2\] = -1; expected"),
        ({"x": GREY, "y": np.array([0, 10**7, 1, 2])}, r"y\[1\] = 10000000; expected"),
        ({"x": GREY, "y": LABELS[:3]}, "4 examples in x but 3 targets in y"),
        ({"x": GREY[:0], "y": LABELS[:0]}, "no examples; expected at least one"),
        (
            {"x": GREY, "y": LABELS, "client": LABELS / 2},
            "client holds float64; expected names or whole numbers",
        ),
        (
            {"x": GREY, "y": LABELS, "client": LABELS[:3]},
            r"client has shape \(3,\); expected one for each of the 4",
        ),
        (
            {"x": GREY, "y": LABELS, "client": LABELS.reshape(2, 2)},
            r"client has shape \(2, 2\); expected one for each of the 4",
        ),
        (
            {"x": GREY, "y": LABELS, "client": np.array([None] * 4)},
            "cannot be read .*Object arrays",
        ),
        ({"x": NAN, "y": LABELS}, r"1 of 4 examples hold NaN .* x\[2\]"),
        ({"x": np.full((4, 2), 1e300), "y": LABELS}, "4 of 4 examples hold NaN or inf"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(
    tmp_path: Path, arrays: dict[str, Any], complaint: str
) -> None:
    file = saved(tmp_path, **arrays)
    with pytest.raises(DataError, match=complaint) as caught:
        data.load(f"arrays:{file}")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"none\.npz: No such file .*; expected an \.npz"
    ):
        load(tmp_path / "none.npz")


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Is a directory; expected an \.npz"):
        load(tmp_path)


def test_a_single_array_is_not_an_npz_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", GREY)
    with pytest.raises(DataError, match=r"x\.npy is not an \.npz file; expected"):
        load(tmp_path / "x.npy")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_file_is_refused(tmp_path: Path, save: Any) -> None:
    file = tmp_path / "mine.npz"
    save(file, x=np.random.default_rng(0).random((40, 5)), y=np.zeros(40, dtype=int))
    damaged = bytearray(file.read_bytes())
    damaged[60:90] = b"\xff" * 30  # in the array x, behind its zip header
    file.write_bytes(damaged)
    with pytest.raises(DataError, match=r"mine\.npz cannot be read \(.*\); expected"):
        load(file)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    file = saved(tmp_path, x=np.array([[Trap()]], dtype=object), y=LABELS[:1])
    with pytest.raises(DataError):
        load(file)
    assert not (tmp_path / "sprung").exists()
