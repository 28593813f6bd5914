import copy
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspu import State, choose_random, map_neurons, state_of
from fedspu.errors import SettingsError, TrainingError
from fedspu.random_streams import torch_stream
from fedspu.resolve import resolve
from fedspu.settings import TrainSettings
from fedspu.tasks.classification import classification
from fedspu.tasks.language_model import language_model
from fedspu.tasks.task import IGNORED, Loss
from fedspu.training.epochs import batches, make_optimizer, train
from tests.oracles.training import data, local, mlp, rng
from tests.oracles.zoo import chain, noise, tokens

# Batches ------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_the_batches_of_an_epoch_hold_each_example_once(
    count: int, size: int, seed: int
) -> None:
    seen = torch.cat(list(batches(count, size, rng(seed))))
    assert sorted(seen.tolist()) == list(range(count))


@pytest.mark.parametrize(
    ("count", "size", "lengths"),
    [
        (8, 4, [4, 4]),
        (10, 4, [4, 4, 2]),
        (9, 4, [4, 5]),  # a last batch of one joins the one before
        (5, 4, [5]),
        (4, 5, [4]),
        (1, 4, [1]),  # nothing to join
        (2, 1, [2]),
        (3, 1, [1, 2]),
    ],
)
def test_a_last_batch_of_one_joins_the_one_before(
    count: int, size: int, lengths: list[int]
) -> None:
    assert [len(batch) for batch in batches(count, size, rng())] == lengths


