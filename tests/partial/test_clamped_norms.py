"""Batch norm and ReLU as one compiled operation, beside PyTorch in float64."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fedspu
from fedspu.partial import clamped_norms
from fedspu.partial.clamped_norms import NO_LIMITS, RELU, ClampedNorm, Limits
from fedspu.partial.norms import NormPart

LIMITS: list[Limits] = [NO_LIMITS, RELU, (0.0, 6.0), (-0.5, 0.25)]


def distance(found: Tensor, wanted: Tensor, least: float = 1e-6) -> float:
    """The largest difference, as a share of the largest entry, or of ``least``."""
    most = float(wanted.abs().max())
    return float((found.double() - wanted).abs().max()) / max(most, least)


def beside(x: Tensor, weight: Tensor, bias: Tensor, limits: Limits) -> dict[str, float]:
    """How far all results are from those in float64, relative to the largest entry."""
    x = x.contiguous(memory_format=torch.channels_last)
    channels = x.shape[1]
    running = torch.randn(channels), torch.rand(channels)
    slow = [t.double().clone() for t in running]
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    wanted = F.batch_norm(wide[0], slow[0], slow[1], wide[1], wide[2], True, 0.3, 1e-3)
    near = torch.zeros_like(wanted, dtype=torch.bool)  # what rounding may clamp or not
    for limit in limits:
        near |= (wanted - limit).abs() < 1e-4
    wanted = wanted.clamp(*limits)
    grad = torch.randn_like(x).masked_fill(near, 0)
    wanted.backward(grad.double())
    ours = [t.clone().requires_grad_() for t in (x, weight, bias)]
    found: Any = ClampedNorm.apply(  # type: ignore[no-untyped-call]
        *ours, weight, bias, running, (0.3, 1e-3), limits, NormPart(None, None)
    )
    found.backward(grad)
    pairs = {"output": (found, wanted), "mean": (running[0], slow[0])}
    pairs["variance"] = running[1], slow[1]
    for name, a, b in zip(("x", "weight", "bias"), ours, wide, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        pairs[name] = a.grad, b.grad
    return {name: distance(a.detach(), b.detach()) for name, (a, b) in pairs.items()}


@given(
    st.integers(2, 9),
    st.integers(2, 70),
    st.integers(2, 9),
    st.integers(3, 9),
    st.sampled_from(LIMITS),
    st.integers(0, 99),
)
def test_it_is_as_close_to_float64_as_a_float_can_be(
    number: int, channels: int, height: int, width: int, limits: Limits, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(number, channels, height, width) * 3 + torch.randn(channels, 1, 1)
    weight, bias = torch.randn(channels), torch.randn(channels)
    for name, far in beside(x, weight, bias, limits).items():
        assert far < 2e-5, name


@pytest.mark.parametrize("channels", [3, 16, 24, 64, 130])
@pytest.mark.parametrize("limits", LIMITS)
def test_means_far_from_zero_and_weights_of_any_size(
    channels: int, limits: Limits
) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, channels, 11, 7) + 300 * torch.randn(channels, 1, 1)
    weight = torch.randn(channels) * torch.logspace(-3, 2, channels)
    weight[0] = 0
    far = beside(x, weight, torch.randn(channels), limits)
    assert max(far.values()) < 2e-5 * 30, far  # x itself is rounded to 300 / 2^24


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    x = torch.randn(2, 5, 4, 4).contiguous(memory_format=torch.channels_last)
    x[1, 2, 3, 1] = value
    ones, zeros = torch.ones(5), torch.zeros(5)
    y: Any = ClampedNorm.apply(  # type: ignore[no-untyped-call]
        x,
        ones,
        zeros,
        ones,
        zeros,
        (None, None),
        (0.1, 1e-5),
        RELU,
        NormPart(None, None),
    )
    assert y[:, 2].isnan().all()
    assert y[:, [0, 1, 3, 4]].isfinite().all()


# In models ----------------------------------------------------------------------------


class Net(nn.Module):
    """Norms with a ReLU behind them, with none, and with one that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True)
        )
        self.wide = nn.Conv2d(16, 24, 1, bias=False)
        self.wide_norm = nn.BatchNorm2d(24)
        self.deep = nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False)
        self.deep_norm = nn.BatchNorm2d(24)
        self.narrow = nn.Conv2d(24, 16, 1, bias=False)
        self.narrow_norm = nn.BatchNorm2d(16)
        self.twice = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.stem(x)
        y = F.relu(self.wide_norm(self.wide(x)))
        y = self.deep_norm(self.deep(y)).relu()
        x = x + self.narrow_norm(self.narrow(y))
        z = self.twice(x)
        x = z + F.relu(z)
        scores: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


