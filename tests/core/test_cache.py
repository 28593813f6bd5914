import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import FrozenCache, Neurons, partial_training, state_of
from fedspu.core.layout import Layout
from fedspu.errors import ModelError
from tests.core.cases import quietly_mapped, random_active, seeded, shaken


def flat() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)
    )


def pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 4, 3),
    )


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(216, 3),
    )


def tall() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


MODELS = {"flat": flat, "pooled": pooled, "normed": normed, "tall": tall}


def case(name: str) -> tuple[nn.Module, Neurons, Tensor, Tensor]:
    with seeded(0):
        model = shaken(MODELS[name]()).train()
        shape = (20, 6) if name in ("flat", "tall") else (20, 1, 8, 8)
        x, y = torch.randn(shape).double(), torch.randint(3, (20,))
    return model, quietly_mapped(model, x[:2]), x, y


def trained(
    name: str, layout: Layout, cache: FrozenCache | None, batches: Any
) -> dict[str, Tensor]:
    """Two epochs, with or without a cache."""
    model, neurons, x, y = case(name)
    active = random_active(neurons, 0.5)
    with partial_training(
        model, neurons, active, layout=layout, cache=cache
    ) as trainable:
        optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9)
        for batch in batches:
            optimizer.zero_grad()
            if cache is None:
                loss = F.cross_entropy(model(x[batch]), y[batch])
            else:
                with cache.examples(batch):
                    loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
    return state_of(model)


@pytest.fixture(params=[0, 10**18], ids=["chains", "no chains"])
def smallest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspu.core.chain.SMALLEST", request.param)
    monkeypatch.setattr("fedspu.core.operations.SMALLEST", 0)


@pytest.mark.usefixtures("smallest")
@pytest.mark.parametrize("budget", [0, 700, 10**9])
@pytest.mark.parametrize("layout", ["auto", "index"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_with_a_cache(
    name: str, layout: Layout, budget: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [
        b for _ in range(3) for b in torch.randperm(20, generator=generator).split(5)
    ]
    plain = trained(name, layout, None, batches)
    cache = FrozenCache(budget)
    for key, values in trained(name, layout, cache, batches).items():
        assert torch.allclose(values, plain[key], rtol=0, atol=1e-10), key


@pytest.mark.parametrize("name", MODELS)
def test_frozen_neurons_are_computed_once_for_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedspu.core.chain.SMALLEST", 0)
    monkeypatch.setattr("fedspu.core.operations.SMALLEST", 0)
    model, neurons, x, _ = case(name)
    cache = FrozenCache(10**9)
    computed = []
    own = FrozenCache.get

    def get(self: Any, key: Any, x: Tensor, compute: Any) -> Tensor:
        def counted(x: Tensor) -> Tensor:
            computed.append(len(x))
            found: Tensor = compute(x)
            return found

        return own(self, key, x, counted)

    monkeypatch.setattr(FrozenCache, "get", get)
    with partial_training(model, neurons, random_active(neurons, 0.5), cache=cache):
        for batch in ([0, 1, 2], [2, 1, 0], [2, 3, 4], [4, 4]):
            with cache.examples(batch):
                model(x[batch])
        assert computed == [3, 2]
        assert cache.held > 0
    assert cache.held == 0


def test_a_cache_keeps_to_its_budget() -> None:
    model, neurons, x, _ = case("tall")
    row = 5 * 8  # four of nine are active
    cache = FrozenCache(3 * row + 1)
    with partial_training(model, neurons, random_active(neurons, 0.5), cache=cache):
        for batch in torch.arange(20).split(4):
            with cache.examples(batch):
                model(x[batch])
                assert cache.held <= 3 * row
    with pytest.raises(ModelError, match="cache of -1 bytes"):
        FrozenCache(-1)


def test_only_the_model_s_own_input_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspu.core.operations.SMALLEST", 0)
    # Statistics of the batch lie below the first layer: nothing may be remembered.
    with seeded(0):
        norm = nn.BatchNorm1d(6, affine=False)
        rest: Any = tall()
        model = nn.Sequential(norm, *rest).double().train()
        x = torch.randn(8, 6).double()
    neurons = quietly_mapped(model, x)
    active, cache = random_active(neurons, 0.5), FrozenCache(10**9)
    plain = copy.deepcopy(model)
    with partial_training(model, neurons, active, cache=cache):
        for batch in ([0, 1, 2], [0, 4, 5]):
            with cache.examples(batch):
                out = model(x[batch])
            assert torch.allclose(out, plain(x[batch]), rtol=0, atol=1e-12)
        assert cache.held == 0


def test_without_numbers_nothing_is_remembered() -> None:
    model, neurons, x, _ = case("flat")
    cache = FrozenCache(10**9)
    with partial_training(model, neurons, random_active(neurons, 0.5), cache=cache):
        model(x)
        assert cache.held == 0
        with cache.examples([0, 1]):  # of another batch
            model(x)
        assert cache.held == 0
