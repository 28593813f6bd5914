"""Training of the last layer alone, against the same written out step by step."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu.neurons.blocks import state_of
from fedspu.settings import TrainSettings
from fedspu.tasks import find_task
from fedspu.training.augmentation import make_augmentation
from fedspu.training.epochs import LocalTraining, batches
from fedspu.training.last_layer import inputs_of_last_layer, train_last_layer


class Net(nn.Module):
    """A convolution with a norm and dropout, and a linear last layer.

    ``form``: the model returns just what the last layer returns (plain); or twice that;
    or the mean of two calls; or the last layer is given many vectors for each example.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.calls = form, 0
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4 if form == "vectors" else 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += len(x)
        h = self.drop(F.relu(self.norm(self.conv(x))))
        if self.form == "vectors":
            scores: Tensor = self.fc(h.flatten(2).transpose(1, 2)).mean(1)
            return scores
        scores = self.fc(h.flatten(1))
        if self.form == "twice":
            return 2 * scores
        return (
            (scores + self.fc(h.flatten(1).abs())) / 2 if self.form == "two" else scores
        )


FORMS = ("plain", "twice", "two", "vectors")


def training(form: str, **given: Any) -> LocalTraining:
    torch.manual_seed(0)
    model = Net(form)
    model(torch.randn(8, 1, 4, 4))  # statistics that are not those of a new norm
    x, y = torch.randn(23, 1, 4, 4), torch.randint(0, 3, (23,))
    settings = TrainSettings(batch_size=5, epochs=3, lr=0.1, **given)
    neurons = fedspu.map_neurons(model, x[:2])
    model.calls = 0
    return LocalTraining(
        model=model,
        neurons=neurons,
        active=neurons.everything(),
        x=x,
        y=y,
        task=find_task("classification"),
        settings=settings,
        rng=np.random.default_rng(1),
        augmentation=make_augmentation(settings, np.random.default_rng(2)),
    )


def slowly(local: LocalTraining) -> float:
    """All of the model in eval mode, for each batch; only the last layer moves."""
    model = local.model.eval()
    last = [p for n, p in model.named_parameters() if n.startswith("fc.")]
    mean = 0.0
    for _ in range(3):
        for where in batches(len(local.x), 5, local.rng):
            x = local.x[where]
            if local.augmentation is not None:
                x = local.augmentation(x)
            loss = F.cross_entropy(model(x), local.y[where])
            mean += float(loss.detach()) * len(where) / (3 * len(local.x))
            steps = torch.autograd.grad(loss, last)
            with torch.no_grad():
                for parameter, step in zip(last, steps, strict=True):
                    parameter.sub_(0.1 * step)
    return mean


@pytest.mark.parametrize("form", FORMS)
def test_only_the_last_layer_moves_and_as_it_should(form: str) -> None:
    fast, slow = training(form), training(form)
    before = state_of(fast.model)
    before = {name: values.clone() for name, values in before.items()}
    inputs = inputs_of_last_layer(fast)
    assert (inputs is None) == (form != "plain")
    assert train_last_layer(fast, inputs) == pytest.approx(slowly(slow), rel=1e-5)
    after, wanted = state_of(fast.model), state_of(slow.model)
    for name, values in after.items():
        if name.startswith("fc."):
            assert not torch.equal(values, before[name])
            torch.testing.assert_close(values, wanted[name], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(values, before[name])
    assert all(p.requires_grad for p in fast.model.parameters())


def test_what_lies_before_a_plain_last_layer_is_computed_once() -> None:
    local = training("plain")
    inputs = inputs_of_last_layer(local)
    assert isinstance(local.model, Net)
    assert local.model.calls == 23
    train_last_layer(local, inputs)
    assert local.model.calls == 23
    train_last_layer(local)
    assert local.model.calls == 23 + 3 * 23


def test_images_that_are_changed_at_random_are_changed_in_each_epoch() -> None:
    given = {"augment": "flip"}
    fast, slow = training("plain", **given), training("plain", **given)
    assert inputs_of_last_layer(fast) is None
    assert train_last_layer(fast) == pytest.approx(slowly(slow), rel=1e-5)
    assert state_of(fast.model)["fc.weight"].allclose(state_of(slow.model)["fc.weight"])
    assert isinstance(fast.model, Net)
    assert fast.model.calls == 3 * 23