def gradients(model: nn.Module, kernels: Any, p: float, mode: Any) -> dict[str, Tensor]:
    """What trains, and its gradients after one step; also statistics and the output."""
    torch.manual_seed(3)
    x, y = torch.randn(12, 3, 10, 9), torch.randint(5, (12,))
    neurons = fedspu.map_neurons(model, x[:2])
    active = fedspu.choose_random(neurons, p, fedspu.stream(0, "neurons"))
    found = {}
    context = fedspu.partial_training(model, neurons, active, mode, kernels=kernels)
    with context as trainable:
        out = model(x)
        F.cross_entropy(out, y).backward()
        found["output"] = out.detach()
        for i, leaf in enumerate(trainable):
            assert leaf.grad is not None
            found[str(i)] = leaf.grad
    return {**found, **{name: b.float() for name, b in model.named_buffers()}}


@pytest.mark.parametrize("mode", ["exact", "truncated"])
@pytest.mark.parametrize("p", [0.2, 0.6, 1.0])
def test_a_model_trains_as_by_pytorch(
    p: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Net().train()
    seen = []
    normed = clamped_norms._normed

    def watched(given: Any, limits: Limits) -> Tensor | None:
        seen.append(limits)
        return normed(given, limits)

    monkeypatch.setattr(clamped_norms, "_normed", watched)
    ours = gradients(copy.deepcopy(model), "native", p, mode)
    assert seen == [(0.0, 6.0), RELU, RELU, NO_LIMITS, NO_LIMITS]
    theirs = gradients(model, "torch", p, mode)
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        # The next norm takes some shifts away: their gradients are mere rounding.
        assert distance(ours[name], wanted.double(), least=1e-2) < 1e-4, name


def test_a_clamp_that_is_done_is_not_done_again() -> None:
    model = Net().train()
    x = torch.randn(6, 3, 8, 8)
    neurons = fedspu.map_neurons(model, x[:2])
    active = fedspu.choose_random(neurons, 0.5, fedspu.stream(0, "neurons"))
    names: list[str] = []
    with fedspu.partial_training(model, neurons, active):
        left = [model(x).grad_fn]
        while left:
            node: Any = left.pop()
            names.append(type(node).__name__)
            left += [below for below, _ in node.next_functions if below is not None]
    assert names.count("ReluBackward0") == 1  # of the norm that is read twice
    assert not any("Hardtanh" in name for name in names)


def test_checkpoints_and_eval_mode_run_as_usual() -> None:
    model = Net().train()
    x = torch.randn(6, 3, 8, 8)
    neurons = fedspu.map_neurons(model, x[:2])
    active = fedspu.choose_random(neurons, 0.5, fedspu.stream(0, "neurons"))
    with fedspu.partial_training(model, neurons, active) as trainable:
        out: Any = checkpoint(model, x, use_reentrant=False)
        out.sum().backward()
        assert all(leaf.grad is not None for leaf in trainable)
        model.eval()
        with torch.no_grad():
            inside = model(x)
    assert torch.allclose(inside, model(x), atol=1e-5)
