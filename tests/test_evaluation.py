from math import exp, log

import pytest
import torch
from torch import Tensor, nn

from fedspu.training import BATCH, evaluate
from tests.oracles.zoo import chain, noise


class Fixed(nn.Module):
    """Answers each example with its own first values."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def normed() -> nn.Module:
    return chain(fc=nn.Linear(6, 5), bn=nn.BatchNorm1d(5), drop=nn.Dropout(0.5))


def test_loss_and_accuracy_equal_a_hand_computation() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    labels = torch.tensor([0, 1, 1])
    # Cross-entropies: ln 2, ln(1 + e), ln(1 + e^-2). Right: the first (of equals the
    # first class is the answer) and the third.
    expected = (log(2) + log(1 + exp(1)) + log(1 + exp(-2))) / 3
    score = evaluate(Fixed(), logits, labels)
    assert score.loss == pytest.approx(expected, rel=1e-6)
    assert score.accuracy == pytest.approx(2 / 3)


def test_batches_weigh_by_their_examples() -> None:
    # One full batch of right answers, then three wrong ones.
    logits = torch.tensor([[5.0, 0.0]]).repeat(BATCH + 3, 1)
    labels = torch.zeros(BATCH + 3, dtype=torch.long)
    labels[BATCH:] = 1
    score = evaluate(Fixed(), logits, labels)
    loss = (BATCH * log(1 + exp(-5)) + 3 * log(1 + exp(5))) / (BATCH + 3)
    assert score.loss == pytest.approx(loss, rel=1e-5)
    assert score.accuracy == pytest.approx(BATCH / (BATCH + 3))


def test_nothing_in_the_model_learns_from_what_it_is_judged_on() -> None:
    model = normed().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    evaluate(model, noise(4, 6) + 3, torch.tensor([0, 1, 2, 3]))
    after = model.state_dict()
    assert all(torch.equal(after[name], values) for name, values in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_is_judged_in_eval_mode() -> None:
    model, x, y = normed().train(), noise(4, 6), torch.tensor([0, 1, 2, 3])
    score = evaluate(model, x, y)  # batch statistics or dropout would differ
    with torch.no_grad():
        logits = model.eval()(x)
    loss = float(nn.functional.cross_entropy(logits, y))
    right = float((logits.argmax(1) == y).float().mean())
    assert score.loss == pytest.approx(loss, rel=1e-6)
    assert score.accuracy == pytest.approx(right)


@pytest.mark.parametrize("is_training", [True, False])
def test_the_model_s_mode_is_as_before(is_training: bool) -> None:
    model = normed().train(is_training)
    evaluate(model, noise(2, 6), torch.tensor([0, 1]))
    assert [layer.training for layer in model.modules()] == [is_training] * 4


def test_a_layer_held_in_eval_mode_stays_in_it() -> None:
    model = normed().train()
    model.get_submodule("bn").eval()  # as one does to a pre-trained norm
    evaluate(model, noise(2, 6), torch.tensor([0, 1]))
    modes = {name: layer.training for name, layer in model.named_modules()}
    assert modes == {"": True, "fc": True, "bn": False, "drop": True}


def test_the_mode_is_restored_when_the_model_fails() -> None:
    model = normed().train()
    with pytest.raises(RuntimeError):
        evaluate(model, noise(2, 7), torch.tensor([0, 1]))
    assert model.training


def test_judging_moves_no_generator() -> None:
    model, before = normed().train(), torch.get_rng_state()
    evaluate(model, noise(2, 6), torch.tensor([0, 1]))
    assert torch.equal(torch.get_rng_state(), before)
