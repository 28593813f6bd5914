from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspu.data.dataset import NO_TARGETS, Dataset, with_targets
from fedspu.data.own.arrays import from_arrays
from fedspu.errors import DataError
from fedspu.tasks import TASKS, find_task
from fedspu.tasks.classification import classification
from fedspu.tasks.language_model import language_model
from fedspu.tasks.regression import regression
from fedspu.tasks.segmentation import segmentation
from fedspu.tasks.task import IGNORED, Task

NAN, INF = float("nan"), float("inf")


def checked(
    x: Tensor, y: Tensor, task: Task = classification, known: int = 0
) -> Dataset:
    return with_targets(Dataset("mine", x, y, num_classes=known), task)


def refusal(x: Tensor, y: Tensor, task: Task, known: int = 0) -> str:
    """The one line with which a task refuses data."""
    with pytest.raises(DataError) as caught:
        checked(x, y, task, known)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Whatever the task --------------------------------------------------------------------


def test_sound_examples_pass() -> None:
    checked(torch.zeros(3, 2), torch.tensor([0, 1, 1]), known=2)


def test_tokens_pass() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    checked(tokens, torch.tensor([0, 1]), known=2)


SOUND = {
    "classification": (torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 1, 0])),
    "regression": (torch.zeros(4, 1, 2, 2), torch.tensor([0.5, 1, 1, 0])),
    "language-model": (torch.ones(4, 3).long(), torch.ones(4, 3).long()),
    "segmentation": (torch.zeros(4, 1, 2, 2), torch.zeros(4, 2, 2).long()),
}
"""Four examples with targets, for each task."""


def test_every_task_is_looked_at_here() -> None:
    assert set(SOUND) == set(TASKS)


@pytest.mark.parametrize("name", SOUND)
def test_a_task_changes_nothing_but_the_targets_and_their_number(name: str) -> None:
    x, y = SOUND[name]
    owners = torch.tensor([0, 0, 1, 1])
    given = Dataset("mine", x, y, owners=owners, classes=("a",), notes=("odd",))
    found = with_targets(given, find_task(name))
    assert found.x is x
    assert found.num_outputs > 0
    assert replace(found, y=y, num_outputs=0).__dict__ == given.__dict__


@pytest.mark.parametrize("name", SOUND)
def test_what_a_task_made_of_data_it_takes_again(name: str) -> None:
    once = with_targets(Dataset("mine", *SOUND[name]), find_task(name))
    twice = with_targets(once, find_task(name))
    assert torch.equal(twice.y, once.y)
    assert twice.y.dtype == once.y.dtype
    assert twice.num_outputs == once.num_outputs


@pytest.mark.parametrize("name", ["classification", "regression", "segmentation"])
def test_broken_examples_are_counted_and_the_first_is_named(name: str) -> None:
    x = torch.zeros(4, 1, 2, 2)
    x[1, 0, 0, 0] = NAN
    x[3, 0, 1, 1] = INF
    x[3, 0, 1, 0] = -INF
    assert refusal(x, SOUND[name][1], find_task(name)) == (
        "mine: 2 of 4 examples hold NaN or infinite values; the first is x[1]; leave "
        "them out, or replace the values with x = np.nan_to_num(x)"
    )


@pytest.mark.parametrize("name", SOUND)
def test_lengths_that_differ_are_refused(name: str) -> None:
    x, y = SOUND[name]
    words = refusal(x, y[:3], find_task(name))
    assert words == (
        "mine: 4 examples in x but 3 targets in y; expected one target for each "
        "example: look at how the two were made"
    )


@pytest.mark.parametrize("name", SOUND)
def test_an_empty_data_set_is_refused(name: str) -> None:
    x, y = SOUND[name]
    words = refusal(x[:0], y[:0], find_task(name))
    assert words == "mine: no examples; expected at least one"


@pytest.mark.parametrize("name", sorted(set(SOUND) - {"language-model"}))
def test_a_task_that_cannot_make_targets_needs_them(name: str) -> None:
    words = refusal(SOUND[name][0], NO_TARGETS, find_task(name))
    assert words == f"mine: has no targets (array y), but task {name} needs them"


