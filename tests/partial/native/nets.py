"""Random networks that the compiled code can run, and the slow obvious way to train."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspu.partial.chain.native.calls import Values, backward, forward, make_gradients
from fedspu.partial.chain.native.models import names_of, stages_of
from fedspu.partial.chain.native.network import Network
from fedspu.partial.chain.native.parts import read_parts
from fedspu.partial.spans import Spans, take_spans

CLASSES = 5


class Residual(nn.Module):
    """Adds what goes in to what its layers make of it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """The sum, through a ReLU."""
        return F.relu(self.layers(x) + x)


def activation(draw: st.DrawFn) -> nn.Module:
    """Any activation that the compiled code knows."""
    return draw(
        st.sampled_from(
            [
                nn.ReLU(),
                nn.LeakyReLU(0.1),
                nn.Tanh(),
                nn.GELU(),
                nn.GELU(approximate="tanh"),
            ]
        )
    )


def norm(draw: st.DrawFn, channels: int) -> nn.Module:
    """A batch norm or group norm, with weights of both signs."""
    kind = draw(st.sampled_from(["batch", "group", "plain"]))
    if kind == "batch":
        layer: nn.Module = nn.BatchNorm2d(channels)
    else:
        groups = draw(st.sampled_from([g for g in (1, 2, 3) if channels % g == 0]))
        layer = nn.GroupNorm(groups, channels, affine=kind == "group")
    return layer


def pool(draw: st.DrawFn, size: tuple[int, int]) -> tuple[nn.Module, tuple[int, int]]:
    """A pool and its window, which fits."""
    windows = [(2, 2), (2, 2), (3, 2), (1, 3), size]
    windows = [w for w in windows if w[0] <= size[0] and w[1] <= size[1]]
    window = draw(st.sampled_from(windows))
    kind = draw(st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]))
    return kind(window), window


@st.composite
def chains(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, int, int]]:
    """A random chain, and the shape of its examples."""
    channels, height = draw(st.integers(1, 3)), draw(st.integers(3, 9))
    width = draw(st.integers(3, 9))
    shape = (channels, height, width)
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(0, 3))):
        kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        dilation = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
        padding = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
        stride = (draw(st.integers(1, 3)), draw(st.integers(1, 2)))
        reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        if height + 2 * padding[0] < reach[0] or width + 2 * padding[1] < reach[1]:
            break
        outputs = draw(st.integers(2, 7))
        layers.append(
            nn.Conv2d(
                *(channels, outputs, kernel, stride, padding, dilation),
                bias=draw(st.booleans()),
            )
        )
        channels = outputs
        height = (height + 2 * padding[0] - reach[0]) // stride[0] + 1
        width = (width + 2 * padding[1] - reach[1]) // stride[1] + 1
        for kind in draw(st.permutations(["norm", "act", "pool", "residual"])):
            if not draw(st.booleans()):
                continue
            if kind == "norm":
                layers.append(norm(draw, channels))
            elif kind == "act":
                layers.append(activation(draw))
            elif kind == "residual":
                inner = nn.Conv2d(channels, channels, 3, padding=1)
                layers.append(Residual(inner, norm(draw, channels)))
            else:
                layer, window = pool(draw, (height, width))
                layers.append(layer)
                height, width = height // window[0], width // window[1]
    layers.append(nn.Flatten())
    features = channels * height * width
    for _ in range(draw(st.integers(0, 2))):
        outputs = draw(st.integers(2, 9))
        layers.append(nn.Linear(features, outputs, bias=draw(st.booleans())))
        if draw(st.booleans()):
            layers.append(nn.BatchNorm1d(outputs))
        if draw(st.booleans()):
            layers.append(activation(draw))
        features = outputs
    layers.append(nn.Linear(features, CLASSES))
    return randomized(nn.Sequential(*layers), draw(st.integers(0, 2**31))), shape


def randomized(model: nn.Module, seed: int) -> nn.Module:
    """The same model with norms that are not at rest.

    Their eps is large: by the usual one, norms of a few values that are almost the same
    magnify what float32 rounds off, and PyTorch's own results are then as far off.
    """
    rng = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm):
            layer.eps = 0.1
            for parameter in layer.parameters():
                parameter.data = torch.randn(parameter.shape, generator=rng)
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            size = (layer.num_features,)
            layer.running_mean = torch.randn(size, generator=rng)
            layer.running_var = torch.rand(size, generator=rng) + 0.5
        if isinstance(layer, nn.Conv2d | nn.Linear):
            for parameter in layer.parameters():
                parameter.data = torch.randn(parameter.shape, generator=rng) * (
                    parameter[0].numel() ** -0.5
                )
    return model.train()


