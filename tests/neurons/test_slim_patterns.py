"""Slim copies of models as their authors write them: own norms, stored numbers."""

import copy
import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedspu import Axis, NeuronGroup, extract, map_neurons, merge, slim_model
from fedspu.neurons.calls import undisturbed
from fedspu.neurons.probe import Probe
from fedspu.neurons.proof import prove
from fedspu.neurons.slim import slim_neurons
from fedspu.neurons.slimming.absent import Without
from fedspu.neurons.slimming.sizes import Sizes
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
def test_heads_whose_number_is_in_the_code_are_padded(scale: float) -> None:
    _, group, _, _ = slim_heads(stores=False, scale=scale)
    assert (group.permutable, group.slim, group.padded) == (True, True, True)
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


# Sizes in lines that reshape ----------------------------------------------------------


class Stream(nn.Module):
    """A residual stream with an attention whose lines have sizes written down."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_heads = kind, 2
        self.embed, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.fewer = nn.Conv1d(8, 6, 2, 2)
        self.key = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mixed(self.embed(x)))
        return logits.view(*x.shape[:2], 3)

    def mixed(self, h: Tensor) -> Tensor:
        batch, tokens, width = h.shape
        heads, each = self.num_heads, width // self.num_heads
        if self.kind == "router":  # all tokens in one row; as wide as the author knew
            return h.view(-1, 8).relu()
        if self.kind == "fewer":  # keys and values of every second token
            q = self.qkv(h)[..., :8].reshape(batch, tokens, heads, 4).transpose(1, 2)
            few = self.fewer(h.transpose(1, 2)).reshape(batch, 6, -1).transpose(1, 2)
            kv = self.key(few.relu()).reshape(batch, -1, 2, heads, each)
            k, v = kv.permute(2, 0, 3, 1, 4)
        else:
            qkv = self.qkv(h)
            if self.kind == "conv1d":
                qkv = torch.addmm(self.qkv.bias, h.view(-1, width), self.qkv.weight.t())
                qkv = qkv.view((batch, tokens, 24))
            each = each if self.kind == "computed" else 4
            q, k, v = qkv.reshape(batch, tokens, 3, heads, each).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        # As wide as the stream, says its author.
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return h + out


def stream(kind: str) -> tuple[Any, Any, Tensor]:
    with seeded(0):
        model = Stream(kind)
        x = torch.randn(2, 4, 5)
    with warnings.catch_warnings():  # no kind uses every layer
        warnings.simplefilter("ignore")
        neurons = map_neurons(model, x)
    return model, neurons, x


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        *product(("plain", "computed", "conv1d"), (["embed"], ["qkv"])),
        *product(("plain", "computed", "conv1d"), (["embed", "qkv"],)),
        ("router", ["embed"]),
        *product(["fewer"], (["embed"], ["fewer"], ["embed", "fewer"])),
    ],
)
def test_sizes_in_lines_that_reshape_are_worked_out(kind: str, cut: list[str]) -> None:
    model, neurons, x = stream(kind)
    left = {"embed": torch.tensor([0, 2, 5]), "qkv": torch.tensor([1])}
    left["fewer"] = torch.tensor([0, 3])
    groups = {group.name: group for group in neurons.groups}
    assert all(groups[name].slim for name in cut)
    assert neurons.resized

    active = neurons.everything() | {name: left[name] for name in cut}
    slim = slim_model(model, neurons, active)
    blocks = neurons.blocks(active)
    with torch.no_grad():  # the same model with zeros for what is gone
        for name, tensor in model.named_parameters():
            part = extract({name: tensor.clone()}, {name: blocks[name]})
            zeros = {name: torch.zeros_like(tensor)}
            tensor.copy_(merge(zeros, {name: blocks[name]}, part)[name])
    for given in (x, torch.randn(5, 4, 5)):  # any number of examples and tokens
        assert torch.allclose(slim(given), model(given), atol=1e-6)
    assert sum(p.numel() for p in slim.parameters()) < sum(
        p.numel() for p in model.parameters()
    )


def test_a_slim_copy_that_fails_leaves_reshapes_as_they_were() -> None:
    model, neurons, x = stream("plain")
    active = neurons.everything() | {"qkv": torch.tensor([1])}
    slim = slim_model(model, neurons, active)
    with pytest.raises(RuntimeError):
        slim(torch.randn(2, 3, 4))
    with pytest.raises(RuntimeError, match="invalid for input of size 6"):
        torch.zeros(6).view(4)
    assert slim(x).shape == (2, 4, 3)
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_slim_copy_with_sizes_that_are_worked_out_can_be_copied_and_slimmed() -> None:
    model, neurons, x = stream("plain")
    first = neurons.everything() | {"embed": torch.tensor([0, 2, 5, 6])}
    second = {name: torch.arange(len(kept)) for name, kept in first.items()}
    second["embed"] = torch.tensor([1, 3])
    once = neurons.everything() | {"embed": torch.tensor([2, 6])}
    slim = copy.deepcopy(slim_model(model, neurons, first))
    again = slim_model(slim, slim_neurons(neurons, first), second)
    assert torch.equal(again(x), slim_model(model, neurons, once)(x))


def test_a_slim_copy_with_sizes_that_are_worked_out_can_be_exported() -> None:
    model, neurons, x = stream("plain")
    active = neurons.everything() | {"embed": torch.tensor([0, 2, 5])}
    slim = slim_model(model, neurons, active).eval()
    sizes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(slim, (x,), dynamic_shapes=sizes).module()
    more = torch.randn(5, 4, 5)
    assert torch.allclose(exported(more), slim(more))


def test_other_ways_to_reshape_stay_as_they_are() -> None:
    with Sizes({}):
        assert torch.ones(1).view(()).shape == ()
        assert torch.ones(2).view(torch.int32).dtype == torch.int32
        assert torch.ones(6).reshape(shape=(2, 3)).shape == (2, 3)
        assert torch.ones(6).view(torch.Size([2, 3])).shape == (2, 3)
        assert torch.reshape(torch.ones(6), (3, -1)).shape == (3, 2)


def test_a_number_that_many_layers_store_is_changed_in_all_of_them() -> None:
    class Bare(nn.Module):
        """A norm without weights, as wide as it was told."""

        def __init__(self) -> None:
            super().__init__()
            self.shape = (8,)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(x, self.shape)

    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), Bare(), nn.ReLU(), Bare())
        model.append(nn.Linear(8, 3))
        x = torch.randn(4, 6)
    neurons = map_neurons(model, x)
    [group] = neurons.groups
    assert group.slim
    assert set(group.counts) == {"1.shape", "3.shape"}
    slim: Any = slim_model(model, neurons, {group.name: torch.tensor([0, 3, 4])})
    assert (slim[1].shape, slim[3].shape) == ((3,), (3,))
    assert slim(x).shape == (4, 3)


def test_a_norm_of_a_weight_is_taken_over_the_inputs_that_are_left() -> None:
    class Standard(nn.Conv2d):
        """A convolution whose rows of weights have mean 0 and spread 1."""

        def forward(self, x: Tensor) -> Tensor:
            rows = self.weight.reshape(1, self.out_channels, -1)
            weight = nn.functional.batch_norm(rows, None, None, training=True)
            return nn.functional.conv2d(x, weight.view_as(self.weight), self.bias)

    with seeded(0):
        model = nn.Sequential(Standard(2, 6, 3), nn.ReLU(), Standard(6, 3, 3))
        x = torch.randn(2, 2, 6, 6)
    neurons = map_neurons(model, x)
    [group] = neurons.groups
    left = torch.tensor([0, 3, 4])
    slim: Any = slim_model(model, neurons, {group.name: left})
    assert slim[2].weight.shape == (3, 3, 3, 3)
    expected: Any = nn.Sequential(Standard(2, 3, 3), nn.ReLU(), Standard(3, 3, 3))
    state = model.state_dict()
    expected[0].load_state_dict({k: state[f"0.{k}"][left] for k in ("weight", "bias")})
    expected[2].load_state_dict(
        {"weight": state["2.weight"][:, left], "bias": state["2.bias"]}
    )
    assert torch.allclose(slim(x), expected(x), atol=1e-6)


def test_channels_that_are_zero_by_themselves_are_not_absent() -> None:
    mine, others = (
        torch.tensor([c == "x" for c in text]) for text in ("xx....", "..xx..")
    )
    dead = torch.rand(3, 6) + 1
    dead[:, [0, 1, 2, 3]] = 0  # two are absent, two are zero because of a ReLU
    live = torch.rand(3, 6) + 1
    live[:, [0, 1]] = 0
    for first in (mine, others):
        without = Without([first, mine, others])
        for x in (live, dead):
            left = without.left(x, 1)
            assert left is not None
            assert left.tolist() == [2, 3, 4, 5]
