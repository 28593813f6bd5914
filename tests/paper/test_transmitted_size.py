"""Table 3: what FedSPU transmits, from the sizes of the paper's three networks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import floor

import numpy as np
import pytest
import torch

import fedspu
from fedspu import map_neurons
from fedspu.models import find
from fedspu.neurons.choose import choose_random
from fedspu.units import paper_gb

CAPACITIES = (0.2, 0.4, 0.6, 0.8, 1.0)


def emnist(p: float) -> int:
    a, b = active(p, 20), active(p, 20)
    return 9 * a + 5 * a + 9 * a * b + 5 * b + 62 * (49 * b + 1)


def cifar10(p: float) -> int:
    a, b, c, d = (active(p, n) for n in (6, 16, 120, 84))
    convolutions = 27 * a + 5 * a + 9 * a * b + 5 * b
    return convolutions + 64 * b * c + c * d + 10 * (d + 1)


def speech(p: float) -> int:
    a, b = active(p, 50), active(p, 50)
    return 4 * a + 5 * a + 4 * a * b + 5 * b + 35 * (9 * b + 1)


def active(p: float, size: int) -> int:
    return max(1, floor(round(p * size, 9)))


@dataclass(frozen=True)
class Claim:
    """One column of Table 3: entries at each p, bytes in all, and as printed."""

    entries: Callable[[float], int]
    at_each_p: tuple[int, ...]
    transmitted: float  # both directions, 1,000 client-rounds in each cluster
    in_paper_gb: str


CLAIMS = {
    "emnist": Claim(emnist, (12434, 25094, 38042, 51278, 64802), 1.533e9, "11.70"),
    "speech": Claim(speech, (3725, 8215, 13505, 19595, 26485), 0.5722e9, "4.366"),
    "cifar10": Claim(cifar10, (5236, 20558, 45966, 81460, 134946), 2.305e9, "17.59"),
}


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("index", range(5))
def test_the_entries_that_travel_at_each_p(name: str, index: int) -> None:
    claim, p = CLAIMS[name], CAPACITIES[index]
    model = find(name)()
    neurons = map_neurons(model, torch.zeros(2, *model.input_shape))
    chosen = choose_random(neurons, p, np.random.default_rng(index))
    assert neurons.num_entries(chosen) == claim.entries(p) == claim.at_each_p[index]


@cache
def one_round(name: str) -> fedspu.Run:
    """One round of the paper's network with all of its clients, two in a cluster."""
    model = find(name)()
    classes = claim_classes(name)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, *model.input_shape)).astype(np.float32)
    y = np.arange(200) % classes
    settings = {
        "model": name,
        "clients.number": 10,
        "clients.per_round": 10,
        "clients.capacities": CAPACITIES,
        "data.partition": "iid",
        "rounds": 1,
        "train.epochs": 1,
        "judge.clients": 1,
    }
    return fedspu.simulate(settings, data=(x, y))


def claim_classes(name: str) -> int:
    return {"emnist": 62, "speech": 35, "cifar10": 10}[name]


@pytest.mark.parametrize("name", CLAIMS)
def test_a_round_s_bytes_are_the_entries_of_its_clients_and_no_more(name: str) -> None:
    claim, run = CLAIMS[name], one_round(name)
    expected = 2 * sum(4 * claim.entries(p) for p in CAPACITIES)
    assert run.summary["bytes_down"] == expected
    assert run.summary["bytes_up"] == expected
    assert run.summary["bytes_initial"] == 10 * 4 * claim.entries(1.0)


@pytest.mark.parametrize("name", CLAIMS)
def test_the_paper_s_transmitted_size_is_met_and_prints_as_there(name: str) -> None:
    claim, summary = CLAIMS[name], one_round(name).summary
    # This round had two client-rounds in each cluster; the paper has a thousand.
    transmitted = 500 * (summary["bytes_down"] + summary["bytes_up"])
    assert transmitted == pytest.approx(claim.transmitted, rel=5e-4)
    assert 8 * transmitted / (1000 * 2**20) == pytest.approx(
        float(claim.in_paper_gb), rel=5e-4
    )
    assert paper_gb(transmitted) == claim.in_paper_gb


@pytest.mark.parametrize("name", CLAIMS)
def test_positions_cost_less_than_a_hundredth_of_the_values(name: str) -> None:
    summary = one_round(name).summary
    assert 0 < summary["index_bytes"] < summary["bytes_down"] / 100
