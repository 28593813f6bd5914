"""Whole epochs, a user's own loop, dropout and judging, beside plain PyTorch."""

import copy
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu.partial.chain.native.calls import Sgd
from fedspu.partial.chain.native.models import make_judge, make_training
from fedspu.partial.context import partial_training, paths
from fedspu.partial.spans import take_spans
from tests.partial.native.nets import CLASSES, distance, examples, parts


def small_net() -> nn.Sequential:
    """A chain with everything that moves in training but dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 12),
        nn.Tanh(),
        nn.Linear(12, CLASSES),
    )


SHAPE = (2, 8, 8)


class Masked:
    """The slow way: all gradients, of which only the blocks' are kept."""

    def __init__(self, model: nn.Module, spans: dict[str, Any]) -> None:
        self.model = copy.deepcopy(model).double()
        self.masks = {}
        for name, parameter in self.model.named_parameters():
            index = torch.arange(parameter.numel()).view(parameter.shape)
            mask = torch.zeros(parameter.numel(), dtype=torch.bool)
            mask[take_spans(index, spans[name]).flatten()] = True
            self.masks[name] = mask.view(parameter.shape)

    def step(self, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> float:
        """One step; weight decay must not move what is frozen."""
        before = copy.deepcopy(dict(self.model.named_parameters()))
        optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x.double()) + self.offsets, y)
        loss.backward()
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * self.masks[name]
        if self.clip:
            nn.utils.clip_grad_norm_(list(self.model.parameters()), self.clip)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.where(self.masks[name], parameter, before[name]))
        return float(loss.detach())

    clip = 0.0
    offsets = torch.zeros(CLASSES)


@pytest.mark.parametrize(
    ("momentum", "decay", "clip", "p", "offset"),
    list(product((0.0, 0.9), (0.0, 0.01), (0, 0.5), (0.4,), (0.0, 2.0))),
)
def test_fifty_steps_beside_plain_pytorch(
    momentum: float, decay: float, clip: float, p: float, offset: float
) -> None:
    model = small_net()
    x, y = examples(SHAPE, 37)
    spans, start = parts(model, p, 3), copy.deepcopy(model)
    slow = Masked(model, spans)
    slow.clip = clip
    optimizer = torch.optim.SGD(
        slow.model.parameters(), lr=0.1, momentum=momentum, weight_decay=decay
    )
    slow.offsets = offset * torch.randn(CLASSES)
    training = make_training(
        model,
        spans,
        x,
        y,
        Sgd(0.1, momentum, decay, clip),
        is_truncated=False,
        offsets=(lambda _: slow.offsets) if offset else None,
    )
    assert training is not None
    for epoch in range(17):
        order = torch.randperm(37, generator=torch.Generator().manual_seed(epoch))
        batches = list(order.split(16))  # the last has 5 images
        found = training.epoch(iter(batches), key=0)
        wanted = sum(slow.step(x[b], y[b], optimizer) * len(b) for b in batches)
        assert found == pytest.approx(wanted, rel=1e-4)
    for name, parameter in model.named_parameters():
        same = dict(slow.model.named_parameters())[name]
        assert distance(parameter.detach(), same.detach()) < 1e-3, name
        frozen = ~slow.masks[name]
        begin = dict(start.named_parameters())[name]
        assert torch.equal(parameter[frozen], begin[frozen])
    assert int(model.state_dict()["1.num_batches_tracked"]) == 51
    for name, buffer in slow.model.named_buffers():
        if buffer.is_floating_point():
            assert distance(dict(model.named_buffers())[name], buffer) < 1e-3


def test_the_same_bits_wherever_images_lie_in_memory() -> None:
    x, y = examples(SHAPE, 20)
    states = []
    for shift in (0, 1, 3):
        held = torch.empty(x.numel() + shift)
        moved = held[shift:].view(x.shape).copy_(x)
        model = small_net()
        training = make_training(model, parts(model, 0.5, 1), moved, y, Sgd(0.1), False)
        assert training is not None
        training.epoch(iter(torch.arange(20).split(8)), 0)
        states.append(model.state_dict())
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in state)


def test_labels_that_are_no_class_are_left_to_pytorch() -> None:
    model = small_net()
    x, y = examples(SHAPE, 4)
    y[2] = CLASSES
    assert make_training(model, parts(model, 1.0, 0), x, y, Sgd(0.1), False) is None


# In a user's own loop -----------------------------------------------------------------


