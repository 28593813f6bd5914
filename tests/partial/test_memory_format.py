"""Maps with channels side by side in memory: the same numbers, no view that fails."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu.partial.block_gradients import Convolution
from fedspu.partial.context import paths
from fedspu.partial.memory_format import compact, is_last, usual_forward
from fedspu.partial.spans import take_span


class Bottleneck(nn.Module):
    """1x1, depthwise, 1x1 and a residual, as in MobileNets."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.wide = nn.Conv2d(width, 3 * width, 1)
        self.norm = nn.BatchNorm2d(3 * width)
        self.deep = nn.Conv2d(
            3 * width, 3 * width, 3, stride, padding=1, groups=3 * width
        )
        self.act = nn.ReLU6(inplace=True)
        self.narrow = nn.Conv2d(3 * width, width, 1, bias=False)
        self.is_residual = stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(self.act(self.deep(self.act(self.norm(self.wide(x))))))
        return y + x if self.is_residual else y


def small_mobile_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()),
        *(Bottleneck(8), Bottleneck(8, stride=2), nn.Conv2d(8, 12, 3)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)),
    )


class Viewing(nn.Module):
    """Asks for a view, which fails if channels lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.conv(x).sigmoid().view(len(x), -1))
        return scores


def examples(number: int = 6) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn((number, 3, 8, 8), generator=rng, dtype=torch.float64)
    return x, torch.randint(4, (number,), generator=rng)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether channels were last, for each convolution that our kernels run.

    They run small ones too.
    """
    monkeypatch.setattr("fedspu.partial.costs.MIN_PRODUCTS", 0)
    monkeypatch.setattr("fedspu.partial.costs.MOST_OF_ALL", 1.0)
    noted: list[bool] = []
    own = Convolution.run

    def run(conv: Convolution, x: Tensor, *rest: Any) -> Tensor:
        noted.append(is_last(x))
        return own(conv, x, *rest)

    monkeypatch.setattr(Convolution, "run", run)
    return noted


@pytest.mark.parametrize("mode", ["exact", "truncated"])
@pytest.mark.parametrize("saves", ["fast", "lean"])
@pytest.mark.parametrize("p", [0.3, 0.7, 1.0])
def test_steps_are_those_of_the_usual_format(
    seen: list[bool], mode: Any, saves: Any, p: float
) -> None:
    x, y = examples()
    models = [small_mobile_net().double().train() for _ in range(2)]
    neurons = fedspu.map_neurons(models[0], x[:2])
    active = fedspu.choose_random(neurons, p, fedspu.stream(0, "neurons"))
    layouts: Any = ("auto", "index")
    for model, layout in zip(models, layouts, strict=True):
        context = fedspu.partial_training(
            model, neurons, active, mode, layout=layout, saves=saves
        )
        with context as trainable:
            optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
            for _ in range(4):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    ours, theirs = (model.state_dict() for model in models)
    for name, tensor in ours.items():
        assert torch.allclose(tensor.double(), theirs[name].double(), atol=1e-10), name
    assert all(parameter.is_contiguous() for parameter in models[0].parameters())
    assert any(seen) == (p < 1 and saves == "fast")


@pytest.mark.parametrize(
    ("layers", "fits"),
    [
        ([nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Dropout(0.5)], True),
        ([nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Flatten()], False),
        ([nn.Conv2d(3, 4, 3), nn.PixelShuffle(2)], False),
        ([nn.Flatten(), nn.Linear(12, 4)], False),
    ],
)
def test_which_models_take_it(layers: list[nn.Module], fits: bool) -> None:
    """Dropout of maps draws its masks in the order of memory."""
    assert (usual_forward(nn.Sequential(*layers), 0) is not None) == fits


def test_a_model_that_asks_for_a_view_keeps_the_usual_format() -> None:
    assert usual_forward(Viewing(), 0) is None
    x, y = examples()
    model = Viewing().double()
    neurons = fedspu.map_neurons(model, x[:2])
    active = fedspu.choose_ordered(neurons, 0.5)
    with fedspu.partial_training(model, neurons, active):
        F.cross_entropy(model(x), y).backward()


