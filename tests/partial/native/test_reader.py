"""Which models the compiled code can read, and why not the others."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import models
from fedspu.partial.chain.native.models import make_judge, stages_of, why_not
from fedspu.partial.chain.native.stages import NotAChainError
from tests.partial.native.nets import distance


class Written(nn.Module):
    """A network in the style of many tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.short = nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 4 * 4, 20), nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.tanh(self.one(x)), (2, 2))
        x = F.relu(self.two(x) + self.short(x))
        x = F.avg_pool2d(x, 2)
        x = x.view(x.size(0), -1)
        x = F.dropout(F.leaky_relu(self.fc1(x), 0.2), training=self.training)
        scores: Tensor = self.fc2(x)
        return scores


class Reshaped(Written):
    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).relu_()
        x = F.max_pool2d(x, 2)
        x = F.gelu(self.two(x), approximate="tanh").mean((2, 3))
        return x.reshape(x.shape[0], -1)


class PoolFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(1), nn.Conv2d(1, 3, 3, padding="same")
        self.last = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = self.conv(x) + x
        return torch.flatten(self.last(x), 1)


@pytest.mark.parametrize("build", [Written, Reshaped])
def test_models_as_people_write_them(build: type[nn.Module]) -> None:
    model, x = build().eval(), torch.randn(5, 1, 28, 28)
    run = make_judge(model, (1, 28, 28))
    assert run is not None
    with torch.no_grad():
        wanted = model(x)
        assert run(x).shape == wanted.shape
        assert distance(run(x), wanted.double()) < 1e-5


@pytest.mark.parametrize("name", ["digits", "emnist", "cifar10", "speech", "mlp"])
def test_built_in_models(name: str) -> None:
    model = models.build(name, 10)
    shape: Any = model.input_shape
    assert why_not(model.train(), shape) is None
    assert why_not(model.eval(), shape) is None


def test_a_residual_network_is_a_chain_with_sums() -> None:
    model = models.build("resnet18", 10)
    assert why_not(model, (3, 32, 32)) == (
        "a convolution with 256 input channels: PyTorch is faster there"
    )
    stages = stages_of(nn.Sequential(*list(model.children())[:3]), (3, 32, 32))
    assert any(stage.adds >= 0 for stage in stages)


def conv(**given: object) -> nn.Conv2d:
    return nn.Conv2d(2, 4, 3, **given)  # type: ignore[arg-type]


SHARED = nn.Linear(8, 8)

OTHERS: dict[str, tuple[nn.Module, str]] = {
    "groups": (nn.Sequential(conv(groups=2)), "groups"),
    "reflect": (
        nn.Sequential(conv(padding_mode="reflect", padding=1)),
        "other padding",
    ),
    "sigmoid": (nn.Sequential(conv(), nn.Sigmoid()), "Sigmoid"),
    "overlap": (nn.Sequential(conv(), nn.MaxPool2d(3, 2)), "overlapping"),
    "padded": (nn.Sequential(conv(), nn.MaxPool2d(2, padding=1)), "padded"),
    "adaptive": (nn.Sequential(conv(), nn.AdaptiveAvgPool2d(2)), "adaptive"),
    "layernorm": (nn.Sequential(nn.Flatten(), nn.LayerNorm(128)), "LayerNorm"),
    "on maps": (nn.Sequential(conv(), nn.Linear(6, 3)), "on maps"),
    "twice": (nn.Sequential(nn.Flatten(), nn.Linear(128, 8), SHARED, SHARED), "twice"),
    "cumulative": (nn.Sequential(conv(), nn.BatchNorm2d(4, momentum=None)), "norm"),
    "flat maps": (nn.Sequential(conv(), nn.Flatten()), "flattened maps"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_cannot_read_it_names(name: str) -> None:
    model, words = OTHERS[name]
    with pytest.raises(NotAChainError, match=words):
        stages_of(model, (2, 8, 8))


def test_a_model_with_hooks_or_its_own_forward_is_left_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    assert why_not(model, (1, 2, 2)) is None
    handle = model[1].register_forward_hook(lambda *_: None)
    assert why_not(model, (1, 2, 2)) is not None
    handle.remove()
    model[1].forward = lambda x: x
    assert why_not(model, (1, 2, 2)) is not None


def test_a_function_of_the_users_own_is_not_taken_for_another() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return relu(x.flatten(1))

    assert why_not(Own(), (1, 2, 2)) is not None


@torch.fx.wrap
def relu(x: Tensor) -> Tensor:
    return x * 2
