import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspu import Axis, NeuronGroup, Neurons, partial_training, state_of
from fedspu.models.paper import CIFARNet, DigitsNet, EMNISTNet, SpeechNet
from fedspu.partial.chain.find import find_chain
from fedspu.partial.chain.pooling import halves, pool, unpool
from fedspu.partial.weight import Mode, Saves
from tests.oracles.models import (
    mapped,
    mask_of,
    quietly_mapped,
    random_active,
    seeded,
    shaken,
)
from tests.oracles.zoo import ZOO_BY_NAME


@pytest.fixture(autouse=True, scope="module")
def however_small() -> Iterator[None]:
    """Chains run as such here even where the general path is quicker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedspu.partial.chain.autograd.MIN_VALUES", 0)
        yield


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def is_by_chain(output: Tensor) -> bool:
    """Whether the one operation of a chain made this output."""
    return type(output.grad_fn).__name__ == "ChainBackward"


# Which models are chains --------------------------------------------------------------


@pytest.mark.parametrize("build", [CIFARNet, DigitsNet, EMNISTNet, SpeechNet])
def test_the_paper_s_networks_are_chains(build: Any) -> None:
    links = find_chain(build())
    assert [link.has_pool for link in links][:2] == [True, True]
    assert sum(link.flattens for link in links) == 1


@pytest.mark.parametrize(
    "name", ["resnet_basic", "transformer", "densenet", "vgg", "untaken_branch", "gru"]
)
def test_other_models_are_none(name: str) -> None:
    # A branch, a residual, dropout, a norm over features: the general path has them.
    assert find_chain(ZOO_BY_NAME[name].build()) == ()


def test_a_model_that_somebody_watches_is_no_chain() -> None:
    model = mlp(4, 5, 3)
    handle = model[0].register_forward_hook(lambda *_: None)
    assert find_chain(model) == ()
    handle.remove()
    assert len(find_chain(model)) == 2


# The same weights as masked dense training --------------------------------------------


@st.composite
def chains(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A random chain in float64, and a batch for it."""
    with seeded(draw(st.integers(0, 99))):
        side, channels = draw(st.integers(8, 12)), draw(st.integers(1, 3))
        batch = draw(st.integers(2, 4))
        layers: list[nn.Module] = []
        x = torch.randn(batch, channels, side, side, dtype=torch.float64)
        for _ in range(draw(st.integers(1, 2))):
            width, has_norm = draw(st.integers(2, 6)), draw(st.booleans())
            layers.append(
                nn.Conv2d(
                    channels,
                    width,
                    kernel_size=draw(st.sampled_from([1, 2, 3])),
                    stride=draw(st.sampled_from([1, 2])),
                    padding=draw(st.sampled_from([1, 2])),
                    bias=draw(st.booleans()),
                )
            )
            layers += [nn.BatchNorm2d(width)] if has_norm else []
            after = draw(st.sampled_from(["", "relu", "pool"]))
            layers += [nn.ReLU()] if after else []
            size = nn.Sequential(*layers).double()(x).shape[2]
            layers += [nn.MaxPool2d(2)] if after == "pool" and size >= 2 else []
            channels = width
        layers.append(nn.Flatten())
        features = nn.Sequential(*layers).double()(x).shape[1]
        for width in draw(st.lists(st.integers(2, 6), max_size=2)):
            layers += [nn.Linear(features, width), nn.ReLU()]
            features = width
        layers.append(nn.Linear(features, 3))
        return shaken(nn.Sequential(*layers)), x


def trained_dense(
    model: nn.Module, neurons: Neurons, active: Any, x: Tensor, y: Tensor
) -> dict[str, Tensor]:
    """Three steps of SGD with momentum, gradients masked after a full backward pass."""
    blocks = neurons.blocks(active)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.grad *= mask_of(tuple(parameter.shape), blocks[name])
        optimizer.step()
    return state_of(model)


def train_as_chain(
    model: nn.Module, trainable: list[Tensor], x: Tensor, y: Tensor
) -> None:
    """The same three steps, each by the chain's one operation."""
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        output = model(x)
        assert is_by_chain(output)
        F.cross_entropy(output, y).backward()
        optimizer.step()


@settings(max_examples=60)
@given(
    chains(),
    st.sampled_from([0.2, 0.5, 0.9]),
    st.booleans(),
    st.sampled_from(["fast", "lean"]),
)
def test_a_chain_trains_as_masked_dense_training_does(
    case: tuple[nn.Module, Tensor], p: float, may_move: bool, saves: Saves
) -> None:
    model, x = case
    with torch.no_grad():
        y = model(x).argmin(1)
    neurons = quietly_mapped(model, x)
    if not may_move:  # blocks are index vectors then
        groups = tuple(replace(g, permutable=False) for g in neurons.groups)
        neurons = replace(neurons, groups=groups)
    active = random_active(neurons, p)
    dense = trained_dense(copy.deepcopy(model).train(), neurons, active, x, y)
    model.train()
    assert len(find_chain(model)) > 0
    with partial_training(model, neurons, active, saves=saves) as trainable:
        train_as_chain(model, trainable, x, y)
    for name, values in state_of(model).items():
        assert torch.allclose(values, dense[name], rtol=0, atol=1e-10), name


