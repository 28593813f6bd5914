"""Partial training together with what people use around it.

The same code trains twice: the leaves of ``partial_training``, and the full model in
plain PyTorch, where hooks zero the gradient of frozen entries and put these back after
each step of an optimizer. The two must come out the same.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

import fedspu
from fedspu import Active, Blocks, Neurons, state_of
from fedspu.errors import ModelError
from fedspu.neurons.blocks import take
from fedspu.partial.spans import Layout
from fedspu.partial.weight import Mode, Saves
from tests.oracles.models import (
    mapped,
    mask_of,
    quietly_mapped,
    random_active,
    random_input,
    random_labels,
    random_model,
    run,
    seeded,
    shaken,
)
from tests.oracles.tables import same_bits
from tests.oracles.zoo import ZOO_BY_NAME, chain

LAYOUTS: tuple[Layout, ...] = ("auto", "index")
SAVES: tuple[Saves, ...] = ("fast", "lean")
MODES: tuple[Mode, ...] = ("exact", "truncated")

NEVER = 10**18
PATHS = {  # the sizes from which on a chain runs as one, and a kernel of ours runs
    "chain": (0, 0),
    "kernels": (NEVER, 0),
    "plain": (NEVER, NEVER),
}


@dataclass(frozen=True)
class Way:
    """One of the ways in which the same numbers are computed."""

    path: str
    layout: Layout
    saves: Saves

    def __str__(self) -> str:
        return f"{self.path}-{self.layout}-{self.saves}"

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Inside, this path is taken however small the model."""
        smallest_chain, smallest_kernel = PATHS[self.path]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedspu.partial.chain.autograd.MIN_VALUES", smallest_chain)
            patch.setattr("fedspu.partial.costs.MIN_PRODUCTS", smallest_kernel)
            patch.setattr("fedspu.partial.costs.MOST_OF_ALL", 1.0)
            yield

    def training(
        self, model: nn.Module, what: "Setting", mode: Mode = "exact"
    ) -> AbstractContextManager[list[Tensor]]:
        return fedspu.partial_training(
            model, what.neurons, what.active, mode, self.layout, self.saves
        )


WAYS = [
    Way(path, layout, saves)
    for path, layout, saves in product(PATHS, LAYOUTS, SAVES)
    if (path, layout) != ("chain", "index")  # chains put active neurons first
]


def by(*names: str) -> pytest.MarkDecorator:
    """Some of the ways only, for what does not depend on the others."""
    some = [w for w in WAYS if f"{w.path}-{w.layout}" in names or str(w) in names]
    return pytest.mark.parametrize("way", some, indirect=True, ids=str)


by_two = by("chain-auto", "kernels-index")  # as different as can be
by_leaves = by("chain-auto-fast", "kernels-index-fast")  # views of weights, and copies
by_kernels = by("kernels-auto", "kernels-index")
by_three = by("chain-auto", "kernels-auto", "kernels-index")


# What is trained ----------------------------------------------------------------------


def mlp() -> nn.Module:
    return chain(
        fc1=nn.Linear(6, 8),
        relu1=nn.ReLU(),
        fc2=nn.Linear(8, 7),
        relu2=nn.ReLU(),
        fc3=nn.Linear(7, 3),
    )


def cnn() -> nn.Module:
    return chain(
        conv1=nn.Conv2d(2, 6, 3, padding=1),
        bn=nn.BatchNorm2d(6),
        relu1=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 5, 3),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc=nn.Linear(5 * 2 * 2, 3),
    )


