"""The four tasks against slow definitions, and tasks of one's own."""

import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspu.errors import SettingsError
from fedspu.methods import all_methods
from fedspu.resolve import resolve
from fedspu.tasks import TASKS, find_task
from fedspu.tasks.choices import check_settings
from fedspu.tasks.classification import balanced, classification
from fedspu.tasks.language_model import language_model
from fedspu.tasks.regression import NUM_BINS, regression
from fedspu.tasks.segmentation import segmentation
from fedspu.tasks.task import IGNORED, RESERVED, Loss, Metric
from tests.oracles.tasks import CLASSES, KINDS, Kind, slow_balanced

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def test_every_task_is_tried_here_and_can_be_set() -> None:
    assert {name: kind.task for name, kind in KINDS.items()} == {
        name: find_task(name) for name in TASKS
    }
    assert all(find_task(name).name == name for name in TASKS)
    assert resolve({}).task == "classification"


# Loss, count and metric ---------------------------------------------------------------


@kinds
def test_a_loss_is_the_mean_over_the_targets_that_are_scored(kind: Kind) -> None:
    output, y = kind.batch(6)
    each = kind.losses(kind.task, output, y)
    found = kind.task.loss(output, y)
    assert float(found) == pytest.approx(sum(each) / len(each), rel=1e-5)
    summed = kind.task.loss(output, y, reduction="sum")
    assert float(summed) == pytest.approx(sum(each), rel=1e-5)


@kinds
def test_the_count_is_that_of_the_targets_that_are_scored(kind: Kind) -> None:
    output, y = kind.batch(6)
    assert kind.task.count(y) == len(kind.losses(kind.task, output, y))


@kinds
def test_a_metric_is_what_its_definition_says(kind: Kind) -> None:
    for seed in range(5):
        output, y = kind.batch(7, seed)
        metric = kind.task.metric
        found = metric.value(metric.measure(output, y))
        assert found == pytest.approx(kind.metric(output, y), rel=1e-5)


@kinds
@given(cuts=st.lists(st.integers(1, 11), max_size=4), seed=st.integers(0, 99))
def test_batches_of_any_cut_give_the_same_metric_and_loss(
    kind: Kind, cuts: list[int], seed: int
) -> None:
    task, (output, y) = kind.task, kind.batch(12, seed)
    edges = [0, *sorted(set(cuts)), 12]
    parts = [slice(*edge) for edge in pairwise(edges)]
    sums = torch.stack([task.metric.measure(output[p], y[p]) for p in parts]).sum(0)
    whole = task.metric.measure(output, y)
    assert sums.shape == whole.shape
    assert torch.allclose(sums, whole, rtol=1e-6, atol=0)
    assert task.metric.value(sums) == pytest.approx(kind.metric(output, y), rel=1e-5)
    losses = [float(task.loss(output[p], y[p], reduction="sum")) for p in parts]
    counts = [task.count(y[p]) for p in parts]
    mean = float(task.loss(output, y))
    assert sum(losses) / sum(counts) == pytest.approx(mean, rel=1e-5)


@kinds
def test_sums_are_in_float64_so_that_many_batches_lose_nothing(kind: Kind) -> None:
    assert kind.task.metric.measure(*kind.batch(4)).dtype == torch.float64


@kinds
def test_a_loss_has_a_gradient(kind: Kind) -> None:
    output, y = kind.batch(4)
    output.requires_grad_()
    kind.task.loss(output, y).backward()
    assert output.grad is not None
    assert float(output.grad.abs().sum()) > 0


@pytest.mark.parametrize("kind", ["language-model", "segmentation"])
def test_what_is_said_where_nothing_is_scored_makes_no_difference(kind: str) -> None:
    task, (output, y) = KINDS[kind].task, KINDS[kind].batch(5)
    is_ignored = y == IGNORED
    assert bool(is_ignored.any())
    classes = -1 if task is language_model else 1
    other = output.movedim(classes, -1).clone()
    other[is_ignored] += torch.tensor([100.0, 0.0, -100.0, 50.0])
    other = other.movedim(-1, classes)
    assert torch.equal(task.loss(other, y), task.loss(output, y))
    assert torch.equal(task.metric.measure(other, y), task.metric.measure(output, y))


def test_classes_that_occur_nowhere_are_no_part_of_the_iou() -> None:
    """And a class that is said where there is none counts as a miss."""
    y = torch.tensor([[[0, 0], [1, 1]]])
    said = torch.tensor([[[0, 0], [1, 2]]])
    metric = segmentation.metric
    for classes, expected in ((3, (1 + 1 / 2 + 0) / 3), (9, (1 + 1 / 2 + 0) / 3)):
        output = nn.functional.one_hot(said, classes).movedim(-1, 1).float()
        assert metric.value(metric.measure(output, y)) == pytest.approx(expected)


def test_of_equal_scores_the_first_class_is_the_answer() -> None:
    metric = classification.metric
    output = torch.zeros(4, 3)
    assert metric.value(metric.measure(output, torch.tensor([0, 0, 1, 2]))) == 0.5


