"""Compiled code against float64 autograd, on random networks."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from fedspu.partial.chain.native.models import stages_of
from tests.partial.native.nets import (
    chains,
    distance,
    examples,
    float_gradients,
    has_one_value,
    is_as_good,
    native_gradients,
    parts,
    slow_gradients,
)

TOLERANCE = 2e-5


@given(
    chains(), st.integers(3, 40), st.sampled_from([0.2, 0.5, 1.0]), st.integers(0, 9)
)
def test_gradients_statistics_and_output(
    drawn: tuple[nn.Module, tuple[int, int, int]], number: int, p: float, seed: int
) -> None:
    model, shape = drawn
    x, y = examples(shape, number, seed)
    assume(not has_one_value(model, x))
    spans = parts(model, p, seed)
    start = copy.deepcopy(model)
    slow, wanted, grad, _ = slow_gradients(model, x, y)
    out, found = native_gradients(model, spans, x, grad.float())
    assert distance(out, wanted) < 1e-4
    assert is_as_good(found, start, x, y, spans)
    for parameter, before in zip(model.parameters(), start.parameters(), strict=True):
        assert torch.equal(parameter, before)
    for (name, buffer), (_, same) in zip(
        model.named_buffers(), slow.named_buffers(), strict=True
    ):
        if buffer.is_floating_point():
            assert distance(buffer, same) < 1e-5, name


@pytest.mark.parametrize("number", [1, 2, 15, 16, 17, 128, 257])
def test_every_batch_size(number: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 7, 2, stride=2),
        nn.GroupNorm(7, 7),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(7 * 2 * 2, 5),
    )
    x, y = examples((2, 9, 8), number)
    spans, start = parts(model, 0.5, 1), copy.deepcopy(model)
    _, wanted, grad, _ = slow_gradients(model, x, y)
    out, found = native_gradients(model, spans, x, grad.float())
    assert distance(out, wanted) < 1e-4
    assert is_as_good(found, start, x, y, spans)


def test_a_norm_refuses_one_value_as_pytorch_does() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    x = torch.randn(1, 3)
    with pytest.raises(ValueError, match="more than 1 value per channel") as theirs:
        model(x)
    with pytest.raises(ValueError, match="more than 1 value per channel") as ours:
        native_gradients(model, parts(model, 1.0, 0), x, torch.zeros(1, 5))
    assert str(ours.value) == str(theirs.value)


# Edges --------------------------------------------------------------------------------


def one_norm(weight: float, act: nn.Module, pool: nn.Module) -> nn.Sequential:
    """A norm with one weight for all channels, then an activation and a pool."""
    torch.manual_seed(1)
    features = 3 * pool(torch.zeros(1, 1, 6, 6)).numel()
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, bias=False),
        nn.BatchNorm2d(3),
        act,
        pool,
        nn.Flatten(),
        nn.Linear(features, 5),
    )
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    nn.init.constant_(norm.weight, weight)
    nn.init.constant_(norm.bias, 0.25)
    return model


ACTS = [nn.ReLU(), nn.Tanh(), nn.GELU(), nn.LeakyReLU(-0.5), nn.Identity()]
POOLS = [nn.MaxPool2d(2), nn.MaxPool2d((3, 2)), nn.AvgPool2d(2)]


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("weight", [1e-3, -1.0, 1.0, -20.0, 1e4])
def test_any_norm_weight(weight: float, act: nn.Module, pool: nn.Module) -> None:
    model = one_norm(weight, act, pool)
    x, y = examples((1, 6, 6), 21)
    start, grad = copy.deepcopy(model), slow_gradients(model, x, y)[2]
    spans = parts(model, 1.0, 0)
    _, found = native_gradients(model, spans, x, grad.float())
    assert is_as_good(found, start, x, y, spans)


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("weight", [0.0, 1e-30, -1e-30])
def test_a_norm_weight_that_makes_all_equal(
    weight: float, act: nn.Module, pool: nn.Module
) -> None:
    """In float32 all values are then the same, so a pool takes the first."""
    model = one_norm(weight, act, pool)
    x, y = examples((1, 6, 6), 21)
    grad, wanted = slow_gradients(model, x, y)[2], float_gradients(model, x, y)
    _, found = native_gradients(model, parts(model, 1.0, 0), x, grad.float())
    for name, parameter in wanted.items():
        assert distance(found[name], parameter.double()) < TOLERANCE, name


@pytest.mark.parametrize("window", [2, (2, 3), (3, 1), 6])
def test_the_first_of_equals_wins_a_pool(window: Any) -> None:
    """Whole numbers are exact in float32, so ties are ties in every way to compute."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(window), nn.Flatten())
    rng = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape, generator=rng).float()
    x = torch.randint(-1, 2, (19, 1, 6, 6), generator=rng).float()
    features = int(model(x).shape[1])
    head = nn.Linear(features, 5)
    head.weight.data = torch.randint(-3, 4, head.weight.shape, generator=rng).float()
    model.append(head)
    out = model(x)
    grad = torch.randint(-3, 4, out.shape, generator=rng).float()
    out.backward(grad)
    _, found = native_gradients(model, parts(model, 1.0, 0), x, grad)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(found[name], parameter.grad), name


NETS = {
    "conv": nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5)
    ),
    "norm": one_norm(1.0, nn.ReLU(), nn.MaxPool2d(2)),
    "tanh": one_norm(1.0, nn.Tanh(), nn.AvgPool2d(2)),
    "gelu": one_norm(1.0, nn.GELU(), nn.MaxPool2d(2)),
    "linear": nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.ReLU(), nn.Linear(4, 5)),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NETS)
def test_what_is_not_finite_is_not_hidden(name: str, value: float) -> None:
    model = NETS[name]
    x, y = examples((1, 6, 6), 20)
    for place in ("input", *dict(model.named_parameters())):
        broken, z = copy.deepcopy(model), x.clone()
        if place == "input":
            z[3, 0, 2, 2] = value
        else:
            dict(broken.named_parameters())[place].data.view(-1)[0] = value
        theirs = F.cross_entropy(broken(z), y)
        ours, _ = native_gradients(broken, parts(broken, 1.0, 0), z, torch.zeros(20, 5))
        ours = F.cross_entropy(ours, y)
        # PyTorch's batch norm also makes NaN of an infinite weight; ours need not.
        if theirs.isfinite() or value != value:
            assert bool(ours.isfinite()) == bool(theirs.isfinite()), place


def test_images_do_not_see_each_other_without_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(64, 5),
    )
    x, _ = examples((1, 6, 6), 33)
    spans = parts(model, 1.0, 0)
    whole, _ = native_gradients(model, spans, x, torch.zeros(33, 5))
    alone, _ = native_gradients(model, spans, x[32:], torch.zeros(1, 5))
    assert torch.equal(whole[32:], alone)
    assert len(stages_of(model, (1, 6, 6))) == 2