def examples(
    shape: tuple[int, ...], number: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Random examples and labels."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn((number, *shape), generator=rng)
    return x, torch.randint(CLASSES, (number,), generator=rng)


def has_one_value(model: nn.Module, x: Tensor) -> bool:
    """Whether a batch norm sees one value per channel, which PyTorch refuses."""
    try:
        copy.deepcopy(model)(x)
    except ValueError:
        return True
    return False


def parts(model: nn.Module, p: float, seed: int) -> dict[str, Spans]:
    """A random part of the outputs of every layer, the same for its norm.

    Inputs are chosen on their own: nothing here says which layer feeds which.
    """
    rng = np.random.default_rng(seed)
    chosen: dict[str, Spans] = {}
    rows: Any = None
    for name, layer in model.named_modules():
        for kind, parameter in layer._parameters.items():
            if parameter is None:
                continue
            if isinstance(layer, nn.Conv2d | nn.Linear):
                if kind == "weight":
                    rows = some(len(parameter), p, rng)
                    columns = None
                    if isinstance(layer, nn.Conv2d):
                        columns = some(parameter.shape[1], p, rng)
                    spans: Spans = (rows, columns, *[None] * (parameter.dim() - 2))
                else:
                    spans = (rows,)
            else:
                same = rows is not None and int(rows.max()) < len(parameter)
                spans = (rows if same else None,)
            chosen[f"{name}.{kind}"] = spans
    return chosen


def some(size: int, p: float, rng: np.random.Generator) -> Tensor:
    """Some of this many positions, sorted; at least one."""
    count = max(1, round(p * size))
    return torch.from_numpy(np.sort(rng.choice(size, count, replace=False)))


def native_gradients(
    model: nn.Module,
    spans: Mapping[str, Spans],
    x: Tensor,
    grad: Tensor,
    is_truncated: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of the blocks by name."""
    shape = tuple(x.shape[1:])
    stages, names = stages_of(model, shape), names_of(model)
    found = read_parts(stages, names, spans, lambda name: True)
    network = Network(stages, found, shape, is_truncated)
    grads = make_gradients(network)
    values, work = Values(network, grads=grads), network.work(len(x))
    network.check_batch(len(x))
    out = forward(network, work, values, x, 7)
    backward(network, work, values, grad, 7)
    return out, {
        name: tensor
        for stage, of_stage in zip(stages, grads, strict=True)
        for name, tensor in zip(names(stage), of_stage, strict=True)
        if tensor is not None
    }


def slow_gradients(
    model: nn.Module, x: Tensor, y: Tensor
) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    """The same in float64: the model after it, its output, and all gradients."""
    slow = copy.deepcopy(model).double()
    out = slow(x.double())
    out.retain_grad()
    F.cross_entropy(out, y).backward()
    assert out.grad is not None
    grads = {name: p.grad for name, p in slow.named_parameters() if p.grad is not None}
    return slow, out.detach(), out.grad, grads


def distance(found: Tensor, wanted: Tensor, least: float = 1e-6) -> float:
    """The largest difference, as a share of the largest entry, or of ``least``."""
    scale = max(float(wanted.abs().max()), least)
    return float((found.double() - wanted).abs().max()) / scale


def is_as_good(
    found: Mapping[str, Tensor],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    spans: Mapping[str, Spans],
    tolerance: float = 2e-5,
) -> bool:
    """Whether gradients are close to those in float64: within a tolerance.

    Where values almost cancel, as they do around norms of few values, no float32 can do
    this. Then ten times as far is allowed as they move when every layer's output and
    its gradient are rounded, or twice as far as PyTorch's own are; and a block's
    largest entry counts as at least a hundredth of the largest of all.
    """
    wanted, plain = slow_gradients(model, x, y)[3], float_gradients(model, x, y)
    rounded = [slow_gradients(_Rounded(model, seed), x, y)[3] for seed in range(3)]
    assert found.keys() == wanted.keys()
    least = 0.01 * max(float(grad.abs().max()) for grad in wanted.values())
    for name, block in found.items():
        slow = take_spans(wanted[name], spans[name])
        moved = max(
            distance(take_spans(grads[f"model.{name}"], spans[name]), slow, least)
            for grads in rounded
        )
        theirs = distance(take_spans(plain[name], spans[name]), slow, least)
        if not distance(block, slow, least) <= max(tolerance, 10 * moved, 2 * theirs):
            return False
    return True


class _Rounded(nn.Module):
    """The same model, with errors as large as those of float32 after every layer."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self.model, self.seed = copy.deepcopy(model), seed
        for layer in self.model.modules():
            if not list(layer.children()):
                layer.register_forward_hook(self._round)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the model."""
        self.rng = torch.Generator().manual_seed(self.seed)
        out: Tensor = self.model(x)
        return out

    def _round(self, layer: nn.Module, given: Any, out: Tensor) -> Tensor:
        out = self._noisy(out)
        if out.requires_grad:
            out.register_hook(self._noisy)
        return out

    def _noisy(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.rng, dtype=x.dtype) - 0.5
        return x * (1 + noise * 2.0**-22)


def float_gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """PyTorch's own gradients in float32."""
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(x), y).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