def test_a_model_that_knows_nothing_is_as_perplexed_as_there_are_tokens() -> None:
    metric, y = language_model.metric, torch.tensor([[0, 5, IGNORED], [2, 1, 6]])
    output = torch.zeros(2, 3, 7)
    assert metric.value(metric.measure(output, y)) == pytest.approx(7.0, rel=1e-6)


def test_a_perplexity_that_no_float_can_hold_is_infinite() -> None:
    output = torch.tensor([[[0.0, -1e5]]])
    metric = language_model.metric
    assert metric.value(metric.measure(output, torch.tensor([[1]]))) == float("inf")


def test_numbers_of_one_column_are_numbers_without_one() -> None:
    y, column = torch.tensor([1.0, 2.0]), torch.tensor([[1.5], [4.0]])
    assert float(regression.loss(column, y)) == pytest.approx((0.25 + 4) / 2)
    sums = regression.metric.measure(column, y)
    assert regression.metric.value(sums) == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("name", "metric", "is_higher_better", "value", "shows"),
    [
        ("classification", "accuracy", True, 0.875, "87.5 %"),
        ("regression", "mae", False, 0.875, "0.8750"),
        ("regression", "mae", False, 1.0003, "1.000"),
        ("regression", "mae", False, 1234.0, "1234"),
        ("language-model", "perplexity", False, 12.34567, "12.35"),
        ("segmentation", "iou", True, 0.875, "87.5 %"),
    ],
)
def test_a_metric_has_a_name_and_says_what_is_better(
    name: str, metric: str, is_higher_better: bool, value: float, shows: str
) -> None:
    found = find_task(name).metric
    assert (found.name, found.is_higher_better) == (metric, is_higher_better)
    assert found.show(value) == shows
    assert found.show(None) == "-"


def test_a_metric_s_name_is_written_in_words() -> None:
    assert Metric("top_five", lambda a, b: a, float).title == "top five"


# Balanced classes ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["classification", "segmentation"])
def test_balanced_weights_equal_a_slow_version(name: str) -> None:
    kind = KINDS[name]
    output, own = kind.batch(9, seed=3)
    own[own == 2] = 0  # one class is missing, another frequent
    weigh = kind.task.weigh_classes
    assert weigh is not None
    loss = weigh(kind.task.loss, own)
    for part in (slice(None), slice(0, 4), slice(4, 9)):
        found = float(loss(output[part], own[part]))
        wanted = slow_balanced(kind.task, output[part], own[part], own)
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", ["classification", "segmentation"])
def test_in_all_the_classes_that_occur_weigh_the_same(name: str) -> None:
    kind = KINDS[name]
    _, y = kind.batch(9, seed=3)
    y[y == 2] = 0
    weigh = kind.task.weigh_classes
    assert weigh is not None
    loss = weigh(kind.task.loss, y)
    shape = (9, CLASSES, *kind.target_shape)
    shares = []
    for label in (0, 1, 3):  # all lose one where it is this class, and nothing else
        one = torch.full_like(y, IGNORED)
        one[y == label] = label
        shares.append(float(loss(torch.zeros(shape), one, reduction="sum")) / log(4))
    total = kind.task.count(y)
    assert shares == pytest.approx([total / 3] * 3, rel=1e-5)


def test_weights_are_those_of_the_task_s_own_loss() -> None:
    """Two examples of class 0 and one of class 1, by a loss that smooths labels."""
    loss = partial(F.cross_entropy, label_smoothing=0.1)
    output, y = torch.randn(3, 2), torch.tensor([0, 0, 1])
    found = balanced(loss, y)(output, y)
    expected = F.cross_entropy(
        output, y, torch.tensor([0.75, 1.5]), label_smoothing=0.1
    )
    assert torch.allclose(found, expected)
    assert not torch.allclose(found, balanced(F.cross_entropy, y)(output, y))


def no_weights(output: Tensor, y: Tensor, /, *, reduction: str = "mean") -> Tensor:
    return output.sum()


def test_a_loss_that_takes_no_weights_cannot_have_them() -> None:
    own = replace(classification, name="own", loss=no_weights)
    settings = resolve({"train.class_weights": "balanced"})
    check_settings(settings, classification)
    with pytest.raises(SettingsError) as caught:
        check_settings(settings, own)
    assert str(caught.value) == (
        "train.class_weights = 'balanced': task own: its loss takes no class weights; "
        "give it an argument weight, as F.cross_entropy has, or leave the setting out"
    )


def test_an_own_way_to_weigh_classes_may_do_without_weights() -> None:
    def weigh(loss: Loss, y: Tensor) -> Loss:
        return loss

    own = replace(classification, loss=no_weights, weigh_classes=weigh)
    check_settings(resolve({"train.class_weights": "balanced"}), own)


def test_tasks_without_classes_cannot_weigh_them() -> None:
    found = {name for name in TASKS if find_task(name).weigh_classes is not None}
    assert found == {"classification", "segmentation"}


# Classes to divide by -----------------------------------------------------------------