def grads(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The gradient of each; all must have one."""
    found = []
    for tensor in tensors:
        assert tensor.grad is not None
        found.append(tensor.grad)
    return found


def table(model: nn.Module, p: float) -> tuple[Any, Any]:
    neurons = fedspu.map_neurons(model, torch.zeros(2, *SHAPE))
    return neurons, fedspu.choose_ordered(neurons, p)


@pytest.mark.parametrize("mode", ["exact", "truncated"])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_any_loss_and_optimizer(mode: Any, p: float) -> None:
    """Beside our own PyTorch path in float64, which other tests compare with masks."""
    fast, slow = small_net(), small_net().double()
    neurons, active = table(fast, p)
    x, y = examples(SHAPE, 21)
    losses: dict[str, list[float]] = {}
    ways: Any = ((fast, x, "native"), (slow, x.double(), "torch"))
    for model, z, kernels in ways:
        with partial_training(
            model, neurons, active, mode, kernels=kernels
        ) as trainable:
            optimizer = torch.optim.AdamW(trainable, lr=0.01)
            for _ in range(10):
                optimizer.zero_grad()
                loss = F.multi_margin_loss(model(z), y) + model(z[:9]).square().mean()
                loss.backward()
                optimizer.step()
                losses.setdefault(kernels, []).append(float(loss.detach()))
            taken = set(paths(model).values())
            assert ("native" in taken) == (kernels == "native" and p < 1)
    assert losses["native"] == pytest.approx(losses["torch"], rel=1e-3)


def test_two_passes_before_and_after_a_backward_pass() -> None:
    fast, slow = small_net(), small_net().double()
    x, y = examples(SHAPE, 12)
    neurons, active = table(fast, 0.5)
    found = []
    for model, z in ((fast, x), (slow, x.double())):
        with partial_training(model, neurons, active) as trainable:
            first, second = model(z), model(z.flip(0))
            loss = F.cross_entropy(first, y) - F.cross_entropy(second, y.flip(0)) / 2
            loss.backward(retain_graph=True)
            loss.backward()  # adds the same again
            found.append(grads(trainable))
    for mine, theirs in zip(*found, strict=True):
        assert distance(mine, theirs, 0.01) < 1e-4


def test_a_weight_that_changes_before_the_backward_pass_is_noticed() -> None:
    model = small_net()
    neurons, active = table(model, 1.0)
    x, y = examples(SHAPE, 4)
    with partial_training(model, neurons, active) as trainable:
        loss = F.cross_entropy(model(x), y)
        with torch.no_grad():
            trainable[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_layers_that_do_not_train() -> None:
    model, slow = small_net(), small_net()
    for net in (model, slow):
        for parameter in net[:8].parameters():
            parameter.requires_grad_(False)
        net[9].requires_grad_(False)
    neurons, active = table(model, 1.0)
    x, y = examples(SHAPE, 10)
    with partial_training(model, neurons, active) as trainable:
        F.cross_entropy(model(x), y).backward()
        found = grads(trainable)
    F.cross_entropy(slow(x), y).backward()
    wanted = grads(p for p in slow.parameters() if p.requires_grad)
    assert len(found) == len(wanted) == 4
    for mine, theirs in zip(found, wanted, strict=True):
        assert distance(mine, theirs.double()) < 1e-5


def test_a_norm_in_eval_mode_keeps_its_statistics() -> None:
    model = small_net()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    slow = copy.deepcopy(model).double()
    neurons, active = table(model, 1.0)
    x, y = examples(SHAPE, 10)
    with partial_training(model, neurons, active, kernels="native") as trainable:
        F.cross_entropy(model(x), y).backward()
        found = grads(trainable)
    F.cross_entropy(slow(x.double()), y).backward()
    for mine, theirs in zip(found, grads(slow.parameters()), strict=True):
        assert distance(mine, theirs) < 2e-5
    name = "1.running_mean"
    assert torch.equal(model.state_dict()[name], before[name])


def test_kernels_that_do_not_exist_are_refused() -> None:
    model = small_net()
    neurons, active = table(model, 1.0)
    with (
        pytest.raises(fedspu.FedSPUError, match="kernels = 'fast': expected auto"),
        partial_training(model, neurons, active, kernels="fast"),  # type: ignore[arg-type]
    ):
        pass


# Dropout ------------------------------------------------------------------------------


def test_dropout_drops_scales_and_goes_back_alike() -> None:
    layer = nn.Linear(50, 50)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    model = nn.Sequential(layer, nn.Dropout(0.3), nn.Identity())
    neurons = fedspu.map_neurons(model, torch.zeros(2, 50))
    x = torch.rand(200, 50) + 0.5
    grad = torch.randn(200, 50)
    outs = []
    with partial_training(model, neurons, neurons.everything()) as trainable:
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            out = model(x)
            for tensor in trainable:
                tensor.grad = None
            out.backward(grad)
            mask = out.detach() / x  # 0, or 1 / (1 - p)
            assert torch.allclose(mask[mask > 0], torch.tensor(1 / 0.7))
            assert 0.27 < float((mask == 0).float().mean()) < 0.33
            (of_bias,) = grads([layer.bias])
            assert torch.allclose(of_bias, (grad * mask).sum(0), atol=1e-4)
            outs.append(out.detach())
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    dropped = (outs[0] == 0).float()
    assert float(dropped.mean(0).std()) < 0.06  # no column, no row is special
    assert float(dropped.mean(1).std()) < 0.1


# Judging ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 16, 33])
def test_judging_uses_running_statistics(number: int) -> None:
    model = small_net()
    model(torch.randn(50, *SHAPE) * 3 + 1)
    model.append(nn.Dropout(0.5)).eval()
    before = copy.deepcopy(model.state_dict())
    x, _ = examples(SHAPE, number)
    run = make_judge(model, SHAPE)
    assert run is not None
    with torch.no_grad():
        assert distance(run(x), model(x).double()) < 1e-5
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_maps_as_output() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 1))
    x, _ = examples(SHAPE, 18)
    run = make_judge(model.eval(), SHAPE)
    assert run is not None
    with torch.no_grad():
        assert run(x).shape == model(x).shape == (18, 4, 8, 8)
        assert distance(run(x), model(x).double()) < 1e-5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_large_weights_take_the_same_step_at_once(p: float, momentum: float) -> None:
    """With a limit that is never reached, all weights take their step in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(520, 513),
        nn.ReLU(),
        nn.Linear(513, 530),
        nn.Tanh(),
        nn.Linear(530, 5),
    )
    x, y = torch.randn(40, 520), torch.randint(5, (40,))
    spans, found = parts(model, p, 0), []
    for clip in (0.0, 1e9):
        own = copy.deepcopy(model)
        sgd = Sgd(0.1, momentum=momentum, decay=0.01, clip=clip)
        training = make_training(own, spans, x, y, sgd, is_truncated=False)
        assert training is not None
        for epoch in range(2):
            training.epoch(iter(torch.arange(40).split(19)[:2]), epoch)
        found.append(own.state_dict())
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name
        assert not torch.equal(tensor, model.state_dict()[name]), name
