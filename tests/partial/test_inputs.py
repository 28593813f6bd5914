"""Partial training on any input, and with any layer beside the weighted ones.

The oracle is in ways.py: the same code on the leaves, and on the full model.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspu import state_of
from fedspu.partial.weight import Mode
from tests.oracles.masked_training import (
    MODES,
    WAYS,
    Setting,
    Way,
    as_kind,
    assert_same,
    beside,
    by,
    by_kernels,
    by_three,
    by_two,
    errors,
    in_autocast,
    loss_of,
    one_step,
    own_setting,
    plain_script,
    setting,
    sgd,
)
from tests.oracles.models import (
    mapped,
    quietly_mapped,
    random_active,
    random_input,
    random_model,
    run,
    seeded,
    shaken,
)
from tests.oracles.tables import same_bits
from tests.oracles.zoo import ZOO, Entry, chain, noise

# Inputs -------------------------------------------------------------------------------


def has_numbers(entry: Entry) -> bool:
    example = entry.example()
    return isinstance(example, Tensor) and example.is_floating_point()


@by_kernels
@pytest.mark.parametrize(
    "entry", [e for e in ZOO if has_numbers(e)], ids=lambda e: e.name
)
def test_the_gradient_of_the_input_is_the_exact_one(way: Way, entry: Entry) -> None:
    what = setting(entry.name)

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        x = what.draw(0).requires_grad_()
        loss_of(model, x).backward()
        torch.optim.SGD(weights, lr=0.1).step()
        assert x.grad is not None
        return [x.grad]

    assert_same(way, what, script)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "every other": lambda x: torch.cat([x, x])[::2],
    "repeated": lambda x: x[:1].expand(4, *x.shape[1:]),
    "last axis first": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "backwards": lambda x: x.flip(0),
    "a part": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


@by_two
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["cnn", "residual", "vit", "grouped_conv"])
def test_inputs_may_lie_in_memory_as_they_like(way: Way, name: str, shape: str) -> None:
    what = setting(name)

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        loss_of(model, SHAPES[shape](what.draw(0))).backward()
        one_step(weights)

    assert_same(way, what, script, atol=1e-9)


@by("kernels-auto", "kernels-index", "plain-auto")
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "vit", "grouped_conv"])
def test_one_example_trains(way: Way, name: str) -> None:
    what = setting(name)

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        loss_of(model, what.draw(0)[:1]).backward()
        one_step(weights)

    assert_same(way, what, script, atol=1e-9)


@by_two
@pytest.mark.parametrize("is_model", [True, False])
@pytest.mark.parametrize(
    "name", ["cnn", "residual", "unet", "mobilenet", "depthwise_multiplier"]
)
def test_channels_may_come_last_in_memory(way: Way, name: str, is_model: bool) -> None:
    what = setting(name)
    last: Any = {"memory_format": torch.channels_last}
    model = copy.deepcopy(what.model)
    what = replace(what, model=model.to(**last) if is_model else model)

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        optimizer = sgd(weights)
        for t in range(2):
            optimizer.zero_grad()
            loss_of(model, what.draw(t).contiguous(**last)).backward()
            optimizer.step()

    assert_same(way, what, script)


@by_two
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "vit", "audio_cnn"])
def test_a_batch_of_no_examples_moves_nothing(way: Way, name: str, mode: Mode) -> None:
    what = setting(name)
    model = what.fresh().eval()  # a batch norm has nothing to count
    before = state_of(model)
    with way.training(model, what, mode) as trainable:
        output = run(model, what.draw(0)[:0])
        output.sum().backward()
        one_step(trainable)
    assert len(output) == 0
    after = state_of(model)
    assert all(same_bits(after[name], before[name]) for name in after)


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_float32_rounds_in_place_as_in_the_plain_model(entry: Entry) -> None:
    neurons, x = mapped(entry.name), as_kind(random_input(entry), torch.float32)
    model = random_model(entry).float().train()
    with seeded(1):
        expected = run(copy.deepcopy(model), x)
    for way in WAYS:
        if way.layout == "auto":
            continue
        own = copy.deepcopy(model)
        what = Setting(own, neurons, random_active(neurons, 0.5), lambda _: x)
        with way.forced(), way.training(own, what), seeded(1):
            output = run(own, x)
        if entry.name in ("transformer", "vit"):  # attention has a path of its own
            assert torch.allclose(output, expected, rtol=0, atol=1e-5)
        else:
            assert torch.equal(output, expected)


@by_two
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "vit", "lstm", "unet"])
def test_float32_trains_as_the_masked_model_in_float32(way: Way, name: str) -> None:
    what = setting(name)
    what = replace(
        what,
        model=copy.deepcopy(what.model).float(),
        draw=lambda t: as_kind(setting(name).draw(t), torch.float32),
    )
    assert_same(way, what, plain_script(what, sgd, steps=3), atol=2e-4)


# Layers beside weighted ones ----------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_": F.relu_,
    "relu6": F.relu6,
    "hardtanh": nn.Hardtanh(-0.3, 0.4),
    "leaky": nn.LeakyReLU(0.3),
    "leaky_": nn.LeakyReLU(0.3, inplace=True),
    "elu": nn.ELU(0.5),
    "elu_": nn.ELU(0.5, inplace=True),
    "selu": nn.SELU(),
    "gelu": nn.GELU(),
    "gelu by tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "silu_": nn.SiLU(inplace=True),
    "mish": nn.Mish(),
    "softplus": nn.Softplus(2.0, 1.0),
    "threshold": nn.Threshold(0.1, 0.2),
    "tanh": torch.tanh,
    "tanh_": lambda x: x.tanh_(),
    "sigmoid_": lambda x: x.sigmoid_(),
    "softmax": lambda x: x.softmax(-1),
    "exp": lambda x: (0.1 * x).exp(),
    "hardswish": F.hardswish,
    "scaled in place": lambda x: x.mul_(2).add_(1).tanh(),
    "sum in place": lambda x: torch.sin(x).add_(x),
    "a view in place": lambda x: (F.relu_(x[:, :, 1:]), x)[1],
    "pooled": lambda x: F.max_pool2d(F.relu(x), 3, 1),
    "averaged": lambda x: F.avg_pool2d(x, 2).sin(),
    "normalised": lambda x: F.normalize(x, dim=1),
    "permuted": lambda x: x.transpose(2, 3).cos(),
}


class Activated(nn.Module):
    """The same function after each of two convolutions, and before each of two."""

    def __init__(self, function: Callable[[Tensor], Tensor], kernel: int = 3) -> None:
        super().__init__()
        self.function = function
        self.conv1 = nn.Conv2d(2, 6, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(6, 5, kernel, padding=kernel // 2)
        self.norm = nn.GroupNorm(1, 5)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self.conv2(self.function(self.conv1(x))))
        logits: Tensor = self.fc(self.norm(x).mean((2, 3)))
        return logits


@cache
def activated(name: str) -> Setting:
    return own_setting(partial(Activated, ACTIVATIONS[name]), 3, 2, 6, 6)


@cache
def activated_products(name: str) -> Setting:
    """The same with 1x1 convolutions on maps so large that they run as products."""
    return own_setting(partial(Activated, ACTIVATIONS[name], kernel=1), 3, 2, 8, 8)


@by("kernels-auto", "kernels-index-lean")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_any_function_may_stand_between_layers(way: Way, name: str, mode: Mode) -> None:
    trains_and_passes_gradient_on(way, activated(name), mode)


@by("kernels-auto")
@pytest.mark.parametrize(
    "name", ["relu_", "leaky_", "tanh_", "scaled in place", "a view in place"]
)
def test_the_output_of_a_1x1_convolution_may_be_changed_in_place(
    way: Way, name: str
) -> None:
    trains_and_passes_gradient_on(way, activated_products(name), "exact")


def trains_and_passes_gradient_on(way: Way, what: Setting, mode: Mode) -> None:
    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        x = what.draw(0).requires_grad_()
        loss_of(model, x).backward()
        torch.optim.SGD(weights, lr=0.1).step()
        assert x.grad is not None
        return [x.grad]

    assert_same(way, what, script, mode)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "batch, cumulative": lambda n: nn.BatchNorm2d(n, momentum=None),
    "batch, untracked": lambda n: nn.BatchNorm2d(n, track_running_stats=False),
    "batch, plain": lambda n: nn.BatchNorm2d(n, affine=False),
    "batch, large eps": lambda n: nn.BatchNorm2d(n, eps=0.5, momentum=0.7),
    "batch, fixed": lambda n: nn.BatchNorm2d(n).requires_grad_(False),
    "instance": lambda n: nn.InstanceNorm2d(n, affine=True),
    "group": lambda n: nn.GroupNorm(1, n),
    "layer": lambda n: ChannelNorm(nn.LayerNorm(n)),
    "layer, no bias": lambda n: ChannelNorm(nn.LayerNorm(n, bias=False)),
    "root": lambda n: ChannelNorm(nn.RMSNorm(n)),
}


class ChannelNorm(nn.Module):
    """A norm over the last axis, of channels that are the second."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.movedim(1, -1)).movedim(-1, 1)
        return normed


