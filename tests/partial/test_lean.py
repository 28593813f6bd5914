"""What a lean forward pass keeps, operation by operation.

That whole models train the same is checked in test_partial.py.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspu import map_neurons, partial_training
from fedspu.partial.lean import lean_forward
from fedspu.partial.remake import (
    Remake,
    need_of,
    note,
    pack,
    remake_of,
    transposed,
    unpack,
)
from fedspu.partial.weight import How, Saves
from tests.oracles.models import random_active, seeded, shaken


class Function(nn.Module):
    """A model that is one function."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def lean_and_plain(
    run: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The output and the input's gradient of one function, lean and plain."""
    found = []
    for is_lean in (True, False):
        model, own = Function(run), x.clone().requires_grad_()
        with seeded(3):
            if is_lean:
                with lean_forward(model, How(rounds_as_torch=True)):
                    y = model(own * 1)
            else:
                y = model(own * 1)
        y.backward(drawn(*y.shape, seed=1))
        assert own.grad is not None
        found.append((y.detach(), own.grad))
    return found[0], found[1]


def kept_bytes(run: Callable[[], Tensor]) -> int:
    """What autograd keeps, each storage once."""
    storages: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        run()
    return sum(storages.values())


# One operation ------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "F.relu, positional": lambda x: F.relu(x, True),
    "torch.relu": torch.relu,
    "Tensor.relu": lambda x: x.relu(),
    "Tensor.relu_": lambda x: x.relu_(),
    "torch.relu_": torch.relu_,
    "relu6": F.relu6,
    "relu6 in place": lambda x: F.relu6(x, inplace=True),
    "nn.ReLU6": nn.ReLU6(),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout in eval": lambda x: F.dropout(x, 0.3, False),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool2d with its places": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "gelu": F.gelu,
    "gelu, another": lambda x: F.gelu(x, approximate="tanh"),
    "elu, positional": lambda x: F.elu(x, 0.3),
    "leaky_relu in place": lambda x: F.leaky_relu(x, 0.2, True),
    "silu": F.silu,
    "add": lambda x: x + x * 2,
    "add a number": lambda x: x + 1,
    "add, scaled": lambda x: torch.add(x, x * x, alpha=3),
    "add_": lambda x: (x * x).add_(x),
    "add, broadcast": lambda x: x + x.sum((0, 2, 3), keepdim=True),
    "transpose": lambda x: x.transpose(1, -1) * 2,
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "batch_norm in eval": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_the_plain_one_gives(name: str) -> None:
    x = drawn(3, 4, 6, 6)
    if name == "batch_norm in eval":
        x = x.float()
    lean, plain = lean_and_plain(OPERATIONS[name], x)
    for one, other in zip(lean, plain, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["F.relu", "relu6", "hardtanh", "dropout"])
def test_a_mask_is_kept_as_bits(name: str) -> None:
    x, run = drawn(8, 16, 8, 8).requires_grad_(), OPERATIONS[name]
    model = Function(run)
    with lean_forward(model, How(rounds_as_torch=True)):
        kept = kept_bytes(lambda: model(x))
    assert kept == x.numel() // 8
    assert kept_bytes(lambda: run(x)) >= x.nbytes


def test_a_clamp_at_the_very_edge_is_torch_s_own() -> None:
    x = torch.tensor([-1.0, -0.0, 0.0, 3.0, 6.0, 7.0], dtype=torch.float64)
    for run in (F.relu, F.relu6):
        lean, plain = lean_and_plain(run, x)
        assert torch.equal(lean[1], plain[1])


@st.composite
def pools(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    size = draw(st.sampled_from([(1, 1), (2, 2), (3, 3), (2, 3), (3, 1)]))
    numbers = {
        "kernel_size": size,
        "stride": draw(st.sampled_from([None, 1, 2, (2, 1)])),
        "padding": draw(st.integers(0, min(size) // 2)),
        "dilation": draw(st.sampled_from([1, 2, (1, 2)])),
        "ceil_mode": draw(st.booleans()),
    }
    shape = (2, 3, draw(st.integers(6, 9)), draw(st.integers(6, 9)))
    values = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(1))
    return values.double(), numbers


@settings(max_examples=60)
@given(pools())
def test_a_max_pool_keeps_bytes_and_is_torch_s_own_ties_included(
    case: tuple[Tensor, dict[str, Any]],
) -> None:
    x, numbers = case
    lean, plain = lean_and_plain(lambda x: F.max_pool2d(x, **numbers), x)
    assert torch.equal(lean[0], plain[0])
    assert torch.allclose(lean[1], plain[1], rtol=0, atol=1e-12)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 3))
def test_packed_masks_come_back(values: list[bool], rows: int) -> None:
    mask = torch.tensor(values, dtype=torch.bool).repeat(rows, 1)
    assert torch.equal(unpack(pack(mask), mask.shape), mask)


# Models -------------------------------------------------------------------------------


