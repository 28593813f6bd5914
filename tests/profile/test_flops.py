from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import (
    Axis,
    NeuronGroup,
    Neurons,
    choose_random,
    map_neurons,
    state_of,
    stream,
)
from fedspu.models.paper import CIFARNet, EMNISTNet, SpeechNet
from fedspu.neurons.choose import choose_ordered
from fedspu.partial.weight import Mode
from fedspu.profile.flops import flop_limits
from tests.profile.nets import mlp, resnet18


def limits(model: nn.Module, x: Tensor, *shares: float) -> list[dict[Mode, float]]:
    neurons = map_neurons(model, x)
    found = [
        flop_limits(model, neurons, choose_random(neurons, p, stream(0, "neurons")), x)
        for p in shares
    ]
    assert all(limit is not None for limit in found)
    return [limit for limit in found if limit is not None]


def test_two_layers_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    (half,) = limits(model, torch.randn(2, 4), 0.5)
    # Forward 24 + 12; weights half of each; the second input's gradient for 3 of 6.
    assert half["exact"] == pytest.approx((36 + 12 + 6 + 6) / (36 + 36 + 12))
    assert half["truncated"] == half["exact"]


def test_exact_gradients_flow_through_the_frozen_neurons_of_later_layers() -> None:
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
    (half,) = limits(nn.Sequential(*layers), torch.randn(2, 4), 0.5)
    dense = 3 + 3 + 2
    assert half["exact"] == pytest.approx((3 + 0.5 + 0.25 + 0.5 + 0.5 + 1) / dense)
    assert half["truncated"] == pytest.approx(
        (3 + 0.5 + 0.25 + 0.5 + 0.25 + 0.5) / dense
    )


KNOWN: list[tuple[Callable[[], nn.Module], tuple[int, ...], Mode, list[float]]] = [
    (EMNISTNet, (1, 28, 28), "exact", [0.46, 0.56, 0.68, 0.83]),
    (EMNISTNet, (1, 28, 28), "truncated", [0.39, 0.48, 0.61, 0.78]),
    (CIFARNet, (3, 32, 32), "exact", [0.52, 0.60, 0.68, 0.79]),
    (SpeechNet, (1, 32, 32), "exact", [0.44, 0.55, 0.68, 0.83]),
    (lambda: mlp(1024, 3), (1024,), "exact", [0.56, 0.64, 0.74, 0.86]),
    (lambda: mlp(784, 4), (784,), "exact", [0.59, 0.66, 0.75, 0.86]),
]


@pytest.mark.parametrize(("build", "shape", "mode", "wanted"), KNOWN)
def test_known_networks(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    mode: Mode,
    wanted: list[float],
) -> None:
    found = limits(build(), torch.randn(2, *shape), 0.2, 0.4, 0.6, 0.8, 1.0)
    assert [each[mode] for each in found] == pytest.approx([*wanted, 1.0], abs=0.01)


def test_resnet_18() -> None:
    found = limits(resnet18(), torch.randn(2, 3, 32, 32), 0.2, 0.4, 0.6, 0.8)
    exact, truncated = zip(*(limit.values() for limit in found), strict=True)
    assert exact == pytest.approx([0.66, 0.71, 0.78, 0.87], abs=0.01)
    assert truncated == pytest.approx([0.36, 0.44, 0.57, 0.76], abs=0.01)


def by_hand(*axes: Axis, **shapes: tuple[int, ...]) -> Neurons:
    return Neurons((NeuronGroup("hidden", 6, axes),), shapes)


class Bare(nn.Module):
    """The first network again, with a function and products of bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 4))
        self.second = nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.first).relu() @ self.second


def test_functions_and_bare_parameters_are_counted() -> None:
    neurons = by_hand(Axis("first", 0), Axis("second", 0), first=(6, 4), second=(6, 2))
    found = flop_limits(Bare(), neurons, choose_ordered(neurons, 0.5), torch.ones(2, 4))
    assert found == pytest.approx({"exact": 60 / 84, "truncated": 60 / 84})


class Computed(nn.Module):
    """A weight made of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 4))
        self.scale = nn.Parameter(torch.randn(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.first * self.scale)


def test_a_weight_that_is_computed_counts_in_full() -> None:
    neurons = by_hand(Axis("first", 0), Axis("scale", 0), first=(6, 4), scale=(6, 1))
    active = choose_ordered(neurons, 0.5)
    found = flop_limits(Computed(), neurons, active, torch.ones(2, 4))
    assert found == {"exact": 1.0, "truncated": 1.0}


class Attending(nn.Module):
    """A projection, and attention of it to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        return F.scaled_dot_product_attention(y, y, y)


def test_the_scores_of_attention_count_in_full() -> None:
    neurons = by_hand(Axis("project.weight", 0), **{"project.weight": (6, 4)})
    active = choose_ordered(neurons, 0.5)
    found = flop_limits(Attending(), neurons, active, torch.ones(2, 5, 4))
    # Projection: 5 tokens x 4 x 6. Scores and their use: 5 x 5 x 6 each, and each has
    # two gradients of the same size.
    wanted = (120 + 60 + 3 * 300) / (120 + 120 + 3 * 300)
    assert found == pytest.approx({"exact": wanted, "truncated": wanted})


def test_recurrent_layers_are_counted() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)[0]
            return out

    model, x = Recurrent(), torch.ones(2, 5, 4)
    everything = by_hand()
    assert flop_limits(model, everything, choose_ordered(everything, 1), x) == {
        "exact": 1.0,
        "truncated": 1.0,
    }


def test_a_weight_that_never_trains_has_no_gradient_to_skip() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    (half,) = limits(model, torch.randn(2, 4), 0.5)
    assert half["exact"] == pytest.approx((36 + 6) / (36 + 12))


def test_a_model_without_products_has_no_limit() -> None:
    neurons = by_hand()
    model = nn.Sequential(nn.LayerNorm(4))
    active = choose_ordered(neurons, 1)
    assert flop_limits(model, neurons, active, torch.ones(2, 4)) is None


def test_a_model_that_checks_its_values_has_no_limit() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            if not bool(y.isfinite().all()):
                raise ValueError("not finite")
            return y

    neurons = by_hand()
    active = choose_ordered(neurons, 1)
    assert flop_limits(Strict(), neurons, active, torch.ones(2, 4)) is None


def test_the_model_is_left_as_it_was() -> None:
    model, x = EMNISTNet(), torch.randn(2, 1, 28, 28)
    before = state_of(model)
    limits(model, x, 0.5)
    after = state_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.backends.mkldnn.is_available() == torch._C._get_mkldnn_enabled()