# Classes ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64])
def test_class_numbers_are_int64_and_run_to_the_largest(kind: torch.dtype) -> None:
    found = checked(torch.zeros(3, 2), torch.tensor([0, 6, 1], dtype=kind))
    assert found.y.dtype == torch.int64
    assert found.y.tolist() == [0, 6, 1]
    assert found.num_outputs == 7


def test_a_class_without_examples_counts_where_it_is_known() -> None:
    found = checked(torch.zeros(2, 2), torch.tensor([0, 1]), known=5)
    assert found.num_outputs == 5


def test_a_label_outside_the_known_classes_is_refused() -> None:
    words = refusal(torch.zeros(2, 2), torch.tensor([0, 3]), classification, known=3)
    assert words == "mine: 1 of 2 labels lie outside 0..2; the first is y[1] = 3"


@pytest.mark.parametrize("known", [0, 3])
def test_a_label_below_0_is_refused(known: int) -> None:
    y = torch.tensor([0, -1, -2])
    words = refusal(torch.zeros(3, 2), y, classification, known)
    assert words == "mine: y[1] = -1; expected class numbers from 0 upwards"


def test_no_class_is_left_unscored() -> None:
    words = refusal(torch.zeros(2, 2), torch.tensor([0, IGNORED]), classification)
    assert words == "mine: y[1] = -100; expected class numbers from 0 upwards"


def test_the_largest_class_is_inside() -> None:
    checked(torch.zeros(2, 2), torch.tensor([0, 2]), known=3)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_float_targets_are_no_classes_and_regression_is_pointed_to(
    kind: torch.dtype,
) -> None:
    y = torch.tensor([0.0, 1.0], dtype=kind)
    words = refusal(torch.zeros(2, 2), y, classification)
    assert words == (
        f"mine: y holds {str(kind).removeprefix('torch.')}; expected integers, the "
        "class numbers; for numbers to predict use --task regression"
    )


@pytest.mark.parametrize("shape", [(2, 1), (2, 4), (2, 3, 3)])
def test_a_class_is_one_number_per_example(shape: tuple[int, ...]) -> None:
    y = torch.zeros(shape, dtype=torch.int64)
    words = refusal(torch.zeros(2, 2), y, classification)
    assert words == (
        f"mine: y has shape {shape}; expected a class number per example, (n,)"
    )


# Numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.int64])
def test_numbers_to_predict_are_float32_whatever_they_were(kind: torch.dtype) -> None:
    found = checked(torch.zeros(2, 2), torch.tensor([3, -7], dtype=kind), regression)
    assert found.y.dtype == torch.float32
    assert found.y.tolist() == [3, -7]


@pytest.mark.parametrize(("shape", "outputs"), [((3,), 1), ((3, 1), 1), ((3, 4), 4)])
def test_a_model_has_an_output_for_each_number(
    shape: tuple[int, ...], outputs: int
) -> None:
    found = checked(torch.zeros(3, 2), torch.rand(shape), regression)
    assert found.num_outputs == outputs
    assert found.y.shape == shape


@pytest.mark.parametrize(("shape", "outputs"), [((3,), 1), ((3, 4), 4)])
def test_numbers_are_no_classes_even_where_classes_are_known(
    shape: tuple[int, ...], outputs: int
) -> None:
    y = torch.full(shape, 9.0)
    found = checked(torch.zeros(3, 2), y, regression, known=3)
    assert found.num_outputs == outputs


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("width", [None, 3])
def test_a_number_that_is_not_finite_is_refused_by_its_place(
    broken: float, width: int | None
) -> None:
    y = torch.zeros(4) if width is None else torch.zeros(4, width)
    y.view(4, -1)[2, -1] = broken
    y.view(4, -1)[3, 0] = broken
    words = refusal(torch.zeros(4, 2), y, regression)
    assert words == "mine: y[2] is not finite; expected numbers to predict"


