import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import Axis, NeuronGroup
from fedspu.neurons.calls import undisturbed
from fedspu.neurons.pairs import read_elsewhere
from fedspu.neurons.probe import Probe
from fedspu.neurons.proof import prove
from tests.oracles.zoo import noise


def pair(number: int) -> NeuronGroup:
    """The group of two neurons of one layer, as if nothing were flipped."""
    into, out = f"into.{number}", f"out.{number}.weight"
    axes = (Axis(f"{into}.weight", 0), Axis(f"{into}.bias", 0), Axis(out, 1))
    return NeuronGroup(str(number), 2, axes, permutable=True)


def readers(number: int) -> set[tuple[str, int]]:
    return {(f"out.{k}.weight", 1) for k in range(number)}


class Pairs(nn.Module):
    """Pairs of neurons side by side, or each fed by the one before."""

    def __init__(self, number: int, flipped: set[int], is_chain: bool) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(6, 2) for _ in range(number))
        self.out = nn.ModuleList(nn.Linear(2, 6) for _ in range(number))
        self.flipped, self.is_chain = flipped, is_chain

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for number, (into, out) in enumerate(zip(self.into, self.out, strict=True)):
            hidden = torch.tanh(into(x))
            said = out(hidden.flip(1) if number in self.flipped else hidden)
            total = total + said
            x = said if self.is_chain else x
        return total


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("flipped", [set(), {0}, {3}, {1, 4}, set(range(5))])
def test_pairs_that_are_read_the_other_way_round_are_refused_among_others(
    flipped: set[int], is_chain: bool
) -> None:
    with undisturbed():
        probe = Probe(Pairs(5, flipped, is_chain), noise(3, 6))
        right, wrong = prove(probe, [pair(k) for k in range(5)], readers(5))
    assert {group.name for group in wrong} == {str(number) for number in flipped}
    assert len(right) == 5 - len(flipped)


class Crossed(nn.Module):
    """The first neuron of each pair matters only with the second of the other."""

    def __init__(self, is_flipped: bool) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(6, 2) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(2))
        self.is_flipped = is_flipped

    def forward(self, x: Tensor) -> Tensor:
        a, b = (F.gelu(into(x)) for into in self.into)
        b = b.flip(1) if self.is_flipped else b
        first, second = (out.get_parameter("weight") for out in self.out)
        return ((a * first) * (b * second).flip(1)).sum(1)


@pytest.mark.parametrize("is_flipped", [False, True])
def test_a_wrong_pair_is_not_hidden_by_what_is_cut_off_beside_it(
    is_flipped: bool,
) -> None:
    # With the first readers of both pairs cut off, the output is zero whatever the
    # neurons are: both at once prove nothing.
    with undisturbed():
        probe = Probe(Crossed(is_flipped), noise(4, 6))
        assert probe.shake(0)
        wrong = read_elsewhere(probe, [pair(0), pair(1)], readers(2))
    assert [group.name for group in wrong] == (["1"] if is_flipped else [])
