"""What tasks take for targets and outputs, and what they refuse."""

from typing import Any

import numpy as np
import pytest
import torch

from fedspu.data.dataset import Dataset, with_targets
from fedspu.data.own.arrays import from_arrays
from fedspu.errors import DataError, ModelError
from fedspu.tasks.classification import classification
from fedspu.tasks.language_model import language_model
from fedspu.tasks.regression import regression
from fedspu.tasks.segmentation import segmentation
from fedspu.tasks.task import IGNORED, Task, check_output
from tests.oracles.tasks import CLASSES, KINDS, Kind

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)

# Targets ------------------------------------------------------------------------------


def dataset(x: Any, y: Any, task: Task) -> Dataset:
    targets = None if y is None else np.asarray(y)
    return with_targets(from_arrays(np.asarray(x), targets), task)


@pytest.mark.parametrize(
    ("task", "x", "y", "num_outputs"),
    [
        (classification, np.zeros((3, 2)), [0, 4, 1], 5),
        (regression, np.zeros((3, 2)), [0.5, 4.0, 1.0], 1),
        (regression, np.zeros((3, 2)), [0, 4, 1], 1),
        (regression, np.zeros((3, 2)), np.zeros((3, 4)), 4),
        (language_model, [[1, 2], [0, 6]], [[2, 1], [8, IGNORED]], 9),
        (language_model, [[1, 9], [0, 6]], None, 10),
        (segmentation, np.zeros((2, 3, 1, 2)), [[[0, 2]], [[IGNORED, 1]]], 3),
    ],
)
def test_a_model_needs_as_many_outputs_as_the_targets_say(
    task: Task, x: Any, y: Any, num_outputs: int
) -> None:
    assert dataset(x, y, task).num_outputs == num_outputs


def test_targets_of_text_are_the_next_tokens() -> None:
    found = dataset([[4, 1, 2], [0, 3, 3]], None, language_model)
    assert found.y.tolist() == [[1, 2, IGNORED], [3, 3, IGNORED]]
    assert found.x.tolist() == [[4, 1, 2], [0, 3, 3]]


def test_padding_is_neither_scored_nor_an_input() -> None:
    unequal: Any = [[4, 1, 2], [5, 3]]
    found = with_targets(from_arrays(unequal, None), language_model)
    assert found.y.tolist() == [[1, 2, IGNORED], [3, IGNORED, IGNORED]]
    assert int(found.x.min()) == 0


def test_padding_before_or_inside_a_text_is_neither_scored_nor_scores_anything() -> (
    None
):
    """Nothing is predicted from padding, and padding is never predicted."""
    found = dataset([[-1, -1, 5, 6], [1, -1, 3, 4]], None, language_model)
    assert found.y.tolist() == [
        [IGNORED, IGNORED, 6, IGNORED],
        [IGNORED] * 2 + [4, -100],
    ]
    assert int(found.x.min()) == 0


def test_a_text_of_padding_and_one_token_is_refused() -> None:
    with pytest.raises(DataError, match="no target of example 1 is scored; remove it"):
        dataset([[1, 2, 3], [-1, -1, 3]], None, language_model)


images = np.zeros((2, 1, 2, 2))