def test_one_stream_gives_one_order_of_examples() -> None:
    orders = [torch.cat(list(batches(50, 8, rng(s)))).tolist() for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_the_next_epoch_has_another_order() -> None:
    stream = rng()
    first = torch.cat(list(batches(50, 8, stream))).tolist()
    assert torch.cat(list(batches(50, 8, stream))).tolist() != first


# Training -----------------------------------------------------------------------------


def test_saving_memory_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspu.partial.chain.autograd.MIN_VALUES", 0)
    found = []
    for saves in ("fast", "lean"):
        torch.manual_seed(0)
        model, (x, y) = mlp(), data(9)
        active = choose_random(map_neurons(model, x), 0.5, rng())
        loss = train(local(model, x, y, active, epochs=3, batch_size=4, saves=saves))
        found.append((loss, state_of(model)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-10)
    for name, values in found[0][1].items():
        assert torch.allclose(values, found[1][1][name], rtol=0, atol=1e-10)


def test_training_all_neurons_is_plain_training() -> None:
    model, (x, y) = mlp(), data(9)
    plain = copy.deepcopy(model)
    given: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}

    train(local(model, x, y, epochs=2, batch_size=4, **given))

    optimizer = torch.optim.SGD(plain.parameters(), **given)
    order = rng(3)
    for _ in range(2):
        for batch in list(batches(9, 4, order)):
            optimizer.zero_grad()
            F.cross_entropy(plain(x[batch]), y[batch]).backward()
            optimizer.step()
    assert_close(state_of(model), state_of(plain))


def assert_close(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.allclose(found[name], values, rtol=0, atol=1e-12)


def test_the_loss_is_the_mean_over_examples_with_the_weights_they_met() -> None:
    model, (x, y) = mlp(), data(5)  # batches of 2 and 3
    losses: list[float] = []

    class Spied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.inner(x)
            labels = torch.stack([y[int((row == own).all(1).nonzero())] for row in x])
            losses.extend(F.cross_entropy(logits, labels, reduction="none").tolist())
            return logits

    own = x
    prepared = local(Spied(), x, y, epochs=2, batch_size=2, lr=0.5)
    losses.clear()
    loss = train(prepared)
    assert len(losses) == 10
    assert loss == pytest.approx(sum(losses) / 10, rel=1e-12)


def test_the_loss_is_the_mean_over_scored_targets_alone() -> None:
    """A batch with fewer of them weighs less."""
    model = chain(embed=nn.Embedding(4, 5), out=nn.Linear(5, 4)).double()
    x = tokens(5, 4, 4)
    y = x.clone()
    y[2:, 1:] = IGNORED  # 4 + 4 + 1 + 1 + 1 are scored, in batches of 2 and 3
    prepared = local(model, x, y, task=language_model, epochs=1, batch_size=2, lr=0.0)
    loss = train(prepared)
    each = -model(x).detach().log_softmax(-1).gather(2, x[..., None])[..., 0]
    expected = float(each[y != IGNORED].sum()) / 11
    assert loss == pytest.approx(expected, rel=1e-12)


def test_no_step_size_gives_the_model_s_own_loss() -> None:
    model, (x, y) = mlp(), data(5)
    loss = train(local(model, x, y, epochs=3, batch_size=2, lr=0.0))
    own = F.cross_entropy(model(x), y).item()
    assert loss == pytest.approx(own, rel=1e-12)


def test_only_active_entries_are_trained() -> None:
    model, (x, y) = mlp(), data(6)
    before = state_of(model)
    active = {"fc1": torch.tensor([1, 4])}
    prepared = local(
        *(model, x, y, active),
        epochs=3,
        batch_size=2,
        optimizer="adamw",
        weight_decay=0.1,
    )
    train(prepared)
    after = state_of(model)
    moved = {name: after[name] != before[name] for name in before}
    rows = torch.tensor([False, True, False, False, True, False, False, False])
    assert torch.equal(moved["fc1.weight"], rows[:, None].expand(8, 6))
    assert torch.equal(moved["fc1.bias"], rows)
    assert torch.equal(moved["fc2.weight"], rows.expand(3, 8))
    assert moved["fc2.bias"].all()


def test_training_is_done_in_train_mode() -> None:
    model = chain(fc=nn.Linear(6, 3), bn=nn.BatchNorm1d(3)).eval()
    x, y = noise(6, 6), torch.arange(6) % 3
    train(local(model, x, y, {}, epochs=1, batch_size=3))
    assert int(model.get_buffer("bn.num_batches_tracked")) == 2


def test_one_stream_trains_to_one_model() -> None:
    x, y = data(20)
    first = mlp()
    models = [copy.deepcopy(first) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        active = {"fc1": torch.arange(4)}
        train(local(model, x, y, active, seed=seed, epochs=2, batch_size=4))
    weights = [model.get_parameter("fc1.weight") for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_another_number_of_epochs_is_all_that_changes() -> None:
    model, (x, y) = mlp(), data(6)
    before = local(model, x, y, epochs=2, batch_size=4, lr=0.3)
    after = before.with_epochs(5)
    assert after.settings == TrainSettings(epochs=5, batch_size=4, lr=0.3)
    assert replace(after, settings=before.settings) == before


def test_dropout_is_drawn_inside_the_stream_of_the_training() -> None:
    """And PyTorch's own generator is left as it was."""
    x, y = data(8)
    found = []
    for seed in (1, 2):
        torch.manual_seed(0)
        layers = {"fc1": nn.Linear(6, 8), "drop": nn.Dropout(0.5)}
        model = chain(**layers, fc2=nn.Linear(8, 3)).double()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        dropout = partial(torch_stream, 0, "dropout")
        train(replace(local(model, x, y, epochs=1, batch_size=4), dropout=dropout))
        assert torch.equal(torch.get_rng_state(), before)
        found.append(state_of(model))
    assert all(torch.equal(values, found[1][n]) for n, values in found[0].items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_a_number_is_an_error_that_names_the_step_size(
    bad: float,
) -> None:
    model, (x, y) = mlp(), data(6)
    prepared = local(model, x, y, lr=0.25)
    x[2, 3] = bad
    with pytest.raises(TrainingError, match=r"lower train.lr \(it is 0.25\)"):
        train(prepared)


def test_a_diverging_client_is_an_error() -> None:
    model, (x, y) = mlp(), data(6)
    with pytest.raises(TrainingError):
        train(local(model, x, y, {"fc1": torch.arange(4)}, lr=1e200))
    assert all(type(p) is nn.Parameter for p in model.parameters())


# Optimizers ---------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimizer_is_made_by_its_name(name: Any) -> None:
    settings = TrainSettings(optimizer=name, lr=0.3, momentum=0.8, weight_decay=0.2)
    optimizer = make_optimizer([torch.zeros(2, requires_grad=True)], settings)
    found = optimizer.defaults
    assert type(optimizer) is OPTIMIZERS[name]
    assert (found["lr"], found["weight_decay"]) == (0.3, 0.2)
    assert found.get("momentum", 0.8) == 0.8


def test_every_optimizer_that_can_be_set_is_made() -> None:
    field = TrainSettings.model_fields["optimizer"]
    assert set(get_args(field.annotation)) == set(OPTIMIZERS)


def test_an_unknown_optimizer_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"train.optimizer = 'sdg'") as caught:
        resolve({"train.optimizer": "sdg"})
    assert all(f"'{name}'" in str(caught.value) for name in OPTIMIZERS)


# A loss of one's own, and a look at gradients -----------------------------------------


def smoothed(scores: Tensor, labels: Tensor, /, *, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(scores, labels, reduction=reduction, label_smoothing=0.3)


def broken(scores: Tensor, labels: Tensor, /, *, reduction: str = "mean") -> Tensor:
    return scores.sum() * float("nan")


def test_a_loss_of_one_s_own_is_what_is_minimised_and_returned() -> None:
    model, (x, y) = mlp(), data(9)
    plain = copy.deepcopy(model)
    loss = train(local(model, x, y, epochs=2, batch_size=4, lr=0.1), smoothed)

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    order, total = rng(3), 0.0
    for _ in range(2):
        for batch in list(batches(9, 4, order)):
            optimizer.zero_grad()
            by_hand = smoothed(plain(x[batch]), y[batch])
            by_hand.backward()
            optimizer.step()
            total += by_hand.item() * len(batch)
    assert loss == pytest.approx(total / 18, rel=1e-12)
    assert_close(state_of(model), state_of(plain))


@pytest.mark.parametrize("own", [F.cross_entropy, classification.loss])
def test_without_a_loss_of_one_s_own_it_is_the_task_s(own: Loss) -> None:
    """Which is the cross-entropy in classification."""
    found = []
    for loss_of in (None, own):
        torch.manual_seed(0)
        model, (x, y) = mlp(), data(9)
        prepared = local(model, x, y, {"fc1": torch.arange(4)}, epochs=2, batch_size=4)
        found.append((train(prepared, loss_of), state_of(model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(v, found[1][1][n]) for n, v in found[0][1].items())


def test_a_loss_of_one_s_own_that_is_not_finite_is_an_error() -> None:
    model, (x, y) = mlp(), data(6)
    with pytest.raises(TrainingError, match="the training loss is nan"):
        train(local(model, x, y), broken)


def test_after_each_backward_pass_the_batch_s_gradients_are_there() -> None:
    """Before the step, with all neurons active under the parameters' own names."""
    model, (x, y) = mlp(), data(9)
    plain = copy.deepcopy(model)
    seen: list[dict[str, Tensor]] = []

    def look() -> None:
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        seen.append({name: grad.clone() for name, grad in found.items()})

    prepared = local(model, x, y, epochs=2, batch_size=4, lr=0.1)
    train(prepared, after_backward=look)

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    order, expected = rng(3), []
    for _ in range(2):
        for batch in list(batches(9, 4, order)):
            optimizer.zero_grad()
            F.cross_entropy(plain(x[batch]), y[batch]).backward()
            expected.append({n: p.grad for n, p in plain.named_parameters()})
            optimizer.step()
            plain = copy.deepcopy(plain)  # the next gradients have tensors of their own
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert len(seen) == len(expected) == 4
    for mine, by_hand in zip(seen, expected, strict=True):
        assert mine.keys() == by_hand.keys()
        for name, grad in by_hand.items():
            assert grad is not None
            assert torch.allclose(mine[name], grad, rtol=0, atol=1e-12)


def test_a_look_at_gradients_changes_nothing() -> None:
    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        model, (x, y) = mlp(), data(9)
        count: list[int] = []
        given_values: dict[str, Any] = {}
        if looks:
            given_values["after_backward"] = lambda seen=count: seen.append(1)
        active = {"fc1": torch.tensor([1, 5])}
        prepared = local(model, x, y, active, epochs=3, batch_size=4, optimizer="adam")
        train(prepared, **given_values)
        assert len(count) == (6 if looks else 0)  # three epochs of 4 and 5 examples
        found.append(state_of(model))
    assert all(torch.equal(values, found[1][n]) for n, values in found[0].items())
