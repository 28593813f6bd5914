"""Logit adjustment (``train.adjust_logits``): in training, in models, in a run."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedspu
from fedspu import state_of
from fedspu.errors import SettingsError
from fedspu.federation.server import Federation, TrainRequests
from fedspu.methods.method import Memory, ModelState
from fedspu.resolve import resolve
from fedspu.settings import Settings
from fedspu.tasks.classification import classification, log_shares
from fedspu.tasks.regression import regression
from fedspu.training.epochs import train
from fedspu.training.logit_adjustment import with_offsets
from tests.oracles.federation import (
    ConvNet,
    client_of,
    examples,
    named,
    plan_for,
    prepared_for,
    request_for,
    run_for,
    same_bits,
)
from tests.oracles.federation import (
    mlp as net_of_images,
)
from tests.oracles.training import data, local, mlp

SKEWED = torch.tensor([0, 0, 0, 0, 0, 2, 2, 0])
"""One of the three classes is missing."""


# Shares -------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=40),
    st.integers(7, 12),
)
def test_shares_add_up_to_one_and_none_is_nothing(y: list[int], classes: int) -> None:
    shares = log_shares(torch.tensor(y), classes).exp()
    assert float(shares.sum()) == pytest.approx(1)
    for label, share in enumerate(shares.tolist()):
        assert share == pytest.approx((y.count(label) + 1) / (len(y) + classes))


# Training -----------------------------------------------------------------------------


@pytest.mark.parametrize("active", [None, {"fc1": torch.tensor([1, 4, 6])}])
def test_it_trains_as_a_model_with_the_shares_in_its_last_bias(active: Any) -> None:
    """The slow way: put them in, train as usual, take them out again."""
    model, (x, _) = mlp(), data(8)
    slow, added = copy.deepcopy(model), log_shares(SKEWED, 3)
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 3, "lr": 0.1}
    loss = train(local(model, x, SKEWED, active, adjust_logits=True, **settings))
    bias = slow.get_parameter("fc2.bias")
    with torch.no_grad():
        bias.add_(added)
    wanted = train(local(slow, x, SKEWED, active, **settings))
    with torch.no_grad():
        bias.sub_(added)
    assert loss == pytest.approx(wanted, rel=1e-12)
    for name, values in state_of(slow).items():
        torch.testing.assert_close(state_of(model)[name], values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_compiled_code_and_pytorch_train_alike(p: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(8, 6)
    active = {"0": torch.arange(int(8 * p))}
    states, losses = [], []
    for kernels in ("auto", "torch"):
        own = copy.deepcopy(model)
        chosen: dict[str, Any] = {"epochs": 3, "batch_size": 3, "kernels": kernels}
        adjusts = local(own, x, SKEWED, active, adjust_logits=True, **chosen)
        losses.append(train(adjusts))
        states.append(state_of(own))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, values in states[0].items():
        torch.testing.assert_close(values, states[1][name], rtol=1e-4, atol=1e-6)


def test_equally_frequent_classes_train_as_without_it() -> None:
    found = []
    for adjusts in (False, True):
        torch.manual_seed(0)
        model, (x, y) = mlp(), data(9)
        train(local(model, x, y, epochs=2, batch_size=3, adjust_logits=adjusts))
        found.append(state_of(model))
    for name, values in found[0].items():
        torch.testing.assert_close(values, found[1][name], rtol=0, atol=1e-12)


# Models with the shares in their last bias --------------------------------------------


class Odd(nn.Module):
    """Its output is made by a linear layer, but not by it alone."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.fc = form, nn.Linear(6, 3, bias=form != "without bias")

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(x)
        if self.form == "softmax":
            return scores.log_softmax(1)
        if self.form == "called twice":
            scores = self.fc(x * scores.sum())
        return scores


def offsets(number: int) -> Tensor:
    return torch.arange(float(number))


@pytest.mark.parametrize("build", [net_of_images, ConvNet])
def test_such_a_model_s_scores_are_higher_by_the_offsets(build: Any) -> None:
    model = build()
    x = prepared_for(build).examples.part(0, "train")[0]
    before = model.training, model.eval()(x)
    model.train(before[0])
    found = with_offsets(state_of(model), offsets, model, x[:2])
    assert model.training == before[0]
    model.load_state_dict(found)
    with torch.no_grad():
        scores = model.eval()(x)
    wanted = before[1] + offsets(scores.shape[1])
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["softmax", "called twice", "without bias"])
def test_without_a_bias_that_only_adds_to_the_scores_a_model_stays_the_same(
    form: str,
) -> None:
    model = Odd(form)
    state = state_of(model)
    assert with_offsets(state, offsets, model, torch.randn(2, 6)) is state
    assert with_offsets(state, None, mlp(), torch.randn(2, 6)) is state


# In a run -----------------------------------------------------------------------------

ON: dict[str, Any] = {"train__adjust_logits": True, "method__context": "global"}