def normed(make: Callable[[int], nn.Module]) -> nn.Module:
    return chain(
        conv1=nn.Conv2d(2, 6, 3, padding=1),
        norm1=make(6),
        relu1=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 5, 1, bias=False),
        norm2=make(5),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc=nn.Linear(5 * 9, 3),
    )


@cache
def norm_setting(name: str) -> Setting:
    return own_setting(partial(normed, NORMS[name]), 3, 2, 6, 6)


@by_two
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NORMS)
def test_any_norm_may_stand_between_layers(way: Way, name: str, mode: Mode) -> None:
    what = norm_setting(name)

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        plain_script(what, sgd, steps=3)(model, weights)
        with torch.no_grad():
            return [run(model.eval(), what.draw(9))]

    assert_same(way, what, script, mode, atol=1e-9)


@by_kernels
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of a plain RMSNorm in autocast
@pytest.mark.parametrize("name", NORMS)
def test_any_norm_in_autocast_rounds_as_in_the_plain_model(way: Way, name: str) -> None:
    what = norm_setting(name)
    x, model = what.draw(0).float(), what.fresh().float()
    theirs, ours, _ = errors(way, what, copy.deepcopy(model), model, in_autocast(x))
    assert theirs > 1e-3
    assert ours < 1.5 * theirs


