"""Partial training with any optimizer, and what is done to gradients before a step.

The oracle is in ways.py: the same code on the leaves, and on the full model.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from fedspu import state_of
from fedspu.errors import ModelError
from fedspu.neurons.blocks import take
from tests.oracles.masked_training import (
    CLIPS,
    OPTIMIZERS,
    WAYS,
    Residual,
    Script,
    Setting,
    Way,
    accumulating_script,
    assert_close,
    assert_same,
    by,
    by_leaves,
    by_three,
    by_two,
    learnable,
    masks_of,
    one_step,
    plain_script,
    setting,
    sgd,
)
from tests.oracles.models import Fn, random_active, run, seeded
from tests.oracles.tables import same_bits

# Optimizers ---------------------------------------------------------------------------


@by_leaves
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_any_optimizer_trains_as_on_the_masked_model(way: Way, rule: str) -> None:
    what = setting("cnn")
    assert_same(way, what, plain_script(what, OPTIMIZERS[rule]))


@by_leaves
def test_parameter_groups_and_schedules_do_as_ever(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        optimizer = torch.optim.Adam(weights[:3], lr=0.01, eps=1e-4)
        optimizer.add_param_group({"params": weights[3:], "lr": 0.1})
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        for t in range(3):
            optimizer.zero_grad()
            what.loss(model, t).backward()
            optimizer.step()
            schedule.step()

    assert_same(way, what, script)


@by_leaves
def test_several_optimizers_may_share_the_leaves(way: Way) -> None:
    what = setting("residual")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        both = [sgd(weights[0::2]), OPTIMIZERS["adamw"](weights[1::2])]
        for t in range(4):
            for optimizer in both:
                optimizer.zero_grad()
            what.loss(model, t).backward()
            both[t % 2].step()

    assert_same(way, what, script)


@by_leaves
def test_an_optimizer_s_state_may_be_loaded_from_another(way: Way) -> None:
    what = setting("mlp")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        one = OPTIMIZERS["adamw"](weights)
        what.loss(model, 0).backward()
        one.step()
        other = OPTIMIZERS["adamw"](weights)
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        what.loss(model, 1).backward()
        other.step()

    assert_same(way, what, script)


@by_leaves
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_lbfgs_sees_a_function_of_the_active_entries(
    way: Way, name: str, search: str | None
) -> None:
    what = setting(name)

    def minimise(leaves: list[Tensor], loss: Callable[[], Tensor]) -> None:
        lbfgs = torch.optim.LBFGS(leaves, 0.1, max_iter=4, line_search_fn=search)

        def closure() -> float:
            lbfgs.zero_grad()
            value = loss()
            value.backward()
            return value.item()

        for _ in range(2):
            lbfgs.step(closure)

    # A function of the active entries alone, by functional_call.
    twin, masks = what.fresh(), masks_of(what.model, what.blocks)
    own = {name: w.detach().clone() for name, w in learnable(twin).items()}
    leaves = {n: take(w, what.blocks[n]).requires_grad_() for n, w in own.items()}

    def filled() -> dict[str, Tensor]:
        return {n: w.masked_scatter(masks[n], leaves[n]) for n, w in own.items()}

    def twin_loss() -> Tensor:
        call = partial(torch.func.functional_call, twin, filled())
        return what.loss(Fn(lambda _, x: call((x,))))

    minimise(list(leaves.values()), twin_loss)
    model = what.fresh()
    with way.training(model, what) as trainable:
        minimise(trainable, partial(what.loss, model))
    after, wanted = state_of(model), state_of(twin) | filled()
    assert_close([after[n] for n in after], [wanted[n].detach() for n in after])


FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]


@by("chain-auto-fast", "kernels-auto-fast")
@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_optimizer_is_refused_on_leaves_that_are_no_block_of_memory(
    way: Way, kind: str
) -> None:
    # It would write beside the active entries.
    what = setting("cnn")
    model = what.fresh()
    before = state_of(model)
    with way.training(model.eval(), what) as trainable:
        what.loss(model).backward()
        fused = getattr(torch.optim, kind)(trainable, lr=0.1, fused=True)
        with pytest.raises(ModelError, match="fused=True"):
            fused.step()
    after = state_of(model)
    assert all(same_bits(after[name], before[name]) for name in after)


@by("kernels-index-fast", "plain-index-fast")
@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_optimizer_trains_leaves_that_are_copies(way: Way, kind: str) -> None:
    # It changes them without their version counters.
    what = setting("cnn")
    more = {} if kind == "SGD" else {"eps": 1e-4}
    make = partial(getattr(torch.optim, kind), lr=0.05, fused=True, **more)
    assert_same(way, what, plain_script(what, make))


# Gradients on their way to the optimizer ----------------------------------------------


@by_two
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clip", CLIPS)
def test_accumulated_and_clipped_gradients_train_as_on_the_masked_model(
    way: Way, clip: str, set_to_none: bool
) -> None:
    what = setting("cnn")
    assert_same(way, what, accumulating_script(what, clip, set_to_none))


@by("chain-auto", "kernels-index", "plain-auto-fast")
@pytest.mark.parametrize(
    "name", ["mlp", "residual", "vgg", "unet", "vit", "transformer", "grouped_conv"]
)
def test_other_models_accumulate_and_clip_as_well(way: Way, name: str) -> None:
    what = setting(name)
    assert_same(way, what, accumulating_script(what, "norm", set_to_none=False))


def test_a_gradient_may_be_taken_without_backward(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        found = torch.autograd.grad(what.loss(model), weights)
        for weight, grad in zip(weights, found, strict=True):
            weight.grad = grad.clone()
        one_step(weights)

    assert_same(way, what, script)


@by_leaves
def test_hooks_on_the_leaves_change_their_gradients(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        calls: list[Tensor] = []
        for weight in weights:
            weight.register_hook(lambda grad: 3 * grad + 0.1)
            weight.register_post_accumulate_grad_hook(
                lambda _: calls.append(torch.ones(()))
            )
        what.loss(model).backward()
        one_step(weights)
        return calls

    assert_same(way, what, script)


@by_three
@pytest.mark.parametrize("name", ["cnn", "residual"])
def test_each_weight_may_step_as_soon_as_its_gradient_is_there(
    way: Way, name: str
) -> None:
    what = setting(name)

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        def step(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        for weight in weights:
            hook = partial(step, sgd([weight]))
            weight.register_post_accumulate_grad_hook(hook)
        for t in range(3):
            what.loss(model, t).backward()

    assert_same(way, what, script)


def test_one_graph_may_be_walked_twice(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        loss = what.loss(model)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        one_step(weights)

    assert_same(way, what, script)


@by("chain-auto", "kernels-index", "plain-auto-fast")
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "vit"])
def test_a_loss_may_use_the_model_twice(way: Way, name: str) -> None:
    what = setting(name)

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        one, other = run(model, what.draw(0)), run(model, what.draw(1))
        F.mse_loss(one, other).backward()
        one_step(weights)

    assert_same(way, what, script)


@by("chain-auto", "kernels-index", "plain-auto-fast")
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "vit", "lstm"])
def test_a_loss_may_use_weights_by_name(way: Way, name: str) -> None:
    # FedProx, EWC, an L1 penalty: each entry has a number of its own.
    what = setting(name)
    with seeded(3):
        towards = {n: torch.randn_like(w) for n, w in learnable(what.model).items()}

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        optimizer, seen = sgd(weights), []
        for t in range(3):
            optimizer.zero_grad()
            named = dict(model.named_parameters())
            far = sum((named[n] - w).square().sum() for n, w in towards.items())
            long = sum((named[n] * w).abs().sum() for n, w in towards.items())
            (what.loss(model, t) + 0.01 * far + 0.02 * long).backward()
            optimizer.step()
            seen += [torch.as_tensor(far).detach(), torch.as_tensor(long).detach()]
        return seen

    assert_same(way, what, script)


def test_a_loss_may_read_one_layer_s_weight(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        weight = model.get_submodule("conv1").weight
        assert isinstance(weight, Tensor)
        flat = weight.flatten(1)
        gram = flat @ flat.t() - torch.eye(6, dtype=torch.float64)
        (what.loss(model) + gram.square().sum() + weight[0].norm()).backward()
        one_step(weights)

    assert_same(way, what, script)


@by_two
def test_saved_activations_may_be_moved_and_fetched(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: (x.tolist(), x.dtype, x.shape),
            lambda kept: torch.tensor(kept[0], dtype=kept[1]).view(kept[2]),
        ):
            loss = what.loss(model)
        loss.backward()
        one_step(weights)

    assert_same(way, what, script)


@by_three
def test_a_moving_average_of_the_model_is_in_its_own_order(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        average = swa_utils.AveragedModel(
            what.fresh(), avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new
        )
        optimizer = sgd(weights)
        for t in range(3):
            optimizer.zero_grad()
            what.loss(model, t).backward()
            optimizer.step()
            average.update_parameters(model)
        vector = nn.utils.parameters_to_vector(model.parameters())
        return [*learnable(average).values(), vector]

    assert_same(way, what, script)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Setting, Script]:
    """Training code put together at random."""
    what = setting(draw(st.sampled_from(["mlp", "cnn", "residual"])))
    p, seed = draw(st.sampled_from([0.2, 0.5, 0.9])), draw(st.integers(0, 99))
    what = replace(what, active=random_active(what.neurons, p, seed))
    rule = OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))]
    words = ["train", "train", "step", "step", "clip", "zero", "judge", "twice", "name"]
    text = draw(st.lists(st.sampled_from(words), min_size=3, max_size=12))
    is_checkpointed = draw(st.booleans())

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        optimizer, seen = rule(weights), []
        for t, word in enumerate(["train", *text, "step"]):
            if isinstance(model, Residual):  # it warns where nothing has a gradient
                model.reentrant = True if is_checkpointed and word != "judge" else None
            if word == "train":
                what.loss(model, t).backward()
            elif word == "twice":
                (what.loss(model, t) + what.loss(model, t + 1)).backward()
            elif word == "name":
                torch.stack([w.norm() for w in model.parameters()]).sum().backward()
            elif word == "step":
                optimizer.step()
            elif word == "zero":
                optimizer.zero_grad(set_to_none=bool(t % 2))
            elif word == "clip" and weights[0].grad is not None:
                seen.append(CLIPS[sorted(CLIPS)[t % 3]](weights))
            elif word == "judge":
                with torch.no_grad():
                    seen.append(run(model.eval(), what.draw(t)))
                model.train()
        return seen

    return what, script


@settings(max_examples=25)
@given(scripts(), st.sampled_from(WAYS))
def test_any_training_code_does_the_same(
    case: tuple[Setting, Script], way: Way
) -> None:
    with way.forced():
        assert_same(way, *case, atol=1e-8, must_move=False)  # many steps add up


# The truncated gradient ---------------------------------------------------------------


@by_two
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", ["cnn", "residual"])
def test_truncated_gradients_accumulate_and_are_clipped(
    way: Way, name: str, clip: str
) -> None:
    what = setting(name)
    script = accumulating_script(what, clip, set_to_none=False)
    assert_same(way, what, script, "truncated")


@by_leaves
@pytest.mark.parametrize("rule", ["nesterov", "adamw", "rmsprop"])
def test_truncated_gradients_train_by_any_optimizer(way: Way, rule: str) -> None:
    what = setting("cnn")
    assert_same(way, what, plain_script(what, OPTIMIZERS[rule]), "truncated")
