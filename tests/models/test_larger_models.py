"""The models to start from: sizes by hand, neurons proved, a step, a slim copy."""

import copy
import warnings
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedspu
from fedspu import Neurons, models
from fedspu.models.audio import AudioNet
from fedspu.models.mlp import MLP
from fedspu.models.mobilenet import STAGES, MobileNet
from fedspu.models.resnet import ResNet18
from fedspu.models.transformer import Transformer

LARGER = ("audio", "mlp", "mobilenet", "resnet18", "transformer")


@cache
def mapped(name: str) -> tuple[nn.Module, Neurons, torch.Tensor]:
    """A model, its table and two examples; nothing may be left unproved."""
    torch.manual_seed(0)
    model = models.build(name, 5)
    x = torch.randn(2, *models.find(name).input_shape)  # type: ignore[attr-defined]  # what the built-in ones have
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return model, fedspu.map_neurons(model, x), x


def learnable(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_size_of_the_mlp() -> None:
    hidden = 784 * 1024 + 1024 + 3 * (1024 * 1024 + 1024)
    assert learnable(MLP()) == hidden + 1024 * 10 + 10


def test_an_mlp_may_have_other_inputs_and_widths() -> None:
    model = MLP(3, num_inputs=64, widths=(20, 10))
    assert learnable(model) == 64 * 20 + 20 + 20 * 10 + 10 + 10 * 3 + 3
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 3)


def test_the_size_of_the_network_for_sound() -> None:
    convolutions = 32 * 80 + 32 * 32 * 3 + 64 * 32 * 3 + 128 * 64 * 3
    per_channel = 3 * (32 + 32 + 64 + 128)  # bias, and the norm's weight and bias
    assert learnable(AudioNet()) == convolutions + per_channel + 128 * 35 + 35


@pytest.mark.parametrize("length", [8000, 48000])
def test_sounds_may_have_another_length(length: int) -> None:
    assert AudioNet(35)(torch.rand(2, 1, length)).shape == (2, 35)


def test_the_size_of_the_transformer() -> None:
    attention = 3 * (256 * 256 + 256) + 256 * 256 + 256
    feedforward = 256 * 1024 + 1024 + 1024 * 256 + 256
    layers = 4 * (attention + feedforward + 2 * 2 * 256)
    embedding = 256 * 3 * 4 * 4 + 256 + 64 * 256
    assert learnable(Transformer()) == embedding + layers + 256 * 10 + 10


def test_the_order_of_patches_matters_to_the_transformer() -> None:
    model, _, x = mapped("transformer")
    with torch.no_grad():
        assert not torch.allclose(model(x), model(x.flip(2)), atol=1e-4)


def test_the_size_of_resnet18() -> None:
    # A block has two convolutions of 3x3; the first of a wider stage has a shortcut.
    total = 3 * 64 * 9 + 2 * 64 + 4 * (64 * 64 * 9 + 2 * 64)
    for before, after in ((64, 128), (128, 256), (256, 512)):
        total += before * after * (9 + 1) + 3 * after * after * 9 + 5 * 2 * after
    assert learnable(ResNet18()) == total + 512 * 10 + 10 == 11_173_962


def test_the_size_of_mobilenet() -> None:
    total, width = 3 * 32 * 9 + 2 * 32, 32
    for factor, after, number, _ in STAGES:
        for _ in range(number):
            wide = factor * width
            widen = (width * wide + 2 * wide) if factor > 1 else 0
            total += widen + 9 * wide + 2 * wide + wide * after + 2 * after
            width = after
    total += 320 * 1280 + 2 * 1280 + 1280 * 10 + 10
    assert learnable(MobileNet()) == total == 2_236_682


@pytest.mark.parametrize("build", [ResNet18, MobileNet])
def test_maps_are_halved_three_times(build: type[nn.Sequential]) -> None:
    model = build().eval()
    pool = [isinstance(layer, nn.AdaptiveAvgPool2d) for layer in model].index(True)
    with torch.no_grad():
        maps = nn.Sequential(*list(model)[:pool])(torch.rand(1, 3, 32, 32))
    assert maps.shape[2:] == (4, 4)


# Neurons -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LARGER)
def test_every_group_is_proved_and_only_the_outputs_are_left_over(name: str) -> None:
    _, neurons, _ = mapped(name)
    assert all(group.permutable and group.slim for group in neurons.groups)
    assert [entry.reason for entry in neurons.fixed] == [
        "they reach the model's output"
    ]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("audio", [32, 32, 64, 128]),
        ("mlp", [1024] * 4),
        # Each stage's stream, and the inside of each of eight blocks.
        ("resnet18", [64, 64, 64, 128, 128, 128, 256, 256, 256, 512, 512, 512]),
        # The stream; the heads and the hidden layer of each of four layers.
        ("transformer", [4, 4, 4, 4, 256, 1024, 1024, 1024, 1024]),
    ],
)
def test_the_groups_by_hand(name: str, sizes: list[int]) -> None:
    _, neurons, _ = mapped(name)
    assert sorted(group.size for group in neurons.groups) == sizes


@pytest.mark.parametrize("name", LARGER)
def test_a_step_moves_active_entries_and_no_others(name: str) -> None:
    model, neurons, x = mapped(name)
    trained = copy.deepcopy(model)
    active = fedspu.choose_random(neurons, 0.4, fedspu.stream(0, "neurons"))
    with fedspu.partial_training(trained, neurons, active) as trainable:
        optimizer = torch.optim.SGD(trainable, lr=0.1)
        F.cross_entropy(trained(x), torch.tensor([0, 3])).backward()
        optimizer.step()
    before = dict(model.named_parameters())
    after = dict(trained.named_parameters())
    blocks = neurons.blocks(active)
    back = fedspu.merge(
        dict(after),
        {key: blocks[key] for key in after if key in blocks},
        fedspu.extract(dict(before), {k: blocks[k] for k in before if k in blocks}),
    )
    assert any(not torch.equal(after[key], before[key]) for key in before)
    assert all(torch.equal(back[key], before[key]) for key in before)


@pytest.mark.parametrize("name", LARGER)
def test_a_slim_copy_is_smaller_and_gives_scores(name: str) -> None:
    model, neurons, x = mapped(name)
    active = fedspu.choose_ordered(neurons, 0.5)
    slim = fedspu.slim_model(model, neurons, active)
    assert slim(x).shape == (2, 5)
    assert learnable(slim) < 0.5 * learnable(model)