@st.composite
def layers(draw: st.DrawFn) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    """A convolution of any kind between two others, and the shape of a batch."""
    dims, is_transposed = draw(st.integers(1, 3)), draw(st.booleans())
    inputs = draw(st.sampled_from([4, 6]))
    outputs = draw(st.sampled_from([inputs, 2 * inputs]))
    stride = draw(st.integers(1, 2))
    given_so: dict[str, Any] = {
        "kernel_size": draw(st.integers(1, 3)),
        "stride": stride,
        "padding": draw(st.integers(0, 1)),
        "dilation": draw(st.integers(1, 2)),
        "groups": draw(st.sampled_from([1, 1, 2, inputs])),
        "bias": draw(st.booleans()),
    }
    if is_transposed:
        given_so["output_padding"] = draw(st.integers(0, stride - 1))
        given_so["padding"] = 0
    up = "Transpose" if is_transposed else ""
    kind = getattr(nn, f"Conv{up}{dims}d")
    size = draw(st.integers(5, 7))
    shape = (draw(st.integers(1, 3)), 2, *[size] * dims)

    def build() -> nn.Module:
        return beside(kind(inputs, outputs, **given_so), inputs, outputs, dims)

    return build, shape


@settings(max_examples=40)
@given(layers(), st.sampled_from([0.3, 0.6]), st.sampled_from(WAYS), st.booleans())
def test_any_convolution_trains_as_the_masked_one(
    case: tuple[Callable[[], nn.Module], tuple[int, ...]],
    p: float,
    way: Way,
    is_input_needed: bool,
) -> None:
    build, shape = case
    what = own_setting(build, *shape, p=p)

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        x = what.draw(0).requires_grad_(is_input_needed)
        model(x).square().mean().backward()
        one_step(weights)
        return [x.grad] if x.grad is not None else []

    with way.forced():
        assert_same(way, what, script)


# Odd models ---------------------------------------------------------------------------


class SharedBuffer(nn.Module):
    """Two layers that read one table, which each of them has as a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )
        scale = torch.rand(()) + 1
        self.register_buffer("scale", scale)
        self.fc1.register_buffer("scale", scale)
        self.fc2.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x) * self.fc1.scale)
        h = torch.tanh(self.fc2(h) * self.fc2.scale)
        logits: Tensor = self.fc3(h)
        return logits


class SharedStatistics(nn.Module):
    """Two batch norms of the same channels that count together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.norm2.running_mean = self.norm1.running_mean
        self.norm2.running_var = self.norm1.running_var
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)
        h = F.relu(self.norm1(h)) + torch.tanh(self.norm2(h))
        logits: Tensor = self.fc(h.mean((2, 3)))
        return logits


@by_three
@pytest.mark.parametrize(
    ("build", "shape"), [(SharedBuffer, (4, 6)), (SharedStatistics, (4, 2, 5, 5))]
)
def test_buffers_may_be_shared(
    way: Way, build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    what = own_setting(build, *shape)

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        plain_script(what, sgd)(model, weights)
        with torch.no_grad():
            return [run(model.eval(), what.draw(9))]

    assert_same(way, what, script)


PARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
}


@by_three
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_layers_train_beside_partial_ones(way: Way, name: str) -> None:
    with seeded(0):
        model = shaken(
            chain(
                fc1=nn.Linear(6, 8),
                tanh1=nn.Tanh(),
                fc2=nn.Linear(8, 7),
                tanh2=nn.Tanh(),
                fc3=PARAMETRIZED[name](nn.Linear(7, 7)),
                tanh3=nn.Tanh(),
                fc4=nn.Linear(7, 3),
            )
        )
    neurons = quietly_mapped(model, noise(4, 6).double())
    assert neurons.groups
    what = Setting(
        model, neurons, random_active(neurons, 0.5), lambda t: noise(4 + t, 6).double()
    )
    assert_same(way, what, plain_script(what, sgd))
