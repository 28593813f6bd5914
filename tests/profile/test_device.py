"""The capacity that is proposed for a device is the largest that keeps its limits."""

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedspu.neurons.mapping import map_neurons
from fedspu.partial.context import partial_training
from fedspu.profile.device import Device, Limits, TurnCosts, propose
from fedspu.profile.peak_memory import step_bytes
from fedspu.reports.device import what_limits
from fedspu.settings import TrainSettings
from fedspu.tasks.classification import classification

X = torch.randn(100, 50, generator=torch.Generator().manual_seed(0))
Y = torch.arange(100) % 4


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 4))


def given(**train: Any) -> tuple[Any, ...]:
    model = net()
    settings = TrainSettings(**{"epochs": 2, "batch_size": 16, **train})
    return model, map_neurons(model, X[:2]), X, Y, classification, settings


class Known:
    """Stands in for what is measured: memory and seconds are 100 p and 10 p."""

    num_steps = 14

    def __init__(self, *args: object) -> None: ...

    def costs(self, listed: list[float]) -> list[TurnCosts]:
        return [TurnCosts(p, round(100 * p), 10 * p) for p in listed]


@pytest.mark.parametrize(
    ("limits", "shares", "expected", "says"),
    [
        (Limits(), None, 1.0, "p = 1 fits: this device can train the whole model."),
        (Limits(100, 10), None, 1.0, "p = 1 fits"),
        (Limits(57), None, 0.55, "p = 0.6 is too much: a step needs 60 B of memory, "),
        (Limits(None, 3.1), None, 0.3, "a turn takes 3.50 s, and may take 3.1 s."),
        (Limits(57, 3.1), None, 0.3, "p = 0.35 is too much: a turn takes"),
        (Limits(57, 5.5), None, 0.55, "of memory, and may use 57 B; a turn takes 6.00"),
        (Limits(5), None, 0.05, "p = 0.05 is the largest that fits; p = 0.1 is too"),
        (Limits(4), None, None, "No p fits, not even 0.05: a step needs 5 B"),
        (Limits(57), [0.3, 0.5, 0.9], 0.5, "p = 0.9 is too much"),
        (Limits(99), [0.3, 0.5], 0.5, "p = 0.5 fits, the largest of --p."),
        (Limits(20), [0.3, 0.5], None, "No p fits, not even 0.3"),
    ],
)
def test_the_largest_share_that_keeps_all_limits_is_proposed(
    limits: Limits,
    shares: list[float] | None,
    expected: float | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedspu.profile.device.Device", Known)
    found = propose(*given(), limits=limits, shares=shares)
    assert found.capacity == expected
    assert says in what_limits(found, limits)
    measured = [row.p for row in found.rows]
    assert measured == sorted(measured)
    assert set(shares or (0.2, 0.4, 0.6, 0.8, 1)) <= set(measured)
    for row in found.rows:
        if expected is not None and row.p > expected:
            assert row.limited_by(limits)


def test_a_turn_is_all_steps_of_all_epochs() -> None:
    # 100 examples in batches of 16: seven, the last of 4; and two epochs.
    assert Device(*given()).num_steps == 14
    assert Device(*given(batch_size=33)).num_steps == 6  # a last one joins the others
    assert Device(*given(batch_size=33)).largest == 34


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_memory_is_the_peak_of_a_step_with_the_largest_batch(kernels: str) -> None:
    model, neurons, x, y, task, settings = given(kernels=kernels)
    device = Device(model, neurons, x, y, task, settings)
    (row,) = device.costs([0.5])
    active = device._active(0.5)
    model.train()
    with partial_training(model, neurons, active, kernels=settings.kernels) as leaves:
        expected = step_bytes(model, leaves, x[:16], y[:16]).peak
    assert row.num_bytes == expected


def test_optimizers_that_remember_need_more_memory() -> None:
    plain, momentum, adam = (
        Device(*given(kernels="torch", **more)).costs([1.0])[0].num_bytes
        for more in ({}, {"momentum": 0.9}, {"optimizer": "adam"})
    )
    num_bytes = 4 * sum(p.numel() for p in net().parameters())
    assert momentum - plain == num_bytes
    assert adam - plain == 2 * num_bytes


def test_seconds_are_near_those_of_a_whole_turn() -> None:
    model, neurons, x, y, task, settings = given(kernels="torch", epochs=20)
    (row,) = Device(model, neurons, x, y, task, settings).costs([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    start = time.process_time()
    for _ in range(20):
        for x_batch, y_batch in zip(x.split(16), y.split(16), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x_batch), y_batch).backward()
            optimizer.step()
    whole = time.process_time() - start
    assert whole / 4 < row.seconds < 4 * whole


def test_what_a_turn_does_once_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three seconds at the start of a turn, and half a second for each step.
    monkeypatch.setattr(Device, "_enough", lambda self, p: 5)
    monkeypatch.setattr(Device, "_train", lambda self, p, count: 3 + count / 2)
    (row,) = Device(*given()).costs([0.5])
    assert row.seconds == 3 + 14 / 2
    monkeypatch.setattr(Device, "_enough", lambda self, p: 1)
    (row,) = Device(*given()).costs([0.5])
    assert row.seconds == 14 * 3.5  # not known of a single batch


def test_training_is_augmented_as_the_settings_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.Tensor] = []

    def augmented(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    monkeypatch.setattr(
        "fedspu.profile.device.make_augmentation", lambda settings, rng: augmented
    )
    Device(*given(kernels="torch")).costs([1.0])
    assert len(seen) > 0


def test_measuring_changes_neither_the_model_nor_random_numbers() -> None:
    everything = given()
    before = {n: t.clone() for n, t in everything[0].state_dict().items()}
    state = torch.get_rng_state()
    propose(*everything, limits=Limits(), shares=[0.5])
    assert torch.equal(torch.get_rng_state(), state)
    after = everything[0].state_dict()
    assert all(torch.equal(after[n], t) for n, t in before.items())
