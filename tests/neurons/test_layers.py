"""A kind of layer that fedspu does not know, taught by one registered class."""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu import choose_random, extract, map_neurons, slim_model, state_of, stream
from fedspu.neurons.layers import KINDS, kind_of
from fedspu.neurons.layers.convolution import Convolution
from fedspu.neurons.layers.kind import LayerKind, Ports
from fedspu.neurons.scores import score_neurons
from tests.oracles.masked_training import WAYS, Way, own_setting, plain_script, sgd
from tests.oracles.masked_training import assert_same as assert_trains_the_same


class Conv1D(nn.Module):
    """A linear layer with its weight the other way round."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.nf = width_out
        self.weight = nn.Parameter(torch.randn(width_in, width_out) / width_in**0.5)
        self.bias = nn.Parameter(torch.randn(width_out))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(size)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Conv1D(4, 6), Conv1D(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.first(x))))
        scores: Tensor = self.head(x)
        return scores


@pytest.fixture
def taught() -> Iterator[None]:
    @fedspu.register(Conv1D)
    class TransposedLinear(fedspu.LinearLike):
        outputs = 1

        def resize(self, layer: Conv1D, cut: object) -> None:
            layer.nf = layer.weight.shape[1]

    yield
    del KINDS[Conv1D]


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def test_a_layer_is_known_by_what_it_does() -> None:
    groups = map_neurons(Net(), X).groups

    assert [(group.name, group.size) for group in groups] == [
        ("first", 6),
        ("second", 5),
    ]
    # It stores its width, which a slim copy changes.
    assert [(group.slim, group.counts) for group in groups] == [
        (True, ("first.nf",)),
        (True, ("second.nf",)),
    ]


class Sorted(nn.Linear):
    """A layer whose outputs change places with the example."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sort().values


def test_what_depends_on_the_order_is_always_active_and_named() -> None:
    model = nn.Sequential(Sorted(4, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.warns(fedspu.NeuronWarning, match=r"0\.weight.*operation sort"):
        neurons = map_neurons(model, X)

    assert [group.name for group in neurons.groups] == ["1"]


@pytest.mark.usefixtures("taught")
def test_one_registered_class_is_enough_to_map_and_to_prove() -> None:
    neurons = map_neurons(Net(), X)

    assert [(group.name, group.size) for group in neurons.groups] == [
        ("first", 6),
        ("second", 5),
    ]
    assert all(group.permutable and group.slim for group in neurons.groups)
    axes = {(axis.tensor, axis.dim) for axis in neurons.groups[0].axes}
    assert axes == {("first.weight", 1), ("first.bias", 0), ("second.weight", 0)}


@pytest.mark.usefixtures("taught")
def test_and_to_slim_and_to_score() -> None:
    model = Net()
    neurons = map_neurons(model, X)
    active = choose_random(neurons, 0.5, stream(0, "neurons"))
    slim = slim_model(model, neurons, active)

    assert slim.get_submodule("first").nf == 3
    assert slim(X).shape == (2, 3)
    payload = extract(state_of(model), neurons.blocks(active))
    assert all(torch.equal(payload[n], t) for n, t in slim.state_dict().items())

    scores = score_neurons(model, neurons, dict(model.named_parameters()), order=2)
    squares = model.first.weight.square().sum(0) + model.first.bias.square()
    assert torch.allclose(scores["first"], squares.sqrt().double(), atol=1e-6)


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_and_to_train_a_part_of_it(way: Way) -> None:
    what = own_setting(Net, 3, 4)
    with way.forced():
        assert_trains_the_same(way, what, plain_script(what, sgd, steps=3))


class OddConv(nn.Conv2d):
    """A subclass that nobody registered."""


def test_a_subclass_is_of_the_kind_of_its_class() -> None:
    assert isinstance(kind_of(OddConv(1, 1, 1)), Convolution)
    assert type(kind_of(nn.ReLU())) is LayerKind


# A black box --------------------------------------------------------------------------


class BlackBox(torch.autograd.Function):
    """Attention in a language of its own: NumPy, which nobody can look into."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(qkv)
        ctx.heads = heads
        split = qkv.detach().numpy().reshape(*qkv.shape[:2], 3, heads, -1)
        q, k, v = split.transpose(2, 0, 3, 1, 4)
        weights = np.exp(q @ k.swapaxes(-1, -2))
        mixed = weights / weights.sum(-1, keepdims=True) @ v
        return torch.from_numpy(mixed.swapaxes(1, 2).reshape(*qkv.shape[:2], -1).copy())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [qkv] = ctx.saved_tensors
        with torch.enable_grad():
            again = qkv.detach().requires_grad_()
            out = plain_attention(again, ctx.heads)
            [grad] = torch.autograd.grad(out, again, grads[0])
        return grad, None


def plain_attention(qkv: Tensor, heads: int) -> Tensor:
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return mixed.transpose(1, 2).flatten(2)


class FastAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 4, nn.Linear(6, 24), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = BlackBox.apply(self.qkv(x), self.heads)  # type: ignore[no-untyped-call]  # PyTorch's
        out: Tensor = self.out(mixed)
        return out


def with_a_black_box() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), FastAttention(), nn.Linear(6, 3))


@pytest.fixture
def told() -> Iterator[None]:
    @fedspu.register(FastAttention)
    class FastAttentionKind(fedspu.LayerKind):
        def stand_in(self, layer: FastAttention) -> dict[nn.Module, Ports]:
            def forward(self: FastAttention, x: Tensor) -> Tensor:
                out: Tensor = self.out(plain_attention(self.qkv(x), self.heads))
                return out

            layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]  # a copy
            return {}

    yield
    del KINDS[FastAttention]


@pytest.mark.filterwarnings("ignore::fedspu.NeuronWarning")
def test_the_heads_in_a_black_box_are_not_found() -> None:
    groups = map_neurons(with_a_black_box(), torch.randn(2, 5, 4)).groups

    assert not any("1.qkv.weight" in g.tensors and g.size == 4 for g in groups)


@pytest.mark.usefixtures("told")
def test_a_stand_in_shows_the_heads_in_a_black_box() -> None:
    groups = map_neurons(with_a_black_box(), torch.randn(2, 5, 4)).groups

    [heads] = [group for group in groups if group.size == 4]
    assert heads.permutable
    assert {(axis.tensor, axis.dim) for axis in heads.axes} == {
        ("1.qkv.weight", 0),
        ("1.qkv.bias", 0),
        ("1.out.weight", 1),
    }


def test_a_stand_in_that_is_wrong_is_not_believed() -> None:
    @fedspu.register(FastAttention)
    class Wrong(fedspu.LayerKind):
        def stand_in(self, layer: FastAttention) -> dict[nn.Module, Ports]:
            def forward(self: FastAttention, x: Tensor) -> Tensor:
                out: Tensor = self.out(self.qkv(x)[..., 2::3])
                return out

            layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]  # a copy
            return {}

    try:
        with pytest.warns(fedspu.NeuronWarning, match=r"1\.qkv\.weight.*permuting"):
            groups = map_neurons(with_a_black_box(), torch.randn(2, 5, 4)).groups
    finally:
        del KINDS[FastAttention]
    assert not any("1.qkv.bias" in group.tensors for group in groups)