def test_classes_are_strata_themselves() -> None:
    y = torch.tensor([3, 0, 3, 1])
    assert classification.strata is not None
    assert classification.strata(y).tolist() == [3, 0, 3, 1]


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=60))
def test_bins_of_numbers_are_in_their_order_and_equally_full(
    values: list[float],
) -> None:
    assert regression.strata is not None
    bins = regression.strata(torch.tensor(values)).tolist()
    pairs = sorted(zip(values, bins, strict=True))
    for (value, bin_), (next_value, next_bin) in pairwise(pairs):
        assert value == next_value or bin_ <= next_bin
    sizes = [bins.count(bin_) for bin_ in range(NUM_BINS)]
    assert sum(sizes) == len(values)
    assert max(sizes) - min(sizes) <= 1


def test_examples_of_several_numbers_are_binned_by_the_first() -> None:
    assert regression.strata is not None
    first = torch.tensor([5.0, 1.0, 3.0])
    y = torch.stack([first, torch.tensor([0.0, 9.0, 4.0])], 1)
    assert torch.equal(regression.strata(y), regression.strata(first))


def test_maps_are_divided_by_the_class_of_most_pixels() -> None:
    assert segmentation.strata is not None
    y = torch.tensor([[[1, 1, 0]], [[2, 0, 2]], [[0, 0, 2]]])
    assert segmentation.strata(y).tolist() == [1, 2, 0]


def test_pixels_that_are_not_scored_have_no_class_to_divide_by() -> None:
    assert segmentation.strata is not None
    y = torch.tensor([[[IGNORED, IGNORED, IGNORED, 2, 2]]])
    assert segmentation.strata(y).tolist() == [2]


def test_text_has_no_classes() -> None:
    assert language_model.strata is None


# Records that lack something ----------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["loss", "targets", "num_outputs", "check_output", "count"]
)
@pytest.mark.parametrize("bad", [None, 3])
def test_a_task_without_one_of_its_functions_is_refused(name: str, bad: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        replace(classification, name="mine", **{name: bad})
    assert str(caught.value).startswith(
        f"task 'mine': its {name} is {bad}; expected a function"
    )


@pytest.mark.parametrize("name", ["strata", "make_targets", "weigh_classes"])
def test_a_task_may_leave_out_some_functions_but_not_give_others(name: str) -> None:
    nothing: Any = None
    bad: Any = 3
    replace(classification, **{name: nothing})
    with pytest.raises(SettingsError, match=f"its {name} is 3; expected a function"):
        replace(classification, **{name: bad})


@pytest.mark.parametrize("bad", [None, "accuracy", float])
def test_a_task_whose_metric_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(SettingsError, match=r"task 'classification': its metric is "):
        replace(classification, metric=bad)


@pytest.mark.parametrize("bad", ["", None])
def test_a_task_without_a_name_is_refused(bad: Any) -> None:
    with pytest.raises(SettingsError, match="a task's name is"):
        replace(classification, name=bad)


@pytest.mark.parametrize("name", ["measure", "value"])
def test_a_metric_without_one_of_its_functions_is_refused(name: str) -> None:
    bad: Any = None
    with pytest.raises(SettingsError, match=f"metric 'accuracy': its {name} is None"):
        replace(classification.metric, **{name: bad})


@pytest.mark.parametrize("bad", ["my score", "", "top-5", "5th", "a.b", None])
def test_a_metric_s_name_is_letters_digits_and_underscores(bad: Any) -> None:
    with pytest.raises(SettingsError, match=f"metric {bad!r}: expected a name of"):
        replace(classification.metric, name=bad)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_metric_has_no_name_that_records_use(name: str) -> None:
    with pytest.raises(SettingsError, match=f"metric '{name}': records use this name"):
        replace(classification.metric, name=name)


# A task of one's own ------------------------------------------------------------------

OWN = """
from dataclasses import replace
from fedspu.tasks.classification import classification
from fedspu.tasks.task import Metric

errors = replace(
    classification,
    name="errors",
    metric=Metric("errors", classification.metric.measure, float, False),
)
number = 7
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with a task in the folder where one works."""
    (tmp_path / "my_own_tasks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_own_tasks", raising=False)
    return "my_own_tasks"


def test_a_task_of_ones_own_is_found_by_its_place(own: str) -> None:
    task = find_task(f"{own}:errors")
    assert (task.name, task.metric.name) == ("errors", "errors")
    assert resolve({"task": f"{own}:errors"}).task == f"{own}:errors"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("my_own_tasks:number", "is a int; expected a fedspu.tasks.task.Task"),
        ("my_own_tasks:erors", r"has no erors \(did you mean errors\?\)"),
        ("my_own_taskz:errors", "no module named my_own_taskz"),
    ],
)
def test_what_is_no_task_is_refused_by_its_place(
    own: str, place: str, says: str
) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        find_task(place)
    assert str(caught.value).startswith(f"task = '{place}': ")


def test_an_unknown_task_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"did you mean regression\?") as caught:
        resolve({"task": "regresion"})
    assert all(name in str(caught.value) for name in TASKS)


def test_a_method_names_only_tasks_that_there_are() -> None:
    for method in all_methods().values():
        assert (method.tasks or set()) <= TASKS.keys()
