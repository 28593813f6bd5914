"""Slim copies that store fewer neurons than they run with."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedspu
from fedspu import Neurons, extract, map_neurons, slim_model, state_of
from fedspu.federation.workbench import Workbench
from fedspu.methods import Entry, all_methods
from fedspu.methods.method import ModelState
from fedspu.neurons.blocks import load_state
from fedspu.neurons.slim import slim_neurons, slim_state
from tests.neurons.test_slim import assert_same, zeroed
from tests.oracles.federation import CLASSES, prepared_for
from tests.oracles.models import seeded
from tests.oracles.zoo import noise


class Heads(nn.Module):
    """An attention of four heads, whose number stands in the code alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.qkv, self.out = nn.Linear(6, 96), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = (
            part.reshape(*x.shape[:2], 4, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = (3 * q @ k.transpose(-1, -2)).softmax(-1) @ v
        scores: Tensor = self.last(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return scores


class Halves(nn.Module):
    """Channels that a convolution makes, a norm of the batch, and a split by number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.each = nn.Conv2d(8, 8, 3, groups=8)
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.each(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        left, right = x.split([4, 4], 1)
        out: Tensor = self.left(left) + self.right(right)
        return out


def examples() -> dict[str, tuple[nn.Module, Tensor]]:
    with seeded(0):
        return {
            "heads": (Heads().double(), noise(2, 4, 5).double()),
            "halves": (Halves().double(), noise(4, 3, 8, 8).double()),
        }


def padded_part(neurons: Neurons) -> dict[str, Tensor]:
    """About half of all neurons, of padded groups and of others."""
    active = neurons.everything()
    for group in neurons.groups:
        active[group.name] = torch.arange(group.size)[::2][-max(1, group.size // 2) :]
    return active


@pytest.fixture(params=["heads", "halves"])
def case(request: pytest.FixtureRequest) -> tuple[Any, Neurons, Any, Tensor]:
    model, x = examples()[request.param]
    neurons = map_neurons(model, x)
    assert any(group.padded for group in neurons.groups)
    assert all(group.slim for group in neurons.groups)
    return model, neurons, padded_part(neurons), x


def test_a_padded_copy_is_the_full_model_with_zeros(case: Any) -> None:
    model, neurons, active, x = case
    slim, full = (
        slim_model(model, neurons, active),
        zeroed(model, neurons.blocks(active)),
    )
    assert_same(slim.eval()(x), full.eval()(x))


def test_it_stores_the_payload_alone(case: Any) -> None:
    model, neurons, active, _ = case
    payload = extract(state_of(model), neurons.blocks(active))
    stored = dict(slim_model(model, neurons, active).named_parameters())
    for name, tensor in stored.items():
        assert torch.equal(tensor, payload[name])


def test_it_has_the_gradient_of_the_full_model_with_zeros(case: Any) -> None:
    model, neurons, active, x = case
    slim, full = (
        slim_model(model, neurons, active),
        zeroed(model, neurons.blocks(active)),
    )
    for each in (slim, full):
        each.train()(x).pow(2).sum().backward()
    grads: Any = {name: p.grad for name, p in full.named_parameters()}
    wanted = extract(grads, {n: neurons.blocks(active)[n] for n in grads})
    found: Any = {name: p.grad for name, p in slim.named_parameters()}
    for name in found:
        assert_same(found[name], wanted[name])


def test_statistics_of_a_padded_norm_are_kept() -> None:
    model, x = examples()["halves"]
    neurons = map_neurons(model, x)
    active = padded_part(neurons)
    slim: Any = slim_model(model, neurons, active).train()
    full: Any = zeroed(model, neurons.blocks(active)).train()
    slim(x), full(x)
    blocks = {"norm.running_mean": neurons.blocks(active)["norm.running_mean"]}
    assert_same(
        slim.norm.running_mean,
        extract({"norm.running_mean": full.norm.running_mean}, blocks)[
            "norm.running_mean"
        ],
    )


def test_a_padded_copy_can_be_copied_saved_and_exported(case: Any) -> None:
    model, neurons, active, x = case
    slim = slim_model(model, neurons, active).eval()
    wanted = slim(x)
    assert torch.equal(copy.deepcopy(slim)(x), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(slim))(x), wanted)
    assert_same(torch.export.export(slim, (x,)).module()(x), wanted)
    doubled = {name: 2 * p for name, p in slim.named_parameters()}
    assert_same(
        torch.func.functional_call(slim, doubled, (x,)),
        torch.func.functional_call(copy.deepcopy(slim), doubled, (x,)),
    )


def test_slimming_a_padded_copy_again_is_slimming_once(case: Any) -> None:
    model, neurons, first, x = case
    last = {name: torch.tensor([len(kept) - 1]) for name, kept in first.items()}
    once = {name: kept[-1:] for name, kept in first.items()}
    slim = slim_model(model, neurons, first)
    again = slim_model(slim, slim_neurons(neurons, first), last).eval()
    wanted = slim_model(model, neurons, once).eval()
    assert {n: p.shape for n, p in again.named_parameters()} == {
        n: p.shape for n, p in wanted.named_parameters()
    }
    assert_same(again(x), wanted(x))


def test_a_padded_copy_that_fails_holds_what_it_stored(case: Any) -> None:
    model, neurons, active, x = case
    slim = slim_model(model, neurons, active)
    before = {name: id(p) for name, p in slim.named_parameters()}
    with pytest.raises(RuntimeError):
        slim(x[..., :2])
    assert {name: id(p) for name, p in slim.named_parameters()} == before
    assert slim(x).shape == model(x).shape


def test_neurons_under_a_softmax_are_padded() -> None:
    # Zeros count in a softmax, so they have to be there.
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 9), nn.Softmax(-1), nn.Linear(9, 3)).double()
    x = noise(2, 6).double()
    neurons = map_neurons(model, x)
    (group,) = neurons.groups
    assert (group.permutable, group.slim, group.padded) == (True, True, True)
    active = {group.name: torch.tensor([1, 4, 5])}
    slim: Any = slim_model(model, neurons, active)
    assert slim[0].weight.shape == (3, 6)
    assert_same(slim(x), zeroed(model, neurons.blocks(active))(x))


def test_the_table_says_what_is_padded() -> None:
    model, x = examples()["heads"]
    assert "padded" in str(map_neurons(model, x))


def mixture() -> nn.Module:
    """Neurons under a softmax, which are padded."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 6), nn.Softmax(-1), nn.Linear(6, CLASSES)
    )


def test_a_slim_model_is_not_used_again_for_other_padded_neurons() -> None:
    plan = prepared_for(mixture, method__name="feddrop").plan
    (group,) = plan.neurons.groups
    assert group.padded
    bench = Workbench(plan, torch.device("cpu"))
    x = noise(2, 1, 4, 4).to(next(iter(plan.initial.values())))
    for kept in ([0, 1, 2], [3, 4, 5]):
        active = {group.name: torch.tensor(kept)}
        state = slim_state(plan.initial, plan.neurons, active)
        found = bench.place(ModelState(state, active)).model.eval()(x)
        full = mixture().to(x)
        load_state(full, plan.initial)
        assert torch.equal(found, slim_model(full, plan.neurons, active).eval()(x))


def normed() -> nn.Module:
    """Neurons that are padded and must not count, in a group norm of two groups."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, CLASSES)
    )


@pytest.mark.parametrize("model", [mixture, normed])
@pytest.mark.parametrize("entry", all_methods(), ids=lambda e: f"{e.name}-{e.reading}")
def test_all_methods_run_with_padded_neurons(entry: Entry, model: Any) -> None:
    run = fedspu.simulate(
        {
            "method.name": entry.name,
            "method.reading": entry.reading,
            "rounds": 2,
            "clients.number": 6,
            "clients.per_round": 2,
        },
        model=model,
        data=(noise(120, 1, 4, 4), torch.arange(120) % CLASSES),
    )
    assert 0 <= run.summary["personal_accuracy"] <= 1
