"""A context from its beginning to its end, and what goes on inside.

The oracle is in ways.py: the same code on the leaves, and on the full model.
"""

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fedspu
from fedspu import state_of
from fedspu.errors import ModelError
from fedspu.partial.weight import Mode
from tests.oracles.masked_training import (
    MODES,
    StopError,
    Way,
    assert_called_alike,
    assert_close,
    assert_rounds_alike,
    assert_same,
    by,
    by_leaves,
    by_two,
    checkpointing_script,
    errors,
    judging_script,
    masked,
    one_step,
    plain_script,
    setting,
    sgd,
    stop,
)
from tests.oracles.models import random_active

# Judging, leaving and entering --------------------------------------------------------


@by_two
@pytest.mark.parametrize("judging", [torch.no_grad, nullcontext])
@pytest.mark.parametrize("name", ["cnn", "residual", "vgg", "transformer"])
def test_the_model_may_be_judged_between_steps(
    way: Way, name: str, judging: Callable[[], AbstractContextManager[Any]]
) -> None:
    what = setting(name)
    assert_same(way, what, judging_script(what, judging))


def test_norms_may_be_held_still_in_training(way: Way) -> None:
    # As in fine-tuning: the layers train, the statistics do not move.
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        model.get_submodule("bn").eval()
        plain_script(what, sgd)(model, weights)

    assert_same(way, what, script)


def hooks_of(model: nn.Module) -> dict[str, int]:
    """How many hooks of each kind a model and all optimizers have."""
    counts: dict[str, int] = {}
    for layer in model.modules():
        for name, value in vars(layer).items():
            if "hook" in name and isinstance(value, dict):
                counts[name] = counts.get(name, 0) + len(value)
    counts["pre"] = len(optimizers._global_optimizer_pre_hooks)
    counts["post"] = len(optimizers._global_optimizer_post_hooks)
    return counts


@by_two
@pytest.mark.parametrize("where", ["body", "forward", "backward", "step"])
@pytest.mark.parametrize("name", ["cnn", "residual"])
def test_an_exception_inside_leaves_the_model_as_a_last_step_would(
    way: Way, name: str, where: str
) -> None:
    what = setting(name)
    model, dense = what.fresh(), what.fresh()
    own, hooks = dict(model.named_parameters()), hooks_of(model)
    layer = list(model.children())[-1]
    handles: list[Any] = []

    def fail(trainable: list[Tensor]) -> None:
        plain_script(what, sgd, steps=2)(model, trainable)
        if where == "forward":
            handles.append(layer.register_forward_hook(stop))
            what.loss(model, 2)
        if where == "backward":
            handles.append(trainable[0].register_hook(stop))
            what.loss(model, 2).backward()
        if where == "step":
            rest = torch.optim.SGD(trainable, lr=0.1)
            rest.register_step_pre_hook(stop)
            rest.step()
        raise StopError

    with pytest.raises(StopError), way.training(model, what) as trainable:
        fail(trainable)
    for handle in handles:
        handle.remove()
    assert hooks_of(model) == hooks
    assert "forward" not in vars(model)
    assert all(p is own[n] for n, p in model.named_parameters())
    assert all(type(p) is nn.Parameter for p in model.parameters())

    # A forward pass that nobody finished may have moved a norm's statistics: compare
    # what learns, and then train on, from there.
    with masked(dense, what.blocks) as weights:
        plain_script(what, sgd, steps=2)(dense, weights)
    assert_close(
        [w.detach() for w in own.values()], [w.detach() for w in dense.parameters()]
    )
    model.load_state_dict(dense.state_dict())
    again = replace(what, model=model)
    assert_same(way, again, plain_script(again, sgd, steps=2))


@by_two
def test_a_layer_that_fails_once_does_no_harm(way: Way) -> None:
    what = setting("mlp")
    failing: list[bool] = []

    def fail(*_: Any) -> None:
        if failing:
            raise StopError

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        handle = model.get_submodule("fc2").register_forward_hook(fail)
        failing.append(True)
        with pytest.raises(StopError):
            what.loss(model)
        failing.clear()
        handle.remove()
        plain_script(what, sgd)(model, weights)
        return list(state_of(model).values())

    assert_same(way, what, script)


@by_two
def test_contexts_of_two_models_may_be_left_in_any_order(way: Way) -> None:
    names = ("cnn", "residual")
    results = []
    for is_ours in (True, False):
        models, contexts, trains = [], [], []
        for name in names:
            what, model = setting(name), setting(name).fresh()
            context = (
                way.training(model, what) if is_ours else masked(model, what.blocks)
            )
            weights = context.__enter__()
            models.append(model)
            contexts.append(context)
            trains.append(partial(plain_script(what, sgd, steps=2), model, weights))
        for train in trains:
            train()
        contexts[0].__exit__(None, None, None)
        trains[1]()
        contexts[1].__exit__(None, None, None)
        assert hooks_of(models[0])["pre"] == hooks_of(models[0])["post"] == 0
        results.append([v for model in models for v in state_of(model).values()])
    ours, dense = results
    assert_close(ours, dense)


@by_two
def test_a_teacher_may_judge_while_its_pupil_trains(way: Way) -> None:
    what, other = setting("cnn"), setting("residual")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        teacher = other.fresh()
        with way.training(teacher, other) as others:
            x = what.draw(0)[:, :, :6, :6]
            with torch.no_grad():
                towards = teacher.eval()(x)
            F.mse_loss(model(what.draw(0)), towards).backward()
            one_step(weights)
            plain_script(other, sgd, steps=1)(teacher.train(), others)

    assert_same(way, what, script)


