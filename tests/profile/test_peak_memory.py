import copy
import gc
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import choose_random, map_neurons, partial_training, stream
from fedspu.models.paper import EMNISTNet
from fedspu.partial.weight import Mode, Saves
from fedspu.profile.peak_memory import step_bytes


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


X, Y = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])


def test_a_dense_step_holds_what_a_hand_counts() -> None:
    model = two_layers()
    held = step_bytes(model, model.parameters(), X, Y)
    assert held.weights == held.gradients == 4 * (12 + 3 + 6 + 2)
    assert (held.buffers, held.copies) == (0, 0)
    # The ReLU's output, of which the next layer's input is the same tensor; the log of
    # the softmax; the sum of the weights of the examples. Not the batch.
    assert held.saved == 4 * (5 * 3 + 5 * 2 + 1)
    assert held.total == 2 * 92 + 104


def test_gradients_count_also_where_saved_tensors_have_been() -> None:
    # Weights and activations of one size: memory that is freed is soon taken again.
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in "abcdef")
    )
    held = step_bytes(model, model.parameters(), torch.randn(64, 64), torch.arange(64))
    assert held.gradients == held.weights


def test_buffers_are_counted_and_a_frozen_weight_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    held = step_bytes(model, [p for p in model.parameters() if p.requires_grad], X, Y)
    assert held.buffers == 2 * 4 * 3 + 8  # mean, variance, a count of batches
    assert held.weights - held.gradients == 4 * 12


def test_a_step_leaves_no_gradient_and_no_weight_changed() -> None:
    model = two_layers()
    before = copy.deepcopy(model.state_dict())
    step_bytes(model, model.parameters(), X, Y)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[key], v) for key, v in model.state_dict().items())


@dataclass
class Note:
    values: list[Tensor]


class Squared(torch.autograd.Function):
    """Keeps its input where no hook looks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.note = Note([x.clone()])
        return x**2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        kept: Tensor = ctx.note.values[0]
        return 2 * grad * kept


class Special(nn.Module):
    """A layer, and then something of our own."""

    def __init__(self, rest: Any) -> None:
        super().__init__()
        self.layer, self.rest = nn.Linear(4, 2), rest

    def forward(self, x: Tensor) -> Any:
        return self.rest(self.layer(x))


def saved_by(rest: Any) -> int:
    model = Special(rest)
    return step_bytes(model, model.parameters(), X, Y).saved


AT_LEAST = 4 * (5 * 2 + 1)
"""What the loss saves."""


def test_a_tensor_kept_on_the_context_of_a_function_is_counted() -> None:
    assert saved_by(Squared.apply) == AT_LEAST + 4 * 5 * 2


def test_a_view_counts_with_all_the_memory_that_it_keeps_alive() -> None:
    def part(scores: Tensor) -> Tensor:
        wide = scores.repeat(1, 50).exp()  # keeps its result
        return scores + torch.sin(wide[:, :2])  # keeps a view of the same

    assert saved_by(part) == AT_LEAST + 4 * 5 * 100


def test_what_a_dropped_branch_has_saved_is_not_counted() -> None:
    def branch(scores: Tensor) -> Tensor:
        scores.exp().exp()
        return scores

    assert saved_by(branch) == AT_LEAST


def test_temporary_tensors_are_in_the_peak_alone() -> None:
    def wasteful(scores: Tensor) -> Tensor:
        with torch.no_grad():
            torch.ones(250_000).sum()
        return scores

    model = Special(wasteful)
    held = step_bytes(model, model.parameters(), X, Y)
    assert held.total < 1_000
    assert 1_000_000 <= held.peak < 1_001_000


def test_what_an_earlier_step_has_left_makes_no_difference() -> None:
    def wasteful(scores: Tensor) -> Tensor:
        cycle: list[Any] = [torch.zeros(10_000)]  # only the collector frees it
        cycle.append(cycle)
        return scores

    calls = []

    def loss(scores: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:  # the step that is watched
            gc.collect()
        return F.cross_entropy(scores, y)

    model = nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Linear(3000, 2))
    expected = step_bytes(model, model.parameters(), X, Y).peak
    gc.disable()
    try:
        saved_by(wasteful)
        assert step_bytes(model, model.parameters(), X, Y, loss).peak == expected
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_measuring_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    model = two_layers()
    step_bytes(model, model.parameters(), X, Y)
    assert capfd.readouterr() == ("", "")


# Partial training ---------------------------------------------------------------------


WAYS = list(product(get_args(Mode), get_args(Saves), ("auto", "index")))


def allocated(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Bytes that a forward pass has taken and not given back, by the allocator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as watch:
        loss = F.cross_entropy(model(x), y)
    assert watch.profiler is not None
    events = watch.profiler.kineto_results.events()
    total = sum(event.nbytes() for event in events if event.name() == "[memory]")
    return int(total) - loss.nbytes


@pytest.mark.parametrize(("mode", "saves", "layout"), WAYS)
def test_what_is_saved_is_what_the_allocator_says(
    mode: Any, saves: Any, layout: Any
) -> None:
    model = EMNISTNet().train()
    x, y = torch.randn(16, 1, 28, 28), torch.randint(62, (16,))
    neurons = map_neurons(model, x[:2])
    active = choose_random(neurons, 0.4, stream(0, "neurons"))
    given = {"mode": mode, "saves": saves, "layout": layout, "kernels": "torch"}
    with partial_training(model, neurons, active, **given) as trainable:
        held = step_bytes(model, trainable, x, y)
        seen = allocated(model, x, y)
    # Positions are held from the beginning; bits are packed outside of PyTorch.
    assert seen <= held.saved <= 1.04 * seen
    blocks = sum(leaf.nbytes for leaf in trainable)
    assert held.copies == pytest.approx(blocks if layout == "index" else 0, abs=300)
    assert held.gradients == pytest.approx(blocks, rel=0.01)


def test_the_memory_of_compiled_code_counts_too() -> None:
    model = EMNISTNet().train()
    x, y = torch.randn(16, 1, 28, 28), torch.randint(62, (16,))
    neurons = map_neurons(model, x[:2])
    dense = step_bytes(model, model.parameters(), x, y)
    found = {}
    for p in (0.2, 1.0):
        active = choose_random(neurons, p, stream(0, "neurons"))
        with partial_training(model, neurons, active, kernels="native") as trainable:
            found[p] = [step_bytes(model, trainable, x, y) for _ in range(2)]
            assert found[p][0] == found[p][1]
    for held, _ in found.values():
        assert held.saved > 16 * 20 * 28 * 28 * 4 * 0.2  # what the first layer makes
        assert held.peak >= held.saved + held.weights
    assert found[1.0][0].peak < dense.peak
    assert found[0.2][0].peak < dense.peak / 2
    assert held.peak > held.saved