@pytest.mark.parametrize("build", [net_of_images, ConvNet])
def test_a_client_keeps_its_shares_to_itself(build: Any) -> None:
    ready = prepared_for(build, **ON)
    plan = ready.plan
    request = request_for(plan, Federation(1, plan.initial), 2, 1)
    reply, kept = client_of(ready).take_turn(request, Memory())
    assert kept.own is not None
    assert reply.active is not None
    y = ready.examples.part(1, "train")[1]
    bias = next(n for n in reversed(list(kept.own.state)) if n.endswith("bias"))
    sent, own = reply.payload[bias], kept.own.state[bias]
    shares = log_shares(y, len(own))
    torch.testing.assert_close(own, sent + shares.float(), rtol=0, atol=1e-6)
    where = plan.travelling(reply.active)
    for name, values in fedspu.extract(kept.own.state, where).items():
        assert name == bias or torch.equal(values, reply.payload[name])


def test_last_models_begin_with_the_client_s_shares() -> None:
    """With a learning rate of nothing, that is what they all are."""
    given = {**ON, "train__lr": 0.0, "method__finish_last": 2, "seed": 3}
    ready = prepared_for(**given)
    plan = ready.plan
    request = TrainRequests(Federation(3, plan.initial), ready.plan, 4, True)[2]
    bad = {name: torch.zeros_like(values) for name, values in plan.initial.items()}
    _, kept = client_of(ready).take_turn(request, Memory(ModelState(bad)))
    y = ready.examples.part(2, "train")[1]
    assert kept.own is not None
    wanted = dict(plan.initial)
    wanted["fc.bias"] = (
        wanted["fc.bias"] + log_shares(y, len(wanted["fc.bias"])).float()
    )
    assert same_bits(kept.own.state, wanted)


def test_a_server_s_model_learns_something_else() -> None:
    plain, other = (
        run_for(method__context="global", train__adjust_logits=on)
        for on in (False, True)
    )
    ours, theirs = (
        run.last.federation.global_state["fc.bias"] for run in (plain, other)
    )
    assert not torch.equal(ours, theirs)


@pytest.mark.parametrize("method", ["fedavg", "feddrop"])
def test_other_methods_can_have_it_too(method: str) -> None:
    run = run_for(method=method, train__adjust_logits=True)
    assert run.summary["rounds_played"] == 3


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "go on from models of their own"),
        ({"method": "local"}, "go on from models of their own"),
        ({"method": "ditto"}, "go on from models of their own"),
        ({"method": "fedper"}, "go on from models of their own"),
        ({"method": "hermes"}, "go on from models of their own"),
        ({"method": "fedavg", "method__finetune": 1}, "in a way of their own"),
        ({"method": "heterofl"}, "in a way of their own"),
    ],
)
def test_it_is_refused_where_shares_would_be_added_twice(
    given: dict[str, Any], why: str
) -> None:
    with pytest.raises(SettingsError, match=rf"^train\.adjust_logits = true: .*{why}"):
        plan_for(train__adjust_logits=True, **given)


def test_it_is_refused_beside_class_weights() -> None:
    with pytest.raises(SettingsError, match=r"both make up for rare classes"):
        plan_for(**ON, train__class_weights="balanced")


@pytest.mark.parametrize("task", ["regression", "language-model", "segmentation"])
def test_it_is_refused_where_a_task_says_nothing_of_shares(task: str) -> None:
    with pytest.raises(SettingsError, match=rf"adjust_logits = true: the task {task}"):
        plan_for(**ON, task=task)


@pytest.mark.parametrize("task", ["regression", "language-model", "segmentation"])
def test_fedspu_plus_adjusts_logits_only_where_there_are_classes(task: str) -> None:
    settings = resolve(named(method="fedspu-plus"))
    assert settings.train.adjust_logits
    assert not resolve(named(method="fedspu-plus", task=task)).train.adjust_logits
    for own in (classification, regression):
        found = resolve(named(method="fedspu-plus"), ("task",), own)
        assert found.train.adjust_logits == (own is classification)


def test_a_run_that_is_older_than_the_setting_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = named(method="fedspu-plus", train__adjust_logits=False)
    given |= {"out": tmp_path / "run", "method.finish_last": 2}
    simulate = partial(fedspu.simulate, model=ConvNet, data=examples())
    whole = simulate({**given, "out": tmp_path / "whole"})

    def stop(plan: Any, played: Any) -> None:
        if played.federation.round == 2:
            raise KeyboardInterrupt

    written = Settings.to_toml
    with monkeypatch.context() as before:
        before.setattr(
            Settings,
            "to_toml",
            lambda self: written(self).replace("adjust_logits = false\n", ""),
        )
        with pytest.raises(KeyboardInterrupt):
            simulate(given, watch=stop)
    assert "adjust_logits" not in (tmp_path / "run/settings.toml").read_text()
    resumed = fedspu.resume(tmp_path / "run", model=ConvNet, data=examples())
    assert resumed.rounds == whole.rounds
    assert not resumed.plan.settings.train.adjust_logits


def test_an_output_that_is_wider_than_the_classes_is_adjusted_too() -> None:
    """Scores of classes that nobody has are kept low, as in use."""
    x, y = data(8)[0], SKEWED
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5)).double()
    train(local(model, x, y, epochs=1, batch_size=8, lr=1.0, adjust_logits=True))
    torch.manual_seed(1)
    slow = nn.Sequential(nn.Linear(6, 5)).double()
    F.cross_entropy(slow(x) + log_shares(y, 5), y).backward()
    for ours, theirs in zip(model.parameters(), slow.parameters(), strict=True):
        assert theirs.grad is not None
        with torch.no_grad():
            theirs.sub_(theirs.grad)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