@by_two
def test_a_second_context_on_one_model_is_refused_and_does_no_harm(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        plain_script(what, sgd, steps=1)(model, weights)
        is_inside = any(type(p) is not nn.Parameter for p in model.parameters())
        if is_inside:
            with (
                pytest.raises(ModelError, match="already in partial training"),
                way.training(model, what),
            ):
                pass
        plain_script(what, sgd, steps=2)(model, weights)

    assert_same(way, what, script)


@by_two
@pytest.mark.parametrize("name", ["cnn", "residual", "vit"])
def test_round_after_round_other_neurons_train(way: Way, name: str) -> None:
    what = setting(name)
    ours, dense = what.fresh(), what.fresh()
    for t in range(3):
        now = replace(what, active=random_active(what.neurons, 0.4, seed=t))
        script = plain_script(now, sgd, steps=2)
        with way.training(ours, now) as weights:
            script(ours, weights)
        with masked(dense, now.blocks) as weights:
            script(dense, weights)
    assert_close(list(state_of(ours).values()), list(state_of(dense).values()))


@by_two
def test_a_model_left_is_freed(way: Way) -> None:
    from weakref import ref

    what = setting("cnn")
    model = what.fresh()
    with way.training(model, what) as trainable:
        plain_script(what, sgd, steps=1)(model, trainable)
        leaf = ref(trainable[0])
    del trainable
    gc.collect()
    assert leaf() is None
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None


# Checkpointed activations -------------------------------------------------------------


@by("kernels-auto", "kernels-index", "plain-auto-fast")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["residual", "dropout"])
def test_a_block_checkpointed_by_reentry_trains_the_same(
    way: Way, name: str, mode: Mode
) -> None:
    what = setting(name)
    assert_same(way, what, checkpointing_script(what, reentrant=True), mode)


@by("kernels-auto-fast", "kernels-index-fast", "plain-auto-fast")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["residual", "dropout"])
def test_a_block_checkpointed_by_hooks_trains_the_same(
    way: Way, name: str, mode: Mode
) -> None:
    what = setting(name)
    assert_same(way, what, checkpointing_script(what, reentrant=False), mode)


@by_two
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", ["whole", "in parts"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_checkpointed_chain_trains_the_same(
    way: Way, name: str, how: str, reentrant: bool, mode: Mode
) -> None:
    what = setting(name)

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        optimizer = sgd(weights)
        for t in range(3):
            x = what.draw(t).requires_grad_(reentrant)  # which one of them insists on
            optimizer.zero_grad()
            if how == "whole":
                output = checkpoint(model, x, use_reentrant=reentrant)
            else:
                output = checkpoint_sequential(model, 2, x, use_reentrant=reentrant)
            output.square().sum().backward()
            optimizer.step()

    assert_same(way, what, script, mode)


def test_a_whole_model_may_be_checkpointed_in_autocast(way: Way) -> None:
    what = setting("cnn")
    x, model = what.draw(0).float(), what.fresh().float()

    def backward(model: nn.Module, is_low: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
            output = checkpoint(model, x, use_reentrant=False)
        output.float().square().sum().backward()

    found = errors(way, what, copy.deepcopy(model), model, backward)
    assert_rounds_alike("cnn", found)


# Refused inside -----------------------------------------------------------------------


@by_two
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_the_compiler_is_refused(way: Way, name: str) -> None:
    what = setting(name)
    torch._dynamo.reset()
    model = what.fresh()
    with way.training(model, what) as trainable:
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(Exception, match="cannot be compiled"):
            compiled(what.draw(0))
        plain_script(what, sgd, steps=1)(model, trainable)
    torch._dynamo.reset()


@by_leaves
def test_a_model_compiled_before_is_refused_inside_and_runs_afterwards(
    way: Way,
) -> None:
    what = setting("mlp")
    torch._dynamo.reset()
    model = what.fresh()
    compiled = torch.compile(model, backend="eager")
    expected = compiled(what.draw(0))
    with (
        way.training(model, what),
        pytest.raises(Exception, match="cannot be compiled"),
    ):
        compiled(what.draw(0))
    assert torch.allclose(compiled(what.draw(0)), expected)
    torch._dynamo.reset()


@by_leaves
def test_a_copy_is_refused(way: Way) -> None:
    what = setting("cnn")
    model = what.fresh()
    with (
        way.training(model, what),
        pytest.raises(ModelError, match="cannot be copied"),
    ):
        copy.deepcopy(model)
    copy.deepcopy(model)


def test_loading_a_state_is_refused_and_reading_one_is_not(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        is_inside = any(type(p) is not nn.Parameter for p in model.parameters())
        plain_script(what, sgd, steps=2)(model, weights)
        state = {name: values.clone() for name, values in model.state_dict().items()}
        if is_inside:
            for load in (model.load_state_dict, partial(fedspu.load_state, model)):
                with pytest.raises(ModelError, match="cannot load a state"):
                    load(state)
        part = model.get_submodule("conv2").state_dict()
        return [*state.values(), *(values.clone() for values in part.values())]

    assert_same(way, what, script)


# Calls with other weights -------------------------------------------------------------


@by("kernels-index", "plain-index")
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_the_model_may_be_called_with_other_weights(way: Way, name: str) -> None:
    assert_called_alike(way, name)


@by("kernels-index", "plain-index")
def test_the_model_may_be_called_with_one_other_weight(way: Way) -> None:
    assert_called_alike(way, "mlp", "fc2.weight")
