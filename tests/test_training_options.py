"""What can be set for local training besides the optimizer: off unless asked for."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import State, state_of
from fedspu.errors import FedSPUError, SettingsError
from fedspu.federation.server import Federation
from fedspu.prepare import prepare
from fedspu.settings import TrainSettings
from fedspu.tasks.segmentation import segmentation
from fedspu.training.augmentation import CROP, make_augmentation
from fedspu.training.epochs import batches, train
from tests.oracles.federation import (
    SMALL,
    client_of,
    play_all,
    prepared_for,
    request_for,
    same_bits,
)
from tests.oracles.federation import (
    mlp as net_of_images,
)
from tests.oracles.training import data, local, mlp, rng
from tests.oracles.zoo import chain, noise

# Gradient clipping --------------------------------------------------------------------


def step_of(clip: float, active: Any = None, **given: Any) -> dict[str, Tensor]:
    """How far one step of one batch moves each tensor, at a learning rate of one."""
    torch.manual_seed(0)
    model, (x, y) = mlp(), data(8)
    before = state_of(model)
    train(local(model, x, y, active, epochs=1, lr=1.0, clip=clip, **given))
    return {name: v - before[name] for name, v in state_of(model).items()}


def length(step: State) -> float:
    return float(torch.cat([values.flatten() for values in step.values()]).norm())


@pytest.mark.parametrize("active", [None, {"fc1": torch.tensor([1, 4, 6])}])
def test_a_longer_step_is_cut_to_the_clip_and_keeps_its_direction(
    active: Any,
) -> None:
    free, cut = step_of(0, active), step_of(0.05, active)
    assert length(free) > 0.1
    assert length(cut) == pytest.approx(0.05, rel=1e-4)
    for name, values in free.items():
        wanted = values * (0.05 / length(free))
        assert torch.allclose(cut[name], wanted, rtol=1e-4, atol=1e-12)


def test_frozen_entries_do_not_count_in_the_norm() -> None:
    whole, part = step_of(0), step_of(0, {"fc1": torch.tensor([1])})
    between = (length(whole) + length(part)) / 2
    assert length(part) < between < length(whole)
    again = step_of(between, {"fc1": torch.tensor([1])})
    assert all(torch.equal(values, again[name]) for name, values in part.items())


@pytest.mark.parametrize("clip", [0.0, 1e6])
def test_no_clip_and_a_long_one_leave_a_step_as_it_is(clip: float) -> None:
    torch.manual_seed(0)
    plain, (x, y) = mlp(), data(8)
    order = next(iter(batches(8, 128, rng(3))))
    F.cross_entropy(plain(x[order]), y[order]).backward()
    step = step_of(clip)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(step[name], -parameter.grad, rtol=0, atol=1e-12)


def test_every_step_is_clipped() -> None:
    model, (x, y) = mlp(), data(8)
    before = state_of(model)
    train(local(model, x, y, epochs=3, batch_size=2, lr=1.0, clip=1e-3))
    moved = {name: v - before[name] for name, v in state_of(model).items()}
    assert 0 < length(moved) <= 12 * 1e-3 * (1 + 1e-6)  # twelve steps


def test_gradients_are_looked_at_before_they_are_cut() -> None:
    model, (x, y) = mlp(), data(8)
    seen: list[float] = []

    def look() -> None:
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        seen.append(length(grads))

    train(local(model, x, y, epochs=1, clip=1e-3), after_backward=look)
    assert seen[0] > 0.1


# Class weights ------------------------------------------------------------------------


def test_balanced_classes_weigh_as_they_are_rare_among_the_client_s_own() -> None:
    model, (x, _) = mlp(), data(8)
    y = torch.tensor([0, 0, 0, 0, 0, 2, 2, 0])  # one class is missing
    plain = copy.deepcopy(model)
    given: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.1}
    loss = train(local(model, x, y, class_weights="balanced", **given))

    weights = torch.tensor([8 / (2 * 6), 0.0, 8 / (2 * 2)]).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    order, losses = rng(3), []
    for _ in range(2):
        for batch in list(batches(8, 4, order)):
            optimizer.zero_grad()
            by_hand = F.cross_entropy(plain(x[batch]), y[batch], weights)
            by_hand.backward()
            optimizer.step()
            losses.append(by_hand.item())
    assert loss == pytest.approx(sum(losses) / 4, rel=1e-6)
    for name, values in state_of(plain).items():
        assert torch.allclose(state_of(model)[name], values, rtol=0, atol=1e-7)


def test_equally_frequent_classes_train_as_without_weights() -> None:
    found = []
    for weights in ("none", "balanced"):
        torch.manual_seed(0)
        model, (x, y) = mlp(), data(9)
        train(local(model, x, y, epochs=2, batch_size=3, class_weights=weights))
        found.append(state_of(model))
    for name, values in found[0].items():
        assert torch.allclose(values, found[1][name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("task", ["regression", "language-model"])
def test_class_weights_are_refused_where_there_are_no_classes(task: str) -> None:
    with pytest.raises(SettingsError, match=r"train.class_weights = 'balanced'.*task"):
        prepare({"task": task, "train.class_weights": "balanced"}, model=mlp)


# Augmentation -------------------------------------------------------------------------

IMAGES = noise(40, 3, 5, 6)


def augmented(*kinds: str, seed: int = 0, images: Tensor = IMAGES) -> Tensor:
    settings = TrainSettings.model_validate({"augment": kinds})
    augment = make_augmentation(settings, rng(seed))
    assert augment is not None
    return augment(images)


def moved(image: Tensor, down: int, right: int) -> Tensor:
    """An image seen through a window that is moved; its edge is repeated."""
    _, height, width = image.shape
    rows = [min(max(i + down, 0), height - 1) for i in range(height)]
    columns = [min(max(j + right, 0), width - 1) for j in range(width)]
    return torch.stack(
        [torch.stack([image[:, i, j] for j in columns], 1) for i in rows], 1
    )


def test_a_flip_gives_an_image_or_its_mirror_image() -> None:
    out = augmented("flip")
    mirrored = torch.stack([image[..., list(range(5, -1, -1))] for image in IMAGES])
    is_same = (out == IMAGES).flatten(1).all(1)
    is_flipped = (out == mirrored).flatten(1).all(1)
    assert bool((is_same ^ is_flipped).all())
    assert 10 < int(is_flipped.sum()) < 30  # of 40, each by a draw of its own


def test_a_crop_moves_an_image_by_up_to_four_pixels() -> None:
    shifts = range(-CROP, CROP + 1)
    seen = set()
    for image, out in zip(IMAGES, augmented("crop"), strict=True):
        found = {
            (down, right)
            for down in shifts
            for right in shifts
            if torch.equal(out, moved(image, down, right))
        }
        assert found
        seen |= found
    assert len(seen) > 20  # each by a draw of its own


def test_all_places_of_a_crop_are_as_likely() -> None:
    """Of a ramp, the first pixel says how far it was moved."""
    ramp = torch.arange(20.0).expand(1, 20, 20)
    image = torch.stack([ramp[0], ramp[0].T])[None]
    out = augmented("crop", images=image.expand(4000, 2, 20, 20))
    for channel in (0, 1):  # moved to the right, and down
        place = out[:, channel, 10, 10] - 10
        counts = torch.bincount((place + CROP).long(), minlength=2 * CROP + 1)
        assert len(counts) == 2 * CROP + 1
        assert bool(((counts - 4000 / 9).abs() < 100).all())


def test_augmentation_draws_from_the_generator_it_is_given_alone() -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # the generator that nobody may read
        before = global_generators()
        found.append(augmented("flip", "crop", seed=5))
        assert global_generators() == before
    assert torch.equal(*found)
    assert not torch.equal(augmented("flip", "crop", seed=6), found[0])


def global_generators() -> tuple[list[int], str]:
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    return torch.get_rng_state().tolist(), str(numpy)


def test_augmentation_leaves_the_images_themselves_as_they_are() -> None:
    images = IMAGES.clone()
    augmented("flip", "crop", images=images)
    assert torch.equal(images, IMAGES)


def test_without_augmentation_nothing_is_made_or_drawn() -> None:
    stream = rng()
    before = stream.bit_generator.state
    assert make_augmentation(TrainSettings(), stream) is None
    assert stream.bit_generator.state == before


def test_augmented_batches_have_the_targets_and_order_of_plain_ones() -> None:
    x, y = IMAGES, torch.arange(40)
    model = chain(flat=nn.Flatten(), fc=nn.Linear(90, 40))
    settings = TrainSettings.model_validate({"augment": ("flip",)})
    plain = local(model, x, y, batch_size=7)
    other = local(model, x, y, batch_size=7)
    other = replace(other, augmentation=make_augmentation(settings, rng(9)))
    pairs = list(zip(plain.batches(), other.batches(), strict=True))
    assert all(torch.equal(a[1], b[1]) for a, b in pairs)
    assert any(not torch.equal(a[0], b[0]) for a, b in pairs)
    for (before, _), (after, _) in pairs:
        assert torch.equal(before.sort(dim=3).values, after.sort(dim=3).values)


class Watching(nn.Module):
    """A net that notes the inputs it trains on, and those it is judged on."""

    seen: tuple[list[Tensor], list[Tensor]] = ([], [])

    def __init__(self) -> None:
        super().__init__()
        self.net = net_of_images()

    def forward(self, x: Tensor) -> Tensor:
        self.seen[int(self.training)].extend(x.detach())
        scores: Tensor = self.net(x)
        return scores


def test_examples_to_validate_and_to_test_are_never_augmented() -> None:
    augment, on = ["flip", "crop"], {"early_stopping__on": True}
    ready = prepared_for(Watching, train__augment=augment, rounds=1, **on)
    for seen in Watching.seen:
        seen.clear()
    play_all(ready)
    known = {tuple(image.flatten().tolist()) for image in ready.examples.data.x}
    judged, trained = (
        [tuple(image.flatten().tolist()) in known for image in seen]
        for seen in Watching.seen
    )
    assert judged
    assert all(judged)
    assert not all(trained)


def test_augmentation_that_is_off_is_the_same_bits_as_none_given() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"train__augment": []},
        {"train__augment": ["flip"]},
    ]
    found = [
        play_all(prepared_for(rounds=2, **given)).federation.global_state
        for given in settings
    ]
    assert same_bits(found[0], found[1])
    assert not same_bits(found[0], found[2])


def test_a_client_draws_other_changes_in_another_round() -> None:
    ready = prepared_for(Watching, train__augment=["crop"], train__epochs=1)
    trained = []
    for t in (1, 1, 2):
        request = request_for(ready.plan, Federation(0, ready.plan.initial), t, 2)
        Watching.seen[1].clear()
        client_of(ready).reply(request)
        trained.append(sorted(i.flatten().tolist() for i in Watching.seen[1]))
    assert trained[0] == trained[1] != trained[2]


def test_examples_that_are_no_images_cannot_be_augmented() -> None:
    flat = np.zeros((60, 6), dtype=np.float32), np.arange(60) % 3
    given = {**SMALL, "train.augment": ["flip"]}
    with pytest.raises(FedSPUError, match=r"train.augment = flip: .*expected images"):
        prepare(given, model=lambda: nn.Linear(6, 3), data=flat)


def test_maps_are_never_learned_from_images_that_were_moved_away_from_them() -> None:
    """Nobody moves the targets, so augmentation has to be refused."""
    x = noise(60, 1, 6, 6)
    given = {**SMALL, "train.augment": ["flip"]}
    with pytest.raises(FedSPUError, match=r"train\.augment = .*segmentation"):
        prepare(
            given,
            model=lambda: nn.Conv2d(1, 2, 1),
            data=(x, (x[:, 0] > 0).long()),
            task=segmentation,
        )