def test_maps_of_numbers_are_refused() -> None:
    words = refusal(torch.zeros(2, 2), torch.zeros(2, 3, 4), regression)
    assert words == (
        "mine: y has shape (2, 3, 4); expected a number per example, (n,), or "
        "several, (n, k)"
    )


# Tokens -------------------------------------------------------------------------------


TEXT = torch.tensor([[3, 1, 4], [1, 5, 9]])


def test_targets_may_be_given_token_by_token() -> None:
    y = torch.tensor([[1, 4, IGNORED], [IGNORED, 9, 2]], dtype=torch.int32)
    found = checked(TEXT, y, language_model)
    assert torch.equal(found.x, TEXT)
    assert found.y.dtype == torch.int64
    assert found.y.tolist() == y.tolist()


@pytest.mark.parametrize(("target", "outputs"), [(2, 10), (9, 10), (40, 41)])
def test_the_vocabulary_is_that_of_inputs_and_targets(
    target: int, outputs: int
) -> None:
    y = torch.full((2, 3), target)
    assert checked(TEXT, y, language_model).num_outputs == outputs


def test_without_targets_the_next_token_is_predicted() -> None:
    found = checked(TEXT, NO_TARGETS, language_model)
    assert torch.equal(found.x, TEXT)
    assert found.y.tolist() == [[1, 4, IGNORED], [5, 9, IGNORED]]
    assert found.y.dtype == torch.int64
    assert found.num_outputs == 10


def test_nothing_is_predicted_beside_padding_below_0_which_becomes_token_0() -> None:
    padded = torch.tensor([[3, 1, -1, -1], [1, 5, 9, 8], [2, -7, 6, 4]])
    found = checked(padded, NO_TARGETS, language_model)
    assert found.x.tolist() == [[3, 1, 0, 0], [1, 5, 9, 8], [2, 0, 6, 4]]
    assert found.y.tolist() == [
        [1, IGNORED, IGNORED, IGNORED],
        [5, 9, 8, IGNORED],
        [IGNORED, IGNORED, 4, IGNORED],
    ]


@pytest.mark.parametrize("empty", [[3, -1, -1], [-1, -1, -1]])
def test_a_text_without_anything_to_predict_is_refused(empty: list[int]) -> None:
    words = refusal(torch.tensor([[1, 2, 3], empty]), NO_TARGETS, language_model)
    assert words == "mine: no target of example 1 is scored; remove it"


def test_a_text_whose_targets_are_all_left_out_is_refused() -> None:
    y = torch.tensor([[1, 4, 1], [IGNORED] * 3])
    words = refusal(TEXT, y, language_model)
    assert words == "mine: no target of example 1 is scored; remove it"


@pytest.mark.parametrize("y", [NO_TARGETS, torch.zeros(2, 3).long()])
def test_floats_are_no_tokens(y: Tensor) -> None:
    words = refusal(torch.rand(2, 3), y, language_model)
    assert words.startswith("mine: x is (2, 3) of float32, y (2, 3) of ")
    assert words.endswith("; expected token numbers of each example, (n, length)")


def test_float_targets_are_no_tokens() -> None:
    words = refusal(TEXT, torch.zeros(2, 3), language_model)
    assert words == (
        "mine: x is (2, 3) of int64, y (2, 3) of float32; expected token numbers of "
        "each example, (n, length)"
    )


@pytest.mark.parametrize("y", [NO_TARGETS, torch.zeros(2, 3).long()])
def test_pixels_are_no_tokens(y: Tensor) -> None:
    # Bytes are divided by 255 as they are taken.
    pixels = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8)
    words = refusal(pixels, y, language_model)
    assert "x is (2, 3) of uint8" in words
    assert "expected token numbers" in words


def test_a_text_is_a_row_of_tokens() -> None:
    words = refusal(torch.zeros(2, 3, 4).long(), NO_TARGETS, language_model)
    assert "x is (2, 3, 4) of int64" in words
    assert "expected token numbers of each example, (n, length)" in words


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 4)])
def test_there_is_one_target_for_each_token(shape: tuple[int, ...]) -> None:
    words = refusal(TEXT, torch.zeros(shape).long(), language_model)
    assert words == (
        f"mine: x has shape (2, 3) and y {shape}; expected one target for each token"
    )


