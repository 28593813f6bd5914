"""What makes mapping quick must not change what is found."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu.neurons.calls import undisturbed
from fedspu.neurons.slimming import proof as slim_proof
from fedspu.neurons.tracing.rules.moves import _viewed
from tests.oracles.models import seeded
from tests.oracles.zoo import noise


def test_the_collector_of_garbage_is_left_as_it_was() -> None:
    gc.unfreeze()
    before = gc.get_threshold(), gc.isenabled()
    with undisturbed():
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.isenabled()) == before
    assert gc.get_freeze_count() == 0


def test_what_a_user_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        with undisturbed():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("slot", "old", "new"),
    [
        ((4, 1, 1), (4, 3, 2), (1, 4, 6)),
        ((1, 3, 1), (4, 3, 2), (1, 4, 6)),
        ((1, 1, 6), (4, 5, 6), (4, 5, 2, 3)),
        ((1, 5, 6), (4, 5, 6), (20, 6)),
        ((4, 1, 6), (4, 5, 6), (2, 2, 30)),
        ((1, 1), (1, 1), ()),
        ((6,), (6,), (1, 6, 1)),
    ],
)
def test_labels_of_a_view_are_those_of_the_whole_tensor(
    slot: Any, old: Any, new: Any
) -> None:
    labels = torch.arange(torch.Size(slot).numel()).view(slot)
    moved = _viewed(labels, old, new)
    assert torch.equal(moved.expand(new), labels.expand(old).reshape(new))


class Standardized(nn.Conv2d):
    """A convolution whose weight is normed first, as in nets without batch norms."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True
        )
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, padding=1)


def test_neurons_are_found_where_weights_are_normed() -> None:
    model = nn.Sequential(
        Standardized(3, 8, 3), nn.ReLU(), Standardized(8, 6, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip
    neurons = fedspu.map_neurons(model, noise(2, 3, 8, 8))
    axes = {
        group.name: {(axis.tensor, axis.dim) for axis in group.axes}
        for group in neurons.groups
    }
    assert axes == {
        "0": {("0.weight", 0), ("0.bias", 0), ("2.weight", 1)},
        "2": {("2.weight", 0), ("2.bias", 0), ("6.weight", 1)},
    }


def test_groups_that_were_not_tried_in_time_are_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counted(nn.Module):
        """Its code has the number of hidden neurons written down."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)
            self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x).relu().view(-1, 8)).relu()
            out: Tensor = self.d(self.c(x).relu())
            return out

    monkeypatch.setattr(slim_proof, "MOST_TRIALS", 1)
    monkeypatch.setattr(slim_proof, "LEAST_TRIALS", 1)
    neurons = fedspu.map_neurons(Counted(), noise(2, 6))
    assert [group.size for group in neurons.groups] == [8, 8, 8]
    assert all(group.slim and group.padded for group in neurons.groups)
    assert all(group.permutable for group in neurons.groups)


class Products(nn.Module):
    """Activations that are multiplied with one another: a chaotic map."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(nn.Linear(16, 32) for _ in range(24))
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.blocks:
            left, right = layer(x).chunk(2, -1)
            x = x + torch.sin(left * right)
        out: Tensor = self.last(x)
        return out


def test_a_model_that_amplifies_rounding_is_tried_with_smaller_changes() -> None:
    with seeded(0):
        model = Products()
    neurons = fedspu.map_neurons(model, noise(2, 6))
    assert [group.size for group in neurons.groups] == [16]
    assert neurons.groups[0].permutable
