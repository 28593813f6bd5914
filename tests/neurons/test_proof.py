from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import Axis, NeuronGroup
from fedspu.neurons.calls import restored, undisturbed
from fedspu.neurons.probe import Probe
from fedspu.neurons.proof import prove
from fedspu.neurons.search import failing, failing_alike
from tests.oracles.models import Fn
from tests.oracles.zoo import noise

# Groups that fail are found by halves -------------------------------------------------


@pytest.mark.parametrize("bad", [set(), {0}, {31}, {7, 8}, {3, 20, 31}, set(range(32))])
def test_the_items_that_fail_are_found_among_all_others(bad: set[int]) -> None:
    found = failing(list(range(32)), lambda items: not bad & set(items))
    assert set(found) == bad


def test_one_item_that_fails_is_found_in_few_trials() -> None:
    trials: list[list[int]] = []

    def work(items: list[int]) -> bool:
        trials.append(items)
        return 77 not in items

    assert failing(list(range(128)), work) == [77]
    assert len(trials) <= 15


class Layers(nn.Module):
    """Hidden layers side by side; those in ``flipped`` are read the other way round."""

    def __init__(self, number: int, flipped: set[int]) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(6, 8) for _ in range(number))
        self.out = nn.ModuleList(nn.Linear(8, 3) for _ in range(number))
        self.flipped = flipped

    def forward(self, x: Tensor) -> Tensor:
        """The sum of what all layers say."""
        total = x.new_zeros(len(x), 3)
        for number, (into, out) in enumerate(zip(self.into, self.out, strict=True)):
            hidden = F.gelu(into(x))
            total = total + out(hidden.flip(1) if number in self.flipped else hidden)
        return total


@pytest.mark.parametrize("flipped", [set(), {4}, {0, 5, 6}, set(range(9))])
def test_wrong_groups_are_refused_and_the_right_ones_beside_them_are_not(
    flipped: set[int],
) -> None:
    with undisturbed():
        probe = Probe(Layers(9, flipped), noise(2, 6))
        groups = [group_of(number) for number in range(9)]
        readers = {(f"out.{number}.weight", 1) for number in range(9)}
        right, wrong = prove(probe, groups, readers)
    assert {group.name for group in wrong} == {str(number) for number in flipped}
    assert all(group.permutable for group in right)
    assert len(right) == 9 - len(flipped)


def group_of(number: int) -> NeuronGroup:
    """The group of one layer, as if nothing were flipped."""
    into, out = f"into.{number}", f"out.{number}.weight"
    axes = (Axis(f"{into}.weight", 0), Axis(f"{into}.bias", 0), Axis(out, 1))
    return NeuronGroup(str(number), 8, axes, permutable=True)


# What is tried leaves no trace --------------------------------------------------------


@pytest.mark.parametrize("places", [[1, 0], list(range(31, -1, -1))])
def test_reordered_tensors_get_their_own_values_back(places: list[int]) -> None:
    probe = Probe(nn.Linear(32, 32), noise(2, 32))
    source = np.arange(32)
    source[: len(places)] = places
    before = probe.tensors["weight"].detach().clone()
    for _ in range(2):  # the second time in memory of the first
        with probe.trying(["weight"]):
            probe.reorder("weight", {0: source, 1: source})
            wanted = before[source][:, source]
            assert torch.equal(probe.tensors["weight"].detach(), wanted)
        assert torch.equal(probe.tensors["weight"].detach(), before)


def test_a_model_is_restored_with_its_class_attributes_and_hooks() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
    weight, before = model[0].weight, [dict(vars(layer)) for layer in model.modules()]
    with restored(model):
        model[0]._parameters["weight"] = None
        vars(model[0]).update(out_features=4, note="another")
        model[1].__class__ = nn.Identity
        model[1].register_forward_pre_hook(lambda layer, args: None)
    assert [dict(vars(layer)) for layer in model.modules()] == before
    assert model[0].weight is weight
    assert type(model[1]) is nn.LayerNorm
    assert not model[1]._forward_pre_hooks


# How many examples are needed ---------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "few"),
    [
        (lambda self, x: self.fc(x), 1),
        (lambda self, x: self.fc(x)[:, :1], 2),  # one number has no spread
        (lambda self, x: self.fc(x) + self.late(x - x.mean(0)), 5),
        (lambda self, x: self.fc(x) + self.late(x.cumsum(0)), 5),  # steps in time
        (lambda self, x: self.fc(x).sum(), 5),  # a loss
        (lambda self, x: self.fc(x).view(5, 3), 5),  # it takes no other number
    ],
)
def test_as_few_examples_are_used_as_prove_as_much(
    forward: Callable[[nn.Module, Tensor], Tensor], few: int
) -> None:
    late = nn.Linear(3, 3)
    nn.init.zeros_(late.weight)  # with its own weights, it would not be noticed
    model = Fn(forward, fc=nn.Linear(3, 3), late=late)
    with undisturbed():
        probe = Probe(model, noise(5, 3))
        used = []
        for trial in (0, 1, 2, 3):
            assert probe.shake(trial)
            used.append(len(probe.example))
    assert used == [5, few, few, 5]


# Groups that are alike are searched together ------------------------------------------


@pytest.mark.parametrize("bad", [set(), {0}, {5}, {0, 19}, {3, 4}])
def test_a_few_that_fail_among_many_alike_are_found(bad: set[int]) -> None:
    groups = [group_of(number) for number in range(20)]
    names = {str(number) for number in bad}
    found = failing_alike(groups, lambda some: not names & {g.name for g in some})
    assert {group.name for group in found} == names


def test_many_that_fail_alike_are_found_in_few_trials() -> None:
    trials = 0

    def work(some: list[NeuronGroup]) -> bool:
        nonlocal trials
        trials += 1
        return not some

    groups = [group_of(number) for number in range(200)]
    assert len(failing_alike(groups, work)) == 200
    assert trials <= 5


def test_no_group_that_fails_is_left_out_whatever_its_kind() -> None:
    other = [
        NeuronGroup(f"other {number}", 8, (Axis(f"other.{number}.weight", 0),))
        for number in range(10)
    ]
    groups = [*(group_of(number) for number in range(10)), *other]
    bad = {"0", "4", "5", "9", "other 7"}
    found = {g.name for g in failing_alike(groups, lambda some: not bad & names(some))}
    assert bad <= found
    assert found - bad <= {str(number) for number in range(10)}


def names(groups: list[NeuronGroup]) -> set[str]:
    return {group.name for group in groups}


# A model whose output depends on hardly any neuron ------------------------------------


def test_a_model_that_hears_one_neuron_of_many_is_given_up_soon() -> None:
    class Deaf(Layers):
        def forward(self, x: Tensor) -> Tensor:
            total = x.new_zeros(len(x), 3)
            for into, out in zip(self.into, self.out, strict=True):
                hidden = F.gelu(into(x))
                total = total + out(F.pad(hidden[:, :1], (0, 7)))
            return total

    with undisturbed():
        probe = Probe(Deaf(9, set()), noise(2, 6))
        groups = [group_of(number) for number in range(9)]
        right, wrong = prove(probe, groups, set())
    assert right == []
    assert wrong == groups
    assert probe.is_deaf