class Residual(nn.Module):
    """A block beside a shortcut; its activations may be computed twice to save memory.

    ``reentrant`` is how it checkpoints the block; it does not while this is None.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.block = chain(
            conv1=nn.Conv2d(6, 5, 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(5),
            relu=nn.ReLU(),
            dropout=nn.Dropout(dropout),
            conv2=nn.Conv2d(5, 6, 1),
        )
        self.fc = nn.Linear(6, 3)
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        if self.reentrant is None:
            x = x + self.block(x)
        else:
            x = x + checkpoint(self.block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4, 6)),
    "cnn": (cnn, (4, 2, 8, 8)),
    "residual": (Residual, (4, 2, 6, 6)),
    "dropout": (partial(Residual, 0.5), (4, 2, 6, 6)),
}


@dataclass(frozen=True)
class Setting:
    """A model in float64, inputs for it by number, and which neurons train."""

    model: nn.Module
    neurons: Neurons
    active: Active
    draw: Callable[[int], Any]

    @cached_property
    def blocks(self) -> Blocks:
        return self.neurons.blocks(self.active)

    def fresh(self) -> nn.Module:
        return copy.deepcopy(self.model).train()

    def loss(self, model: nn.Module, t: int = 0) -> Tensor:
        return loss_of(model, self.draw(t), t)


def own_setting(build: Callable[[], nn.Module], *shape: int, p: float = 0.5) -> Setting:
    with seeded(0):
        model = shaken(build())

    def draw(t: int) -> Tensor:
        generator = torch.Generator().manual_seed(t)
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    neurons = quietly_mapped(model, draw(0))
    assert neurons.groups
    return Setting(model, neurons, random_active(neurons, p, seed=1), draw)


@cache
def setting(name: str) -> Setting:
    if name in OWN:
        build, shape = OWN[name]
        return own_setting(build, *shape)
    entry = ZOO_BY_NAME[name]
    active = random_active(mapped(name), 0.5, seed=1)
    inputs = cache(partial(random_input, entry))
    return Setting(random_model(entry), mapped(name), active, partial(copied, inputs))


def copied(inputs: Callable[[int], Any], t: int) -> Any:
    return copy.deepcopy(inputs(t))


def loss_of(model: nn.Module, x: Any, t: int = 0) -> Tensor:
    """Cross-entropy with random labels; dropout draws from the number."""
    dropouts = (layer for layer in model.modules() if isinstance(layer, nn.Dropout))
    with seeded(t) if any(layer.p for layer in dropouts) else nullcontext():
        output = run(model, x)
    return F.cross_entropy(output, random_labels(output, t))


def learnable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# Masked dense training, the plain way -------------------------------------------------


def masks_of(model: nn.Module, blocks: Blocks) -> dict[str, Tensor]:
    return {
        name: mask_of(tuple(w.shape), blocks[name])
        for name, w in learnable(model).items()
    }


@contextmanager
def masked(
    model: nn.Module, blocks: Blocks, mode: Mode = "exact"
) -> Iterator[list[Tensor]]:
    """The model's own weights; inside, nothing outside the blocks trains."""
    weights, masks = learnable(model), masks_of(model, blocks)
    before = {name: w.detach().clone() for name, w in weights.items()}

    def put_back(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        with torch.no_grad():
            for name, w in weights.items():
                if id(w) in stepped:
                    w.copy_(torch.where(masks[name], w, before[name]))

    handles: list[Any] = [optimizers.register_optimizer_step_post_hook(put_back)]
    for name, w in weights.items():
        handles.append(w.register_hook(partial(torch.mul, masks[name])))
    if mode == "truncated":
        handles += cut_at_layers(model, blocks)
    try:
        yield list(weights.values())
    finally:
        for handle in handles:
            handle.remove()


def cut_at_layers(model: nn.Module, blocks: Blocks) -> list[Any]:
    """A cut before and after each weighted layer: the truncated gradient as defined."""
    handles = []
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            outs, ins = blocks[f"{path}.weight"][:2]
            dim = -1 if isinstance(layer, nn.Linear) else 1
            before = partial(cut_before, dim, ins)
            after = partial(cut_after, dim, outs)
            handles.append(layer.register_forward_pre_hook(before))
            handles.append(layer.register_forward_hook(after))
    return handles


def cut_before(dim: int, places: Tensor | None, _: Any, args: Any) -> Any:
    return (cut(args[0], dim, places),)


def cut_after(dim: int, places: Tensor | None, *rest: Any) -> Tensor:
    return cut(rest[-1], dim, places)


def cut(x: Tensor, dim: int, places: Tensor | None) -> Tensor:
    if places is None:
        return x
    is_active = torch.zeros(x.shape[dim], dtype=torch.bool)
    is_active[places] = True
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.where(is_active.view(shape), x, x.detach())


# The comparison -----------------------------------------------------------------------

Script = Callable[[nn.Module, list[Tensor]], list[Tensor] | None]
"""Trains a model by what is given to train; may return what it saw on the way."""


def assert_same(
    way: Way,
    what: Setting,
    script: Script,
    mode: Mode = "exact",
    atol: float = 1e-10,
    must_move: bool = True,
) -> None:
    """The script trains and sees the same; frozen entries do not move by a bit."""
    dense, ours = what.fresh(), what.fresh()
    before = state_of(ours)
    with masked(dense, what.blocks, mode) as weights:
        expected = script(dense, weights)
    with way.training(ours, what, mode) as weights:
        seen = script(ours, weights)
    assert_close(seen or [], expected or [], atol)
    after, wanted = state_of(ours), state_of(dense)
    assert_close(list(after.values()), list(wanted.values()), atol)
    masks = masks_of(ours, what.blocks)
    for name, inside in masks.items():
        assert same_bits(after[name][~inside], before[name][~inside]), name
    has_moved = any((after[n] != before[n])[masks[n]].any() for n in masks)
    assert has_moved or not must_move


def assert_close(ours: list[Tensor], theirs: list[Tensor], atol: float = 1e-10) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        found, wanted = one.detach().double(), other.detach().double()
        assert torch.allclose(found, wanted, rtol=0, atol=atol)


def sgd(weights: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=0.1)


def one_step(weights: list[Tensor]) -> None:
    """Plain SGD: what moves is the gradient."""
    torch.optim.SGD(weights, lr=1.0).step()


Make = Callable[[list[Tensor]], torch.optim.Optimizer]


# A large eps, so that rounding stays rounding.
OPTIMIZERS: dict[str, Make] = {
    "nesterov": lambda ws: torch.optim.SGD(
        ws, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "dampened": lambda ws: torch.optim.SGD(ws, lr=0.05, momentum=0.9, dampening=0.5),
    "ascending": lambda ws: torch.optim.SGD(ws, lr=0.01, maximize=True),
    "amsgrad": lambda ws: torch.optim.Adam(
        ws, lr=0.01, eps=1e-4, weight_decay=0.1, amsgrad=True
    ),
    "adamw": lambda ws: torch.optim.AdamW(ws, lr=0.01, eps=1e-4, weight_decay=0.1),
    "foreach": lambda ws: torch.optim.AdamW(ws, lr=0.01, eps=1e-4, foreach=True),
    "rmsprop": lambda ws: torch.optim.RMSprop(
        ws, lr=0.001, eps=1e-3, momentum=0.9, weight_decay=0.1, centered=True
    ),
    "adagrad": lambda ws: torch.optim.Adagrad(ws, lr=0.01, eps=1e-4, lr_decay=0.1),
    "adadelta": lambda ws: torch.optim.Adadelta(ws, eps=1e-4, weight_decay=0.1),
    "adamax": lambda ws: torch.optim.Adamax(ws, lr=0.01, eps=1e-4, weight_decay=0.1),
    "nadam": lambda ws: torch.optim.NAdam(
        ws, lr=0.01, eps=1e-4, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "radam": lambda ws: torch.optim.RAdam(ws, lr=0.01, eps=1e-4, weight_decay=0.1),
    "asgd": lambda ws: torch.optim.ASGD(ws, lr=0.01, weight_decay=0.1),
}


def plain_script(what: Setting, make: Make, steps: int = 4) -> Script:
    def script(model: nn.Module, weights: list[Tensor]) -> None:
        optimizer = make(weights)
        for t in range(steps):
            optimizer.zero_grad()
            what.loss(model, t).backward()
            optimizer.step()

    return script


def clip_norm(weights: list[Tensor]) -> Tensor:
    return nn.utils.clip_grad_norm_(weights, 0.1)


def clip_greatest(weights: list[Tensor]) -> Tensor:
    return nn.utils.clip_grad_norm_(weights, 0.01, norm_type=float("inf"))


def clip_value(weights: list[Tensor]) -> Tensor:
    nn.utils.clip_grad_value_(weights, 0.01)
    return torch.zeros(())


CLIPS = {"norm": clip_norm, "greatest": clip_greatest, "value": clip_value}


def accumulating_script(what: Setting, clip: str, set_to_none: bool) -> Script:
    """Three batches for each of three steps, clipped before each."""

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        optimizer, norms = sgd(weights), []
        for t in range(9):
            (what.loss(model, t) / 3).backward()
            if t % 3 == 2:
                norms.append(CLIPS[clip](weights))
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        return norms

    return script


def as_kind(value: Any, kind: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(kind) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: as_kind(item, kind) for key, item in value.items()}
    return tuple(as_kind(item, kind) for item in value)


def flat_gradient(weights: list[Tensor], blocks: list[Any] | None = None) -> Tensor:
    found = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
    if blocks is not None:
        found = [take(g, where) for g, where in zip(found, blocks, strict=True)]
    return torch.cat([g.double().flatten() for g in found])


def errors(
    way: Way, what: Setting, exact: nn.Module, low: nn.Module, backward: Any
) -> tuple[float, float, float]:
    """Relative errors: of plain half precision, of ours, and between the two.

    ``backward(model, is_low)`` computes the gradients.
    """
    where = [what.blocks[name] for name in learnable(exact)]
    plain, ours = copy.deepcopy(low), copy.deepcopy(low)
    backward(exact, False)
    truth = flat_gradient(list(learnable(exact).values()), where)
    backward(plain, True)
    theirs = flat_gradient(list(learnable(plain).values()), where)
    with way.training(ours, what) as trainable:
        backward(ours, True)
        found = flat_gradient(trainable)
        assert all(t.grad is None or t.grad.dtype == t.dtype for t in trainable)
    size = float(truth.norm())
    return (
        float((theirs - truth).norm()) / size,
        float((found - truth).norm()) / size,
        float((found - theirs).norm()) / size,
    )


def in_autocast(x: Any) -> Callable[[nn.Module, bool], None]:
    def backward(model: nn.Module, is_low: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
            loss = loss_of(model, x)
        loss.backward()

    return backward


# Attention is scaled in another place, and convolutions of 1x1 are products: on
# processors with AVX-512, those of conv_head are summed in another order. What is
# shuffled into pixels is summed over other channels.
ROUND_OTHERWISE = (
    *("transformer", "vit", "attention", "up2d", "pixel_shuffle", "conv_head"),
)


def assert_rounds_alike(name: str, found: tuple[float, float, float]) -> None:
    theirs, ours, apart = found
    assert theirs > 1e-3  # or half precision was not on
    if name in ROUND_OTHERWISE:
        assert ours < 2 * theirs
        assert apart < 3 * theirs
    else:  # nearly all of them come out bit for bit the same
        assert apart < 0.2 * theirs


def beside(layer: nn.Module, inputs: int, outputs: int, dims: int) -> nn.Module:
    """A layer between two others, so that its inputs and outputs are neurons."""
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    first, last = conv(2, inputs, 1), conv(outputs, 3, 1)
    return chain(first=first, tanh1=nn.Tanh(), it=layer, tanh2=nn.Tanh(), last=last)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.it = nn.MultiheadAttention(8, 4, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        mixed, _ = self.it(h, h, h, need_weights=False)
        logits: Tensor = self.last(mixed).mean(1)
        return logits


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (
        lambda: chain(
            first=nn.Linear(5, 8),
            tanh1=nn.Tanh(),
            it=nn.Linear(8, 6),
            tanh2=nn.Tanh(),
            last=nn.Linear(6, 3),
        ),
        (4, 5),
    ),
    "conv1d": (lambda: beside(nn.Conv1d(8, 6, 3), 8, 6, 1), (4, 2, 9)),
    "conv2d": (lambda: beside(nn.Conv2d(8, 6, 3), 8, 6, 2), (4, 2, 6, 6)),
    "conv3d": (lambda: beside(nn.Conv3d(8, 6, 3), 8, 6, 3), (4, 2, 5, 5, 5)),
    "grouped": (lambda: beside(nn.Conv2d(8, 6, 3, groups=2), 8, 6, 2), (4, 2, 6, 6)),
    "depthwise": (lambda: beside(nn.Conv2d(8, 8, 3, groups=8), 8, 8, 2), (4, 2, 6, 6)),
    "up1d": (lambda: beside(nn.ConvTranspose1d(8, 6, 3), 8, 6, 1), (4, 2, 9)),
    "up2d": (lambda: beside(nn.ConvTranspose2d(8, 6, 3), 8, 6, 2), (4, 2, 6, 6)),
    "up3d": (lambda: beside(nn.ConvTranspose3d(8, 6, 3), 8, 6, 3), (4, 2, 4, 4, 4)),
    "attention": (Attentive, (4, 5, 5)),
}


@cache
def layer_setting(name: str) -> Setting:
    build, shape = LAYERS[name]
    return own_setting(build, *shape)


def judging_script(
    what: Setting, judging: Callable[[], AbstractContextManager[Any]]
) -> Script:
    """Three steps, with a look at the outputs in both modes before each."""

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        optimizer, seen = sgd(weights), []
        for t in range(3):
            for is_training in (False, True):
                model.train(is_training)
                with judging():
                    seen.append(what.loss(model, 9).clone())
            optimizer.zero_grad()
            what.loss(model, t).backward()
            optimizer.step()
        return seen

    return script


class StopError(Exception):
    """Somebody's own exception."""


def stop(*_: Any) -> None:
    raise StopError


def checkpointing_script(what: Setting, reentrant: bool) -> Script:
    def script(model: nn.Module, weights: list[Tensor]) -> None:
        assert isinstance(model, Residual)
        model.reentrant = reentrant
        accumulating_script(what, "norm", set_to_none=True)(model, weights)

    return script


def functional(
    model: nn.Module, given_so: dict[str, Tensor], x: Tensor
) -> list[Tensor]:
    """The output with these weights, their gradients, and what became of the model."""
    leaves = {n: w.detach().clone().requires_grad_() for n, w in given_so.items()}
    output = torch.func.functional_call(model, leaves, (x,))
    found = torch.autograd.grad(output.square().mean(), list(leaves.values()))
    return [output, *found, *state_of(model).values()]


def others(model: nn.Module) -> dict[str, Tensor]:
    with seeded(5):
        return {n: w + torch.randn_like(w) for n, w in learnable(model).items()}


def assert_called_alike(way: Way, name: str, *which: str) -> None:
    """A call with other weights, all or these, is right or refused."""
    what = setting(name)
    weights = {n: w for n, w in others(what.model).items() if not which or n in which}
    expected = functional(what.fresh(), weights, what.draw(0))
    model = what.fresh()
    with way.training(model, what):
        try:
            found = functional(model, weights, what.draw(0))
        except ModelError:
            assert way.layout == "auto"
            return
        assert_close(found, expected)