def residual_net(in_place: bool) -> nn.Module:
    def block(before: int, after: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.one, self.two = block(3, 8), block(8, 8), block(8, 8)
            self.down, self.side = block(8, 12, 2), block(8, 12, 2)
            self.relu, self.head = nn.ReLU(in_place), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.stem(x))
            y = self.two(self.relu(self.one(x)))
            y += x
            x = self.relu(y)
            x = self.relu(self.down(x) + self.side(x))
            scores: Tensor = self.head(x.mean((2, 3)))
            return scores

    with seeded(0):
        return shaken(Net()).train()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("mode", ["exact", "truncated"])
def test_a_residual_net_trains_the_same_and_keeps_less(
    mode: Any, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedspu.partial.costs.MIN_PRODUCTS", 0)
    monkeypatch.setattr("fedspu.partial.costs.MOST_OF_ALL", 1.0)
    x, y = drawn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    neurons = map_neurons(residual_net(in_place), x)
    active = random_active(neurons, 0.5)
    grads, kept = [], []
    for saves in ("fast", "lean"):
        model = residual_net(in_place)
        with partial_training(model, neurons, active, mode, saves=saves) as trainable:
            F.cross_entropy(model(x), y).backward()
            grads.append([leaf.grad for leaf in trainable])
            kept.append(kept_bytes(partial(model, x)))
    for one, other in zip(*grads, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert kept[1] < 0.75 * kept[0]


def test_first_layers_keep_the_active_channels_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedspu.partial.costs.MIN_PRODUCTS", 0)
    monkeypatch.setattr("fedspu.partial.costs.MOST_OF_ALL", 1.0)
    # Tanh, so that it is no chain. The norm keeps its input: a quarter of it.
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten()]
    model: Any = nn.Sequential(*layers, nn.Linear(8 * 36, 3)).double().train()
    x = drawn(2, 1, 8, 8)
    neurons = map_neurons(model, x)
    sizes = {}
    for saves in ("fast", "lean"):
        own = copy.deepcopy(model)
        active = random_active(neurons, 0.25)
        with partial_training(own, neurons, active, saves=saves):
            sizes[saves] = kept_bytes(partial(own[:2], x))
    norm = 2 * 2 * 36 * 8  # examples, channels, places, bytes
    rest = x.nbytes + 8 * 9 * 8 + 4 * 8 * 8  # the batch, weights, statistics
    assert norm <= sizes["fast"] <= norm + rest
    assert sizes["lean"] <= sizes["fast"]


@pytest.mark.parametrize("saves", ["fast", "lean"])
def test_the_model_s_own_forward_is_back_afterwards(saves: Saves) -> None:
    model = residual_net(False)
    neurons = map_neurons(model, drawn(2, 3, 8, 8))
    active = random_active(neurons, 0.5)

    def own(x: Tensor) -> Any:
        return type(model).forward(model, x)

    with partial_training(model, neurons, active, saves=saves):
        model(drawn(2, 3, 8, 8))
    assert "forward" not in vars(model)
    vars(model)["forward"] = own
    with partial_training(model, neurons, active, saves=saves):
        model(drawn(2, 3, 8, 8))
    assert vars(model)["forward"] is own


def test_nothing_is_kept_without_gradient() -> None:
    model = residual_net(False)
    x = drawn(2, 3, 8, 8)
    neurons = map_neurons(model, x)
    active = random_active(neurons, 0.5)
    with partial_training(model, neurons, active, saves="lean"), torch.no_grad():
        assert kept_bytes(lambda: model(x)) == 0


# Notes --------------------------------------------------------------------------------


def times_two(span: Any, dim: int, x: Tensor) -> Tensor:
    return x * 2 if span is None else x.narrow(dim, 0, span) * 2


def test_a_note_is_void_once_the_tensor_changes() -> None:
    x = drawn(2, 3)
    note(x, Remake((x,), times_two, dim=1), need=2)
    assert remake_of(x) is not None
    assert need_of(x) == 2
    x.add_(1)
    assert remake_of(x) is None
    assert need_of(x) is None
    assert remake_of(x.clone()) is None


@pytest.mark.parametrize("dims", [(0, 1), (1, 2), (0, -1), (2, 0)])
def test_what_is_transposed_can_be_made_again(dims: tuple[int, int]) -> None:
    x = drawn(2, 3, 4)
    y = transposed(note(x * 2, Remake((x,), times_two, dim=2)), *dims)
    remake = remake_of(y)
    assert remake is not None
    assert remake.dim is not None
    made = remake.make(3, remake.dim, *remake.tensors)
    assert torch.equal(made, y.narrow(remake.dim, 0, 3))
    assert remake.gives(3, remake.dim)
    assert not remake.gives(3, (remake.dim + 1) % 3)


def test_a_recipe_gives_only_the_channels_it_has() -> None:
    remake = Remake((drawn(2, 2),), times_two, dim=1, has=2)
    assert remake.gives(2, 1)
    assert not remake.gives(None, 1)
    assert not remake.gives(1, 1)
    assert not remake.gives(torch.tensor([0, 1]), 1)
