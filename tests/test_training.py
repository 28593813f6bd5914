import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspu import choose_random, map_neurons, state_of
from fedspu.errors import SettingsError, TrainingError
from fedspu.training import OPTIMIZERS, Recipe, batches, make_optimizer, train
from tests.oracles.zoo import chain, noise


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def mlp() -> nn.Module:
    return chain(fc1=nn.Linear(6, 8), relu=nn.ReLU(), fc2=nn.Linear(8, 3)).double()


def data(count: int) -> tuple[Tensor, Tensor]:
    return noise(count, 6).double(), torch.arange(count) % 3


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
    monkeypatch.setattr("fedspu.partial.chain.run.SMALLEST", 0)
    found = []
    lean: dict[str, Any] = {"saves": "lean"}
    for options in ({}, lean):
        torch.manual_seed(0)
        model, (x, y) = mlp(), data(9)
        neurons = map_neurons(model, x)
        active = choose_random(neurons, 0.5, rng())
        recipe = Recipe(epochs=3, batch_size=4, **options)
        loss = train(model, neurons, active, x, y, recipe, rng(3))
        found.append((loss, state_of(model)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-10)
    for name, values in found[0][1].items():
        assert torch.allclose(values, found[1][1][name], rtol=0, atol=1e-10)


def test_training_all_neurons_is_plain_training() -> None:
    model, (x, y) = mlp(), data(9)
    plain = copy.deepcopy(model)
    recipe = Recipe(epochs=2, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.01)
    neurons = map_neurons(model, x)

    train(model, neurons, neurons.everything(), x, y, recipe, rng(3))

    optimizer = torch.optim.SGD(
        plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01
    )
    order = rng(3)
    for _ in range(2):
        for batch in list(batches(9, 4, order)):
            optimizer.zero_grad()
            F.cross_entropy(plain(x[batch]), y[batch]).backward()
            optimizer.step()
    trained = state_of(model)
    assert all(
        torch.allclose(trained[name], values, rtol=0, atol=1e-12)
        for name, values in state_of(plain).items()
    )


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
    spied = Spied()
    neurons = map_neurons(spied, x)
    losses.clear()
    recipe = Recipe(epochs=2, batch_size=2, lr=0.5)
    loss = train(spied, neurons, neurons.everything(), x, y, recipe, rng())
    assert len(losses) == 10
    assert loss == pytest.approx(sum(losses) / 10, rel=1e-12)


def test_no_step_size_gives_the_model_s_own_loss() -> None:
    model, (x, y) = mlp(), data(5)
    neurons = map_neurons(model, x)
    recipe = Recipe(epochs=3, batch_size=2, lr=0.0)
    loss = train(model, neurons, neurons.everything(), x, y, recipe, rng())
    own = F.cross_entropy(model(x), y).item()
    assert loss == pytest.approx(own, rel=1e-12)


def test_only_active_entries_are_trained() -> None:
    model, (x, y) = mlp(), data(6)
    neurons = map_neurons(model, x)
    before = state_of(model)
    active = {"fc1": torch.tensor([1, 4])}
    recipe = Recipe(epochs=3, batch_size=2, optimizer="adamw", weight_decay=0.1)
    train(model, neurons, active, x, y, recipe, rng())
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
    neurons = map_neurons(model, x)
    train(model, neurons, {}, x, y, Recipe(epochs=1, batch_size=3), rng())
    assert int(model.get_buffer("bn.num_batches_tracked")) == 2


def test_one_stream_trains_to_one_model() -> None:
    x, y = data(20)
    first, recipe = mlp(), Recipe(epochs=2, batch_size=4)
    neurons = map_neurons(first, x)
    models = [copy.deepcopy(first) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        train(model, neurons, {"fc1": torch.arange(4)}, x, y, recipe, rng(seed))
    weights = [model.get_parameter("fc1.weight") for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_a_number_is_an_error_that_names_the_step_size(
    bad: float,
) -> None:
    model, (x, y) = mlp(), data(6)
    neurons = map_neurons(model, x)
    x[2, 3] = bad
    with pytest.raises(TrainingError, match=r"lower train.lr \(it is 0.25\)"):
        train(model, neurons, neurons.everything(), x, y, Recipe(lr=0.25), rng())


def test_a_diverging_client_is_an_error() -> None:
    model, (x, y) = mlp(), data(6)
    neurons = map_neurons(model, x)
    with pytest.raises(TrainingError):
        train(model, neurons, {"fc1": torch.arange(4)}, x, y, Recipe(lr=1e200), rng())
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimizer_is_made_by_its_name(name: str) -> None:
    recipe = Recipe(optimizer=name, lr=0.3, momentum=0.8, weight_decay=0.2)
    optimizer = make_optimizer([torch.zeros(2, requires_grad=True)], recipe)
    settings = optimizer.defaults
    assert type(optimizer) is OPTIMIZERS[name]
    assert (settings["lr"], settings["weight_decay"]) == (0.3, 0.2)
    assert settings.get("momentum", 0.8) == 0.8


def test_an_unknown_optimizer_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"'sdg': expected one of adam, adamw, sgd"):
        make_optimizer([torch.zeros(2)], Recipe(optimizer="sdg"))


# A loss of one's own, and a look at gradients -----------------------------------------


def test_a_loss_of_one_s_own_is_what_is_minimised_and_returned() -> None:
    model, (x, y) = mlp(), data(9)
    plain = copy.deepcopy(model)

    def smoothed(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels, label_smoothing=0.3)

    recipe = Recipe(epochs=2, batch_size=4, lr=0.1)
    neurons = map_neurons(model, x)
    active = neurons.everything()
    loss = train(model, neurons, active, x, y, recipe, rng(3), loss_of=smoothed)

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
    trained = state_of(model)
    assert all(
        torch.allclose(trained[name], values, rtol=0, atol=1e-12)
        for name, values in state_of(plain).items()
    )


def test_without_a_loss_of_one_s_own_it_is_the_cross_entropy() -> None:
    found = []
    for given_loss in ({}, {"loss_of": F.cross_entropy}):
        torch.manual_seed(0)
        model, (x, y) = mlp(), data(9)
        neurons = map_neurons(model, x)
        given_values: dict[str, Any] = dict(given_loss)
        loss = train(
            *(model, neurons, {"fc1": torch.arange(4)}, x, y),
            Recipe(epochs=2, batch_size=4),
            rng(3),
            **given_values,
        )
        found.append((loss, state_of(model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(v, found[1][1][n]) for n, v in found[0][1].items())


def test_a_loss_of_one_s_own_that_is_not_finite_is_an_error() -> None:
    model, (x, y) = mlp(), data(6)
    neurons = map_neurons(model, x)
    with pytest.raises(TrainingError, match="the training loss is nan"):
        train(
            *(model, neurons, neurons.everything(), x, y, Recipe(), rng()),
            loss_of=lambda scores, labels: scores.sum() * float("nan"),
        )


def test_after_each_backward_pass_the_batch_s_gradients_are_there() -> None:
    """Before the step, with all neurons active under the parameters' own names."""
    model, (x, y) = mlp(), data(9)
    plain = copy.deepcopy(model)
    neurons = map_neurons(model, x)
    seen: list[dict[str, Tensor]] = []

    def look() -> None:
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        seen.append({name: grad.clone() for name, grad in found.items()})

    recipe = Recipe(epochs=2, batch_size=4, lr=0.1)
    active = neurons.everything()
    train(model, neurons, active, x, y, recipe, rng(3), after_backward=look)

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
        neurons = map_neurons(model, x)
        count: list[int] = []
        given_values: dict[str, Any] = {}
        if looks:
            given_values["after_backward"] = lambda seen=count: seen.append(1)
        recipe = Recipe(epochs=3, batch_size=4, optimizer="adam")
        train(
            *(model, neurons, {"fc1": torch.tensor([1, 5])}, x, y, recipe, rng(3)),
            **given_values,
        )
        assert len(count) == (6 if looks else 0)  # three epochs of 4 and 5 examples
        found.append(state_of(model))
    assert all(torch.equal(values, found[1][n]) for n, values in found[0].items())
