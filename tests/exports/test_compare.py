from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu.errors import ModelError
from fedspu.exports.compare import BATCH, compare
from fedspu.tasks.classification import classification
from fedspu.tasks.regression import regression

X = torch.arange(2 * BATCH + 10.0).view(-1, 2) / 100
Y = torch.arange(len(X)) % 2


class Scaled(nn.Module):
    """Two scores; large enough to have a tolerance of about 1e-4."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, 0], 1 - x[:, 1]], 1)


def test_all_examples_are_compared_in_batches_of_several_sizes() -> None:
    seen: list[int] = []

    def exported(x: Tensor) -> Tensor:
        seen.append(len(x))
        return Scaled().forward(x)

    checked = compare(Scaled(), exported, classification, X, Y, exact=True)
    assert seen == [BATCH, 5, 1, 3]
    assert checked.num_examples == len(X)
    assert checked.batch_sizes == (1, 3, 5, BATCH)
    assert (checked.largest_difference, checked.tolerance) == (0, 0)
    assert checked.changed_predictions == 0
    assert checked.values[0] == checked.values[1]


def test_the_smallest_difference_is_refused_if_bits_must_be_the_same() -> None:
    with pytest.raises(ModelError, match=r"differ by up to 1\.2e-07.*the same bits"):
        compare(
            Scaled(),
            lambda x: Scaled().forward(x) + 2**-23,
            classification,
            X,
            Y,
            exact=True,
        )


@pytest.mark.parametrize(("error", "fits"), [(5e-5, True), (2e-4, False)])
def test_differences_are_measured_against_the_largest_output(
    error: float, fits: bool
) -> None:
    def exported(x: Tensor) -> Tensor:
        return 1000 * Scaled().forward(x) + 1000 * error * X.max()

    class Large(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return 1000 * super().forward(x)

    if fits:
        checked = compare(Large(), exported, classification, X, Y, exact=False)
        assert checked.largest_difference == pytest.approx(1000 * error * 1.37, rel=0.1)
        return
    with pytest.raises(ModelError, match="nothing was written"):
        compare(Large(), exported, classification, X, Y, exact=False)


@pytest.mark.parametrize("wrong", [5, BATCH])
def test_a_difference_in_any_batch_is_seen(wrong: int) -> None:
    def exported(x: Tensor) -> Tensor:
        return Scaled().forward(x) + (1.0 if len(x) == wrong else 0.0)

    with pytest.raises(ModelError, match="differ by up to 1,"):
        compare(Scaled(), exported, classification, X, Y, exact=False)


def test_a_file_that_takes_one_batch_size_only_is_refused() -> None:
    def exported(x: Tensor) -> Tensor:
        if len(x) == 1:
            raise RuntimeError("got 1, expected 2")
        return Scaled().forward(x)

    with pytest.raises(ModelError, match=r"file failed on 1 examples: .*got 1"):
        compare(Scaled(), exported, classification, X, Y, exact=False)


def test_outputs_of_another_form_are_refused() -> None:
    with pytest.raises(ModelError, match=r"\(64, 2\) of torch.float32 .* \(64, 1\)"):
        compare(
            Scaled(), lambda x: Scaled().forward(x)[:, :1], classification, X, Y, False
        )
    with pytest.raises(ModelError, match=r"the exported file .*float64"):
        compare(
            Scaled(),
            lambda x: Scaled().forward(x).double(),
            classification,
            X,
            Y,
            False,
        )


def test_what_is_no_number_is_only_equal_to_itself() -> None:
    class Masked(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return F.pad(super().forward(x), (0, 1), value=float("-inf"))

    checked = compare(Masked(), Masked(), classification, X, Y, exact=False)
    assert checked.largest_difference == 0
    with pytest.raises(ModelError, match="differ by up to inf"):
        compare(
            Masked(), lambda x: Masked()(x).nan_to_num(), classification, X, Y, False
        )


def test_a_model_that_is_random_in_eval_mode_is_refused() -> None:
    class Random(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x))

    with pytest.raises(ModelError, match="change from one call to the next"):
        compare(Random().eval(), Scaled(), classification, X, Y, exact=False)


def test_predictions_that_change_are_counted() -> None:
    y = torch.zeros(3, dtype=torch.int64)
    x = torch.tensor([[0.5, 0.5], [1, 0.5], [0, 0.5]])

    def exported(x: Tensor) -> Tensor:
        return Scaled().forward(x) + torch.tensor([0, 1e-5])

    checked = compare(Scaled(), exported, classification, x, y, exact=False)
    assert checked.changed_predictions == 1
    assert checked.values == (2 / 3, 1 / 3)


def test_a_task_without_classes_has_a_metric_but_no_predictions() -> None:
    mean = replace(regression, name="mine")
    checked = compare(Scaled(), Scaled(), mean, X, Scaled()(X) + 1, exact=False)
    assert checked.changed_predictions is None
    assert checked.metric == "mae"
    assert checked.values == pytest.approx((1, 1))
