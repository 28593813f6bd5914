"""What people do with a model in training, by habit, while only a part of it trains.

The oracle is in ways.py: the same code on the leaves, and on the full model.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedspu import Axis, NeuronGroup, Neurons, state_of
from fedspu.errors import ModelError
from fedspu.partial.context import paths
from tests.oracles.masked_training import (
    Setting,
    StopError,
    Way,
    accumulating_script,
    assert_called_alike,
    assert_close,
    assert_same,
    by,
    by_leaves,
    checkpointing_script,
    judging_script,
    layer_setting,
    loss_of,
    masks_of,
    one_step,
    own_setting,
    plain_script,
    setting,
    sgd,
    stop,
)
from tests.oracles.models import run, seeded
from tests.oracles.tables import same_bits
from tests.oracles.zoo import noise


@by("kernels-auto-fast", "kernels-index-fast")
def test_a_batch_of_no_examples_of_one_channel_moves_nothing(way: Way) -> None:
    what = setting("unet")
    model = what.fresh().eval()
    before = state_of(model)
    with way.training(model, what) as trainable:
        run(model, what.draw(0)[:0]).sum().backward()
        one_step(trainable)
    after = state_of(model)
    assert all(same_bits(after[name], before[name]) for name in after)


@by("chain-auto-fast", "kernels-index-fast")
@pytest.mark.parametrize(
    "name",
    [
        "cnn",
        "residual",
        "transformer",
    ],
)
def test_the_model_may_be_judged_in_inference_mode(way: Way, name: str) -> None:
    what = setting(name)
    assert_same(way, what, judging_script(what, torch.inference_mode))


@by("chain-auto")
def test_one_example_trains_a_chain(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        loss_of(model, what.draw(0)[:1]).backward()
        one_step(weights)

    assert_same(way, what, script, atol=1e-9)


@by("kernels-auto-lean", "kernels-index-lean")
def test_a_block_checkpointed_by_hooks_trains_the_same_if_lean(way: Way) -> None:
    what = setting("residual")
    assert_same(way, what, checkpointing_script(what, reentrant=False))


class Branches(nn.Module):
    """Six layers of one shape that all read the model's own input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 8) for _ in range(6))
        self.last = nn.Linear(6 * 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([torch.tanh(layer(x)) for layer in self.layers], -1)
        logits: Tensor = self.last(h)
        return logits


@by_leaves
def test_gradients_may_be_cleared_by_the_model(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        optimizer = sgd(weights)
        for t in range(3):
            model.zero_grad()
            what.loss(model, t).backward()
            optimizer.step()

    assert_same(way, what, script)


@by_leaves
def test_gradients_may_be_clipped_by_the_model(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        what.loss(model).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        one_step(weights)
        return [norm]

    assert_same(way, what, script)


@by_leaves
def test_a_loss_may_use_the_weights_that_learn(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        learning = [p.square().sum() for p in model.parameters() if p.requires_grad]
        penalty = torch.stack(learning).sum()
        (what.loss(model) + penalty).backward()
        one_step(weights)
        return [penalty]

    assert_same(way, what, script)


@by_leaves
def test_an_optimizer_of_the_model_trains_it_or_is_refused(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        what.loss(model).backward()
        sgd(list(model.parameters())).step()

    try:
        assert_same(way, what, script)
    except ModelError:
        return


@by_leaves
def test_an_optimizer_made_before_moves_no_frozen_entry_or_is_refused(way: Way) -> None:
    what = setting("cnn")
    model = what.fresh()
    before, masks = state_of(model), masks_of(model, what.blocks)
    optimizer = sgd(list(model.parameters()))
    what.loss(model).backward()
    with way.training(model, what):
        try:
            optimizer.step()
        except ModelError:
            return
    after = state_of(model)
    for name, inside in masks.items():
        assert same_bits(after[name][~inside], before[name][~inside]), name


@by_leaves
@pytest.mark.parametrize("through", ["itself", "data", "init"])
def test_a_weight_changed_in_place_by_name_changes_or_refuses(
    way: Way, through: str
) -> None:
    # Clipped weights, as in a Wasserstein GAN.
    what = setting("mlp")
    model, masks = what.fresh(), masks_of(what.model, what.blocks)
    with way.training(model, what):
        try:
            for weight in model.parameters():
                with torch.no_grad():
                    if through == "itself":
                        weight.clamp_(-0.01, 0.01)
                    elif through == "data":
                        weight.data.clamp_(-0.01, 0.01)
                    else:
                        nn.init.constant_(weight, 0.01)
        except (ModelError, RuntimeError):
            return
    for name, values in state_of(model).items():
        assert (values[masks[name]].abs() <= 0.01).all(), name


@by_leaves
def test_leaves_may_be_given_other_data(way: Way) -> None:
    # As vector_to_parameters does.
    what = setting("mlp")
    model, masks = what.fresh(), masks_of(what.model, what.blocks)
    before = state_of(model)
    with way.training(model, what) as trainable:
        for leaf in trainable:
            leaf.data = leaf.detach() + 1
        inside = run(model, what.draw(0)).detach()
    after = state_of(model)
    for name, is_active in masks.items():
        assert torch.allclose(after[name] - before[name], is_active.double()), name
    assert torch.allclose(run(model, what.draw(0)), inside)


@by("chain-auto-fast")
def test_a_copy_made_with_all_neurons_active_is_refused_or_a_copy(way: Way) -> None:
    # The best model so far, kept by a client that trains everything.
    what = setting("mlp")
    what = replace(what, active=what.neurons.everything())
    model = what.fresh()
    with way.training(model, what) as trainable:
        expected = run(model, what.draw(0)).detach()
        try:
            best = copy.deepcopy(model)
        except ModelError:
            return
        plain_script(what, sgd)(model, trainable)
        assert torch.allclose(run(best, what.draw(0)), expected)
    assert torch.allclose(run(best, what.draw(0)), expected)
    best.load_state_dict(model.state_dict())


@by("chain-auto-fast")
def test_a_layer_may_be_replaced_between_contexts(way: Way) -> None:
    what = own_setting(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), 4, 6
    )
    model = what.fresh()
    with way.training(model, what) as trainable:
        plain_script(what, sgd, steps=1)(model, trainable)
    assert isinstance(model, nn.Sequential)
    model[1] = nn.Tanh()
    expected = run(model, what.draw(0))
    with way.training(model, what):
        assert torch.allclose(run(model, what.draw(0)), expected)


@by("chain-auto-fast")
def test_a_layer_may_have_a_forward_of_its_own(way: Way) -> None:
    what = setting("mlp")
    model = what.fresh()
    model.get_submodule("relu1").forward = torch.tanh
    expected = run(model, what.draw(0))
    with way.training(model, what):
        assert torch.allclose(run(model, what.draw(0)), expected)


class Moody(nn.Module):
    """Scores in training, probabilities in use, as many models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc2(F.relu(self.fc1(x)))
        return scores if self.training else scores.softmax(-1)


@by("chain-auto-fast")
def test_a_model_may_do_something_else_in_eval(way: Way) -> None:
    what = own_setting(Moody, 4, 6)
    model = what.fresh()
    with way.training(model, what):
        run(model, what.draw(0))
        output = run(model.eval(), what.draw(0))
    assert torch.allclose(output, run(model, what.draw(0)))


@by("chain-auto-fast")
def test_a_model_first_entered_in_eval_may_do_something_else_in_training(
    way: Way,
) -> None:
    class Noisy(Moody):
        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.fc1(x))
            scores: Tensor = self.fc2(2 * h if self.training else h)
            return scores

    what = own_setting(Noisy, 4, 6)
    model = what.fresh()
    with way.training(model.eval(), what):
        run(model, what.draw(0))
    expected = run(model.train(), what.draw(0))
    with way.training(model, what):
        assert torch.allclose(run(model, what.draw(0)), expected)


@by("chain-auto-fast")
def test_a_weight_changed_before_backward_is_noticed(way: Way) -> None:
    # Plain PyTorch refuses: a variable needed for gradient computation was modified.
    what = setting("mlp")
    model = what.fresh()
    with way.training(model, what) as trainable:
        expected = torch.autograd.grad(what.loss(model), trainable)
        loss = what.loss(model)
        with torch.no_grad():
            for leaf in trainable:
                leaf.add_(1)
        try:
            found = torch.autograd.grad(loss, trainable)
        except RuntimeError:
            return
        assert_close(list(found), list(expected))


@by("chain-auto-fast")
def test_a_backward_pass_after_leaving_is_right_or_refused(way: Way) -> None:
    what = setting("mlp")
    model = what.fresh()
    with way.training(model, what) as trainable:
        expected = torch.autograd.grad(what.loss(model), trainable)
        loss = what.loss(model)
    try:
        found = torch.autograd.grad(loss, trainable)
    except RuntimeError:
        return
    assert_close(list(found), list(expected))


@by("kernels-auto-fast")
def test_a_hook_that_stops_a_layer_does_no_harm(way: Way) -> None:
    # How activations of one layer are collected: its inputs, and no further.
    what = setting("mlp")
    model = what.fresh()
    before = state_of(model)
    handle = model.get_submodule("fc2").register_forward_pre_hook(stop)
    with way.training(model, what):
        with pytest.raises(StopError):
            run(model, what.draw(0))
        handle.remove()
        inside = state_of(model)
    assert all(torch.equal(inside[name], before[name]) for name in before)


@by("kernels-auto-fast")
def test_an_interrupt_does_no_harm(way: Way) -> None:
    # Caught inside, to save what has been reached.
    what = setting("mlp")
    model = what.fresh()
    before = state_of(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with way.training(model, what):
        handle = model.get_submodule("fc2").register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model, what.draw(0))
        handle.remove()
        inside = state_of(model)
    assert all(torch.equal(inside[name], before[name]) for name in before)


@by("kernels-auto-fast")
def test_a_state_read_by_a_hook_is_in_the_model_s_own_order(way: Way) -> None:
    what = setting("cnn")
    model, seen = what.fresh(), []
    before = state_of(model)
    model.register_forward_hook(lambda *_: seen.append(state_of(model)))
    with way.training(model.eval(), what):
        run(model, what.draw(0))
    assert all(torch.equal(seen[0][name], before[name]) for name in before)


@by("kernels-auto-fast")
@pytest.mark.xfail(
    strict=True,
    reason="buffers have the order of the moment, seen from outside as well",
)
def test_buffers_read_by_name_are_in_the_model_s_own_order(way: Way) -> None:
    # As AveragedModel reads them.
    what = setting("cnn")
    model = what.fresh()
    before = {name: values.clone() for name, values in model.named_buffers()}
    with way.training(model, what):
        inside = {name: values.clone() for name, values in model.named_buffers()}
    assert all(torch.equal(inside[name], before[name]) for name in before)


class Doubled(nn.Module):
    """A layer with two weights that are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(8, 6))
        self.other = nn.Parameter(torch.randn(8, 6))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.tanh(F.linear(x, self.one + self.other)))
        return logits


@by("kernels-auto-fast")
def test_weights_that_are_added_up_accumulate_gradients_of_their_own(way: Way) -> None:
    with seeded(0):
        model = Doubled().double()
    axes = (Axis("one", 0), Axis("other", 0), Axis("last.weight", 1))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    neurons = Neurons((NeuronGroup("one", 8, axes, permutable=True),), shapes)
    active = {"one": torch.tensor([0, 3, 5])}
    x = noise(4, 6).double()
    what = Setting(model, neurons, active, lambda t: x + t)
    assert_same(way, what, accumulating_script(what, "norm", set_to_none=True))


@by("chain-auto-fast")
def test_a_chain_may_be_called_with_other_weights(way: Way) -> None:
    assert_called_alike(way, "mlp")


@by("kernels-auto-fast", "plain-auto-fast")
def test_one_other_weight_is_right_or_refused_where_neurons_move(way: Way) -> None:
    assert_called_alike(way, "mlp", "fc2.weight")


@by("kernels-auto-fast", "plain-auto-fast")
def test_other_weights_are_right_or_refused_where_statistics_move(way: Way) -> None:
    assert_called_alike(way, "residual")


@by("kernels-auto-fast", "kernels-index-fast")
@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_autocast_leaves_float64_alone(way: Way, name: str) -> None:
    what = layer_setting(name)

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = what.loss(model)
        loss.backward()
        one_step(weights)

    assert_same(way, what, script)


class Scaled(nn.Module):
    """A checkpointed method that uses a weight by name, as blocks with scales do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.reentrant: bool | None = None

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc1(x) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            h = self.inner(x)
        else:
            x = x.requires_grad_(self.reentrant)
            h = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        logits: Tensor = self.fc2(h)
        return logits


@by("kernels-auto-fast", "plain-auto-fast")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_method_may_use_weights_by_name(
    way: Way, reentrant: bool
) -> None:
    what = own_setting(Scaled, 4, 6)

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        assert isinstance(model, Scaled)
        model.reentrant = reentrant
        plain_script(what, sgd)(model, weights)

    assert_same(way, what, script)


@by("kernels-index-fast")
def test_the_gradient_of_an_activation_is_the_exact_one(way: Way) -> None:
    # Of the first layer's output, by retain_grad, as saliency maps take it.
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        seen: list[Tensor] = []

        def keep(_: Any, args: Any, output: Tensor) -> None:
            output.retain_grad()
            seen.append(output)

        handle = model.get_submodule("conv1").register_forward_hook(keep)
        what.loss(model).backward()
        handle.remove()
        one_step(weights)
        assert seen[0].grad is not None
        return [seen[0].grad]

    assert_same(way, what, script)


@by("kernels-auto-fast", "kernels-index-fast")
def test_every_parameter_that_was_used_says_how(way: Way) -> None:
    what = setting("cnn")
    model = what.fresh()
    with way.training(model, what):
        what.loss(model).backward()
        assert "unused" not in paths(model).values()
