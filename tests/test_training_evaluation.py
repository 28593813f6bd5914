"""How a model is judged, and when a client stops."""

from dataclasses import replace
from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspu.tasks.classification import classification
from fedspu.tasks.language_model import language_model
from fedspu.tasks.regression import regression
from fedspu.tasks.segmentation import segmentation
from fedspu.tasks.task import IGNORED, Metric
from fedspu.training.early_stopping import blended_loss, has_stopped
from fedspu.training.evaluation import BATCH, Score, evaluate
from tests.oracles.zoo import chain, noise

# Judging ------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Answers each example with its own first values."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def judged(model: nn.Module, x: Tensor, y: Tensor) -> Score:
    """As a classifier."""
    return evaluate(model, x, y, classification)


def normed() -> nn.Module:
    return chain(fc=nn.Linear(6, 5), bn=nn.BatchNorm1d(5), drop=nn.Dropout(0.5))


def test_loss_and_accuracy_equal_a_hand_computation() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    labels = torch.tensor([0, 1, 1])
    # Cross-entropies: ln 2, ln(1 + e), ln(1 + e^-2). Right: the first (of equals the
    # first class is the answer) and the third.
    expected = (log(2) + log(1 + exp(1)) + log(1 + exp(-2))) / 3
    score = judged(Fixed(), logits, labels)
    assert score.loss == pytest.approx(expected, rel=1e-6)
    assert score.value == pytest.approx(2 / 3)


def test_batches_weigh_by_their_examples() -> None:
    # One full batch of right answers, then three wrong ones.
    logits = torch.tensor([[5.0, 0.0]]).repeat(BATCH + 3, 1)
    labels = torch.zeros(BATCH + 3, dtype=torch.long)
    labels[BATCH:] = 1
    score = judged(Fixed(), logits, labels)
    loss = (BATCH * log(1 + exp(-5)) + 3 * log(1 + exp(5))) / (BATCH + 3)
    assert score.loss == pytest.approx(loss, rel=1e-5)
    assert score.value == pytest.approx(BATCH / (BATCH + 3))


@pytest.mark.parametrize("count", [1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH + 7])
def test_each_example_is_judged_once(count: int) -> None:
    x, y = noise(count, 3), torch.arange(count) % 3
    score = judged(Fixed(), x, y)
    each = nn.functional.cross_entropy(x, y, reduction="none").double()
    assert score.loss == pytest.approx(float(each.mean()), rel=1e-5)
    right = sum(
        int(row.argmax()) == int(label) for row, label in zip(x, y, strict=True)
    )
    assert score.value == pytest.approx(right / count, rel=1e-12)


def test_regression_is_judged_by_squares_and_by_distances() -> None:
    x, y = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([1.5, 2.0, 4.0])
    score = evaluate(Fixed(), x, y, regression)
    assert score.loss == pytest.approx((0.25 + 0 + 4) / 3)
    assert score.value == pytest.approx((0.5 + 0 + 2) / 3)


def test_tokens_that_are_not_scored_do_not_count() -> None:
    x = torch.tensor([[[0.0, 0.0], [3.0, 0.0]], [[0.0, 1.0], [50.0, 0.0]]])
    y = torch.tensor([[0, 0], [1, IGNORED]])
    score = evaluate(Fixed(), x, y, language_model)
    expected = (log(2) + log(1 + exp(-3)) + log(1 + exp(-1))) / 3
    assert score.loss == pytest.approx(expected, rel=1e-6)
    assert score.value == pytest.approx(exp(expected), rel=1e-6)


def test_overlaps_of_all_batches_make_one_metric() -> None:
    """It is not the mean of the batches' own values."""
    count = BATCH + 2
    y = torch.zeros(count, 1, 2, dtype=torch.long)
    y[BATCH:] = 1
    said = torch.zeros_like(y)
    said[BATCH:, 0, 0] = 1  # half of the second class is found
    scores = nn.functional.one_hot(said, 2).permute(0, 3, 1, 2).float()
    score = evaluate(Fixed(), scores, y, segmentation)
    first, second = 2 * BATCH / (2 * BATCH + 2), 2 / 4
    assert score.value == pytest.approx((first + second) / 2, rel=1e-12)


