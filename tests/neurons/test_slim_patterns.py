"""Slim copies of models as their authors write them: own norms, stored numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedspu import Axis, NeuronGroup, map_neurons, slim_model
from fedspu.neurons.calls import undisturbed
from fedspu.neurons.probe import Probe
from fedspu.neurons.proof import prove
from tests.oracles.models import seeded


class OwnNorm(nn.Module):
    """A norm that a model computes by hand, between two layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.rand(8) + 0.5)
        self.bare = nn.LayerNorm(8, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(self.fc1(x)) @ self.fc2.weight.t() + self.fc2.bias

    def normed(self, h: Tensor) -> Tensor:
        if self.kind == "bare":  # not by hand, but without a weight that has its size
            bare: Tensor = self.bare(h)
            return self.gain * bare
        if self.kind == "rms":
            return self.gain * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.kind == "layer":
            centred = h - h.mean(-1, keepdim=True)
            return (
                self.gain * centred / (centred.pow(2).mean(-1, keepdim=True) + 1).sqrt()
            )
        if self.kind == "var":
            return self.gain * (h - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True)
        return self.gain * torch.sigmoid(h) / torch.sigmoid(h).amax(-1, keepdim=True)


@pytest.mark.parametrize("kind", ["rms", "layer", "var", "max", "bare"])
def test_a_norm_by_hand_is_taken_over_the_neurons_that_are_left(kind: str) -> None:
    with seeded(0):
        model = OwnNorm(kind)
        x = torch.randn(4, 6)
    neurons = map_neurons(model, x)
    [group] = neurons.groups
    assert (group.size, group.slim) == (8, True)
    left = torch.tensor([0, 3, 4])
    slim: Any = slim_model(model, neurons, {group.name: left})
    assert slim.fc1.weight.shape == (3, 6)
    expected = OwnNorm(kind)  # the same formula on three neurons
    expected.fc1, expected.fc2 = nn.Linear(6, 3), nn.Linear(3, 3)
    with torch.no_grad():
        expected.fc1.weight.copy_(model.fc1.weight[left])
        expected.fc1.bias.copy_(model.fc1.bias[left])
        expected.fc2.weight.copy_(model.fc2.weight[:, left])
        expected.fc2.bias.copy_(model.fc2.bias)
        expected.gain = nn.Parameter(model.gain[left])
        expected.bare = nn.LayerNorm(3, elementwise_affine=False)
    assert torch.allclose(slim(x), expected(x))


class Heads(nn.Module):
    """An attention that takes its number of heads from where ``stores`` says."""

    def __init__(self, stores: bool, width: int = 8, scale: float = 1.0) -> None:
        super().__init__()
        self.num_heads, self.inner, self.stores = 4, 4 * width, stores
        self.scale = scale
        self.qkv = nn.Linear(6, 3 * self.inner)
        self.out = nn.Linear(self.inner, 6)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.num_heads if self.stores else 4
        q, k, v = (
            part.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = (3 * q @ k.transpose(-1, -2)).softmax(-1) @ v
        mixed = mixed.transpose(1, 2).flatten(2)
        if self.stores:
            mixed = mixed.view(*x.shape[:2], self.inner)
        out: Tensor = x + self.scale * self.out(mixed)
        return out


def slim_heads(**settings: Any) -> tuple[Any, NeuronGroup, Any, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(5, 6), Heads(**settings), nn.Linear(6, 3))
        x = torch.randn(2, 4, 5)
    neurons = map_neurons(model, x)
    group = next(group for group in neurons.groups if group.size == 4)
    active = neurons.everything() | {group.name: torch.tensor([0, 2, 3])}
    slim = slim_model(model, neurons, active) if group.slim else model
    return model, group, slim, x


@pytest.mark.parametrize(
    "width", [8, 4]
)  # with 4, a head is as wide as there are heads
def test_a_stored_number_of_heads_is_changed_in_a_slim_copy(width: int) -> None:
    model, group, slim, x = slim_heads(stores=True, width=width)
    assert group.slim
    assert set(group.counts) == {"1.num_heads", "1.inner"}
    assert (slim[1].num_heads, slim[1].inner) == (3, 3 * width)
    assert (model[1].num_heads, model[1].inner) == (4, 4 * width)
    with torch.no_grad():
        gone = slice(width, 2 * width)
        model[1].out.weight[:, gone] = 0
        assert torch.allclose(slim(x), model(x), atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-6])  # however little the heads matter
def test_heads_whose_number_is_in_the_code_are_not_slimmed(scale: float) -> None:
    _, group, _, _ = slim_heads(stores=False, scale=scale)
    assert group.permutable
    assert not group.slim
    assert group.counts == ()


def test_neurons_that_do_not_matter_are_not_proved() -> None:
    class Whisper(nn.Module):
        """Adds the neurons of fc1, in another order, too softly to be noticed."""

        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.fc3 = (
                nn.Linear(6, 8),
                nn.Linear(8, 3),
                nn.Linear(6, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc3(x) + 1e-10 * self.fc2(self.fc1(x).roll(1, -1))
            return logits

    axes = (Axis("fc1.weight", 0), Axis("fc1.bias", 0), Axis("fc2.weight", 1))
    wrong = NeuronGroup("fc1", 8, axes, permutable=True)
    with undisturbed():
        right, _ = prove(Probe(Whisper(), torch.randn(4, 6)), [wrong], set())
    assert right == []