def test_hooks_see_maps_in_the_usual_format() -> None:
    model = small_mobile_net().double()
    x, _ = examples()
    neurons = fedspu.map_neurons(model, x[:2])
    seen = []
    with fedspu.partial_training(model, neurons, fedspu.choose_ordered(neurons, 0.5)):
        model[3].register_forward_hook(lambda *given: seen.append(is_last(given[2])))
        model(x)
    assert seen == [False]


def test_maps_that_a_model_returns_are_in_the_usual_format() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 5, 1)).double()
    x, _ = examples()
    wanted = copy.deepcopy(model)(x)
    neurons = fedspu.map_neurons(model, x[:2])
    with fedspu.partial_training(model, neurons, fedspu.choose_ordered(neurons, 0.5)):
        out = model(x)
    assert out.is_contiguous()
    assert torch.allclose(out, wanted, atol=1e-12)


@pytest.mark.parametrize("last", [False, True])
def test_a_part_without_gaps_keeps_its_format(last: bool) -> None:
    x, _ = examples()
    kind = torch.channels_last if last else torch.contiguous_format
    part = compact(x.contiguous(memory_format=kind)[:, :2])
    assert part.is_contiguous(memory_format=kind)
    assert torch.equal(part, x[:, :2])


@pytest.mark.parametrize("number", [1, 3, 7])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (2, 7, 3, 4), (2, 7, 1, 1)])
@pytest.mark.parametrize("is_last_format", [False, True])
def test_parts_are_taken_in_the_same_way_from_every_format(
    number: int, shape: tuple[int, ...], is_last_format: bool
) -> None:
    rng = torch.Generator().manual_seed(number)
    x = torch.randn(shape, generator=rng)
    if is_last_format and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    for dim in (*range(x.dim()), -1):
        span = torch.randperm(x.shape[dim], generator=rng)[:number].sort().values
        for whole in (x, x[:, :2], x[1:], x.transpose(0, 1)):
            inside = span[span < whole.shape[dim]]
            found = take_span(whole, dim, inside)
            assert torch.equal(found, whole.index_select(dim, inside))
            if is_last(whole) and dim == 1 and len(inside) > 1:
                assert is_last(found) or not whole.is_contiguous(
                    memory_format=torch.channels_last
                )


@pytest.mark.parametrize(("share", "way"), [(0.25, "block"), (0.9, "full")])
def test_a_convolution_is_computed_in_full_where_its_block_does_not_pay(
    share: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedspu.partial.costs.MIN_PRODUCTS", 0)
    layers = (nn.Conv2d(3, 64, 3), nn.SiLU(), nn.Conv2d(64, 64, 3), nn.SiLU())
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(4, 3, 8, 8)
    neurons = fedspu.map_neurons(model, x)
    active = fedspu.choose_random(neurons, share, fedspu.stream(0, "neurons"))
    for saves, wanted in (("fast", way), ("lean", "block")):
        with fedspu.partial_training(model, neurons, active, saves=saves):  # type: ignore[arg-type]
            model(x).sum().backward()
            assert paths(model)["2.weight"] == wanted


class Grouped(nn.Module):
    """A residual network with group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.second, self.third = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 24, 3)
        self.last, self.head = nn.GroupNorm(4, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of images."""
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.last(self.third(F.relu(x + self.second(x)))))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


@pytest.mark.parametrize("p", [0.2, 0.6, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lean_steps_with_group_norms_have_the_gradients_of_fast_ones(
    p: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedspu.partial.costs.MIN_PRODUCTS", 0)
    torch.manual_seed(0)
    model, x = Grouped().to(dtype), torch.randn(6, 3, 9, 9, dtype=dtype)
    neurons = fedspu.map_neurons(model, x[:2])
    active = fedspu.choose_random(neurons, p, fedspu.stream(0, "neurons"))
    found = []
    for saves in ("fast", "lean"):
        own = copy.deepcopy(model)
        with fedspu.partial_training(own, neurons, active, saves=saves) as leaves:
            F.cross_entropy(own(x), torch.arange(6) % 5).backward()
            found.append([leaf.grad for leaf in leaves])
    close = 1e-5 if dtype == torch.float32 else 1e-12
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert torch.allclose(a, b, atol=close)
