"""A kind of layer that fedspu does not know, taught by one registered class."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu import choose_random, extract, map_neurons, slim_model, state_of, stream
from fedspu.neurons.layers import KINDS, kind_of
from fedspu.neurons.layers.convolution import Convolution
from fedspu.neurons.layers.kind import LayerKind
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
    assert not any(group.slim for group in groups)  # it stores its width


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