def test_a_target_below_0_that_is_not_the_ignored_one_is_refused() -> None:
    y = torch.tensor([[1, IGNORED, 3], [4, -5, -6]])
    words = refusal(TEXT, y, language_model)
    assert words == (
        "mine: y[1, 1] = -5; expected class numbers from 0 upwards, or -100 where "
        "nothing is scored"
    )


# Pixels -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64])
def test_pixel_classes_are_int64_and_run_to_the_largest(kind: torch.dtype) -> None:
    y = torch.tensor([[[0, 1, 1], [2, 6, 0]]], dtype=kind)
    found = checked(torch.zeros(1, 3, 2, 3), y, segmentation)
    assert found.y.dtype == torch.int64
    assert found.y.tolist() == y.tolist()
    assert found.num_outputs == 7


def test_pixels_of_images_as_bytes_may_have_classes_too() -> None:
    x = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)
    assert checked(x, torch.ones(1, 2, 2).long(), segmentation).num_outputs == 2


def test_volumes_may_have_a_class_at_each_place() -> None:
    x, y = torch.zeros(2, 1, 2, 3, 4), torch.ones(2, 2, 3, 4).long()
    assert checked(x, y, segmentation).y.shape == (2, 2, 3, 4)


def test_pixels_may_be_left_unlabelled() -> None:
    y = torch.tensor([[[0, IGNORED], [1, IGNORED]]])
    found = checked(torch.zeros(1, 3, 2, 2), y, segmentation)
    assert found.y.tolist() == y.tolist()
    assert found.num_outputs == 2


def test_an_image_without_a_labelled_pixel_is_refused() -> None:
    # A batch of such images has no loss.
    y = torch.tensor([[[0, 1], [1, 0]], [[IGNORED] * 2] * 2])
    words = refusal(torch.zeros(2, 3, 2, 2), y, segmentation)
    assert words == "mine: no target of example 1 is scored; remove it"


@pytest.mark.parametrize(
    ("y", "found"),
    [
        (torch.zeros(2).long(), "y (2,) of int64"),
        (torch.zeros(2, 4).long(), "y (2, 4) of int64"),
        (torch.zeros(2, 5, 4).long(), "y (2, 5, 4) of int64"),
        (torch.zeros(2, 1, 4, 5).long(), "y (2, 1, 4, 5) of int64"),
        (torch.zeros(2, 4, 5), "y (2, 4, 5) of float32"),
    ],
)
def test_targets_that_are_no_class_for_each_pixel_are_refused(
    y: Tensor, found: str
) -> None:
    words = refusal(torch.zeros(2, 3, 4, 5), y, segmentation)
    assert words == (
        f"mine: x has shape (2, 3, 4, 5), {found}; expected a class number for each "
        "pixel: (n, channels, height, width) and (n, height, width)"
    )


def test_a_pixel_below_0_that_is_not_the_ignored_one_is_refused() -> None:
    y = torch.tensor([[[0, IGNORED], [-1, 3]]])
    words = refusal(torch.zeros(1, 3, 2, 2), y, segmentation)
    assert words == (
        "mine: y[0, 1, 0] = -1; expected class numbers from 0 upwards, or -100 where "
        "nothing is scored"
    )


def test_a_pixel_outside_the_known_classes_is_refused() -> None:
    y = torch.tensor([[[0, 1], [7, 3]]])
    words = refusal(torch.zeros(1, 3, 2, 2), y, segmentation, known=2)
    assert "outside 0..1" in words


def test_names_of_classes_are_no_numbers_to_predict() -> None:
    made = from_arrays(
        np.zeros((4, 2), dtype=np.float32), np.array(["b", "a", "b", "c"])
    )
    assert made.classes == ("a", "b", "c")
    assert with_targets(made, classification).y.tolist() == [1, 0, 1, 2]
    with pytest.raises(DataError, match="names of classes, like 'a'; task regression"):
        with_targets(made, regression)