@settings(max_examples=30)
@given(chains(), st.sampled_from([0.2, 0.5]), st.sampled_from(["exact", "truncated"]))
def test_a_chain_gives_what_the_general_path_gives(
    case: tuple[nn.Module, Tensor], p: float, mode: Mode
) -> None:
    model, x = case
    neurons = quietly_mapped(model, x)
    active = random_active(neurons, p)
    results = []
    for is_watched in (False, True):  # a watched model takes the general path
        own = copy.deepcopy(model).train()
        if is_watched:
            own.register_forward_hook(lambda *_: None)
        with partial_training(own, neurons, active, mode) as trainable:
            own(x).square().sum().backward()
            results.append([leaf.grad for leaf in trainable])
    for one, other in zip(*results, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def test_a_chain_reads_only_what_it_is_made_for() -> None:
    entry = ZOO_BY_NAME["emnist_cnn"]
    model, x = entry.build().train(), entry.example()
    neurons = mapped("emnist_cnn")
    active = random_active(neurons, 0.5)
    with partial_training(model, neurons, active, kernels="torch"):
        assert is_by_chain(model(x))
        assert not is_by_chain(model(x.clone().requires_grad_()))
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_by_chain(model(x))
        model.get_submodule("bn1").eval()
        assert not is_by_chain(model(x))
        with torch.no_grad():
            assert model(x).grad_fn is None
    assert "forward" not in vars(model)


def test_a_chain_trains_all_neurons_too() -> None:
    model = shaken(DigitsNet()).train()
    with seeded(0):
        x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    y, neurons = torch.arange(5), quietly_mapped(model, x)
    dense = trained_dense(copy.deepcopy(model), neurons, neurons.everything(), x, y)
    with partial_training(model, neurons, neurons.everything()) as trainable:
        assert [id(t) for t in trainable] == [id(p) for p in model.parameters()]
        train_as_chain(model, trainable, x, y)
    for name, values in state_of(model).items():
        assert torch.allclose(values, dense[name], rtol=0, atol=1e-10), name


def test_a_chain_may_begin_with_a_flatten() -> None:
    with seeded(0):
        x = torch.randn(4, 2, 3, dtype=torch.float64)
        model = shaken(nn.Sequential(nn.Flatten(), *mlp(6, 5, 4, 3))).train()
    y, neurons = torch.tensor([0, 1, 2, 0]), quietly_mapped(model, x)
    active = random_active(neurons, 0.5)
    dense = trained_dense(copy.deepcopy(model), neurons, active, x, y)
    with partial_training(model, neurons, active) as trainable:
        train_as_chain(model, trainable, x, y)
    for name, values in state_of(model).items():
        assert torch.allclose(values, dense[name], rtol=0, atol=1e-10), name


def test_a_table_that_does_not_fit_the_chain_takes_the_general_path() -> None:
    # By hand, and odd: the second layer's inputs are not tied to the first's outputs.
    with seeded(0):
        model, x = shaken(mlp(6, 5, 3)).train(), torch.randn(4, 6).double()
    odd = Neurons(
        (
            NeuronGroup("made", 5, (Axis("0.weight", 0), Axis("0.bias", 0))),
            NeuronGroup("read", 5, (Axis("2.weight", 1),)),
        ),
        {name: tuple(p.shape) for name, p in model.named_parameters()},
    )
    active = {"made": torch.tensor([0, 3]), "read": torch.tensor([1, 2])}
    y = torch.tensor([0, 1, 2, 0])
    dense = trained_dense(copy.deepcopy(model), odd, active, x, y)
    with partial_training(model, odd, active) as trainable:
        assert not is_by_chain(model(x))
        optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    for name, values in state_of(model).items():
        assert torch.allclose(values, dense[name], rtol=0, atol=1e-10), name


def test_the_smallest_batches_take_the_general_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedspu.partial.chain.autograd.MIN_VALUES", 16 * 28 * 28 * 20)
    neurons, model = mapped("emnist_cnn"), EMNISTNet().train()
    active = random_active(neurons, 0.5)
    with partial_training(model, neurons, active, kernels="torch"):
        assert is_by_chain(model(torch.zeros(16, 1, 28, 28)))
        assert not is_by_chain(model(torch.zeros(15, 1, 28, 28)))


def test_a_norm_of_single_values_is_refused_as_in_plain_pytorch() -> None:
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(4, 2)).train()
    x = torch.randn(1, 1, 3, 3)
    neurons = quietly_mapped(model, torch.randn(2, 1, 3, 3))
    with (
        partial_training(model, neurons, random_active(neurons, 0.5)),
        pytest.raises(ValueError, match="more than 1 value per channel"),
    ):
        model(x)


# The pool -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(4, 4), (5, 4), (4, 7), (3, 3)])
def test_the_pool_is_torch_s_own_ties_included(size: tuple[int, int]) -> None:
    with seeded(0):
        x = torch.randint(-2, 3, (3, 2, *size)).double().requires_grad_()
        grad = torch.randn(3, 2, size[0] // 2, size[1] // 2, dtype=torch.float64)
    expected = F.max_pool2d(F.relu(x), 2)
    expected.backward(grad)
    out, masks = pool(*halves(x.detach()), None)
    assert torch.equal(out, expected)
    assert x.grad is not None
    assert torch.equal(unpool(grad, masks, size), x.grad)


class Counts(nn.Module):
    """A net that counts its forward passes in training, in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, 4)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        scores: Tensor = self.fc2(self.fc1(x).relu())
        return scores


def test_looking_at_a_model_leaves_its_buffers_alone() -> None:
    model = Counts()
    count = model.count
    find_chain(model.train())
    assert model.count is count
    assert int(count) == 0