def test_a_metric_of_one_s_own_gets_each_batch_and_gives_one_number() -> None:
    sizes: list[int] = []

    def measure(output: Tensor, target: Tensor) -> Tensor:
        sizes.append(len(target))
        return torch.stack([output.sum(), output.max(), target.sum()]).double()

    metric = Metric("mine", measure, lambda sums: float(sums[0] + 10 * sums[2]))
    x, y = torch.ones(BATCH + 1, 2), torch.ones(BATCH + 1, dtype=torch.long)
    task = replace(classification, metric=metric)
    score = evaluate(Fixed(), x, y, task)
    assert sizes == [BATCH, 1]
    assert score.value == 12 * (BATCH + 1)
    assert score.loss == pytest.approx(log(2), rel=1e-5)  # still the task's own


def test_nothing_in_the_model_learns_from_what_it_is_judged_on() -> None:
    model = normed().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    judged(model, noise(4, 6) + 3, torch.tensor([0, 1, 2, 3]))
    after = model.state_dict()
    assert all(torch.equal(after[name], values) for name, values in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_is_judged_in_eval_mode() -> None:
    model, x, y = normed().train(), noise(4, 6), torch.tensor([0, 1, 2, 3])
    score = judged(model, x, y)  # batch statistics or dropout would differ
    with torch.no_grad():
        logits = model.eval()(x)
    loss = float(nn.functional.cross_entropy(logits, y))
    right = float((logits.argmax(1) == y).float().mean())
    assert score.loss == pytest.approx(loss, rel=1e-6)
    assert score.value == pytest.approx(right)


@pytest.mark.parametrize("is_training", [True, False])
def test_the_model_s_mode_is_as_before(is_training: bool) -> None:
    model = normed().train(is_training)
    judged(model, noise(2, 6), torch.tensor([0, 1]))
    assert [layer.training for layer in model.modules()] == [is_training] * 4


def test_a_layer_held_in_eval_mode_stays_in_it() -> None:
    model = normed().train()
    model.get_submodule("bn").eval()  # as one does to a pre-trained norm
    judged(model, noise(2, 6), torch.tensor([0, 1]))
    modes = {name: layer.training for name, layer in model.named_modules()}
    assert modes == {"": True, "fc": True, "bn": False, "drop": True}


def test_the_mode_is_restored_when_the_model_fails() -> None:
    model = normed().train()
    with pytest.raises(RuntimeError):
        judged(model, noise(2, 7), torch.tensor([0, 1]))
    assert model.training


def test_judging_moves_no_generator() -> None:
    model, before = normed().train(), torch.get_rng_state()
    judged(model, noise(2, 6), torch.tensor([0, 1]))
    assert torch.equal(torch.get_rng_state(), before)


# Early stopping -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "patience", "stops"),
    [
        ([], 1, False),
        ([2.0], 1, False),  # the first participation never stops
        ([2.0, 2.5], 1, True),
        ([2.0, 2.0], 1, False),  # strictly greater, as in Algorithm 2
        ([2.0, 1.5], 1, False),
        ([1.0, 2.0, 1.5], 1, False),  # compared with the one before, not with the best
        ([3.0, 1.0, 1.1], 1, True),
        ([2.0, 2.5], 2, False),
        ([2.0, 2.5, 2.6], 2, True),
        ([2.0, 2.5, 2.5], 2, False),
        ([2.0, 1.0, 1.5], 2, False),
        ([9.0, 1.0, 2.0, 3.0], 2, True),
        ([1.0, 2.0, 1.0, 2.0], 2, False),
        ([1.0, 2.0, 3.0], 3, False),
    ],
)
def test_a_client_stops_when_its_last_losses_each_exceed_the_one_before(
    losses: list[float], patience: int, stops: bool
) -> None:
    assert has_stopped(losses, patience) is stops


@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.0]), max_size=8),
    st.integers(min_value=1, max_value=4),
)
def test_no_loss_before_the_last_ones_matters(
    losses: list[float], patience: int
) -> None:
    """So a client need not remember more than its patience."""
    recent = losses[-patience - 1 :]
    assert has_stopped(recent, patience) is has_stopped(losses, patience)


def test_one_worse_loss_is_enough_unless_told_otherwise() -> None:
    assert has_stopped([1.0, 1.1])


def test_the_blend_weighs_the_training_loss() -> None:
    # Eq. 5 with the paper's λ = .7: .7 * 2 + .3 * 4.
    assert blended_loss(train_loss=2.0, val_loss=4.0, blend=0.7) == pytest.approx(2.6)


@pytest.mark.parametrize(("blend", "loss"), [(1.0, 2.0), (0.0, 4.0)])
def test_a_blend_of_one_is_training_and_of_none_validation(
    blend: float, loss: float
) -> None:
    assert blended_loss(2.0, 4.0, blend) == loss