@pytest.mark.parametrize(
    ("task", "x", "y", "says"),
    [
        (classification, np.zeros((2, 2)), [0.0, 1.0], "--task regression"),
        (
            classification,
            np.zeros((2, 2)),
            [[0.0, 1.0], [1.0, 0.0]],
            r"class numbers: y\.argmax\(1\)",
        ),
        (classification, np.zeros((2, 2)), [[0], [1]], r"\(2, 1\).*\(n,\)"),
        (classification, np.zeros((2, 2)), [0, -1], r"y\[1\] = -1"),
        (classification, np.zeros((2, 2)), None, "has no targets"),
        (regression, np.zeros((2, 2)), [0.0, np.nan], r"y\[1\] is not finite"),
        (regression, np.zeros((2, 2)), [[0.0, 1], [np.inf, 2]], r"y\[1\] is not fin"),
        (regression, np.zeros((2, 2)), np.zeros((2, 2, 2)), r"\(2, 2, 2\)"),
        (regression, np.zeros((2, 2)), None, "has no targets"),
        (language_model, np.zeros((2, 2)), [[0, 1], [1, 1]], "of float32.*token"),
        (language_model, [[0, 1], [1, 1]], [0, 1], "one target for each token"),
        (language_model, [[0, 1], [1, 1]], [[0, -3], [1, 1]], r"y\[0, 1\] = -3.*-100"),
        (language_model, [[0, 1], [1, 1]], [[0, 1], [-100] * 2], "example 1 is scored"),
        (segmentation, images, np.zeros((2, 2, 2)), "of float64.*each pixel"),
        (segmentation, images, [0, 1], "each pixel"),
        (segmentation, images, np.zeros((2, 2, 3), int), "each pixel"),
        (segmentation, images, np.full((2, 2, 2), -2), r"y\[0, 0, 0\] = -2.*-100"),
        (segmentation, images, None, "has no targets"),
    ],
)
def test_targets_that_cannot_be_learned_are_refused_in_one_line(
    task: Task, x: Any, y: Any, says: str
) -> None:
    with pytest.raises(DataError, match=says) as caught:
        dataset(x, y, task)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("arrays: ")


def test_an_image_of_which_no_pixel_is_scored_is_refused() -> None:
    """A client with no other test images could not be judged."""
    y = np.zeros((2, 2, 2), dtype=np.int64)
    y[1] = IGNORED
    with pytest.raises(DataError, match="no target of example 1 is scored; remove it"):
        dataset(images, y, segmentation)


# Outputs ------------------------------------------------------------------------------


@kinds
def test_an_output_that_fits_is_accepted(kind: Kind) -> None:
    output, y = kind.batch(2)
    needed = 3 if kind.task is regression else CLASSES
    check_output(kind.task, output, y, needed)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("classification", (2,), "returned (2,) for two examples; expected (2, 4)"),
        ("classification", (1, 4), "expected (2, 4): one score for each class"),
        ("classification", (2, 3), "scores for 3 classes, but the labels go up to 3"),
        ("regression", (2, 2), "returned (2, 2) for two examples; expected (2, 4)"),
        ("regression", (2, 3, 2), "the numbers to predict"),
        ("language-model", (2, 4), "(2, 5, 4): a score for each possible next token"),
        ("language-model", (2, 4, 4), "two examples of 5 tokens"),
        ("language-model", (2, 5, 3), "scores for 3 tokens, but the data has tokens"),
        ("segmentation", (2, 4), "(2, 4, 2, 3): a score for each class at each pixel"),
        ("segmentation", (2, 4, 3, 2), "expected (2, 4, 2, 3)"),
        ("segmentation", (2, 3, 2, 3), "expected (2, 4, 2, 3)"),
    ],
)
def test_an_output_that_does_not_fit_is_refused_with_what_is_expected(
    name: str, shape: tuple[int, ...], says: str
) -> None:
    kind = KINDS[name]
    _, y = kind.batch(2)
    with pytest.raises(ModelError) as caught:
        check_output(kind.task, torch.zeros(shape), y, CLASSES)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@kinds
def test_a_model_that_returns_no_tensor_is_refused(kind: Kind) -> None:
    with pytest.raises(ModelError, match="returned a dict; expected a tensor"):
        check_output(kind.task, {}, torch.zeros(2), 3)


@pytest.mark.parametrize("name", ["classification", "language-model", "segmentation"])
def test_more_outputs_than_needed_will_do(name: str) -> None:
    output, y = KINDS[name].batch(2)
    check_output(KINDS[name].task, output, y, CLASSES - 1)
