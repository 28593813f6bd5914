"""Partial training in half precision.

The oracle is in ways.py: the same code on the leaves, and on the full model.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedspu import state_of
from fedspu.partial.context import paths
from fedspu.partial.weight import Mode
from tests.oracles.masked_training import (
    LAYERS,
    MODES,
    OPTIMIZERS,
    Way,
    as_kind,
    assert_rounds_alike,
    assert_same,
    by,
    by_leaves,
    by_two,
    clip_norm,
    errors,
    in_autocast,
    layer_setting,
    loss_of,
    masks_of,
    setting,
    sgd,
)
from tests.oracles.models import random_input
from tests.oracles.tables import same_bits
from tests.oracles.zoo import ZOO, Entry

# Half precision -----------------------------------------------------------------------
#
# Rounding is large here, and another order of adding gives another result. So the
# yardstick is the error that plain PyTorch itself makes in half precision.

Gradients = Callable[[nn.Module, list[Tensor]], None]


@by("kernels-index", "plain-index-fast")
@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_autocast_rounds_as_it_does_in_the_plain_model(way: Way, entry: Entry) -> None:
    what, x = setting(entry.name), as_kind(random_input(entry), torch.float32)
    model = what.fresh().float()
    try:
        in_autocast(x)(copy.deepcopy(model), True)
    except RuntimeError:
        assert entry.name == "lstm"
        pytest.skip("plain PyTorch has no such layer in bfloat16")
    found = errors(way, what, copy.deepcopy(model), model, in_autocast(x))
    assert_rounds_alike(entry.name, found)


@by("kernels-auto", "kernels-index", "plain-index")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_autocast_runs_in_half_precision(way: Way, name: str) -> None:
    what = layer_setting(name)
    x, model = what.draw(0).float(), what.fresh().float()
    found = errors(way, what, copy.deepcopy(model), model, in_autocast(x))
    assert_rounds_alike(name, found)

    kinds = []
    with way.training(model, what) as trainable:
        model.get_submodule("it").register_forward_hook(
            lambda _, args, out: kinds.append((*args, out)[-1])
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x)
        loss.backward()
        found_by = {p for n, p in paths(model).items() if n.startswith("it.")}
        assert ("full" if way.path == "plain" else "block") in found_by
        assert all(t.dtype == torch.float32 for t in trainable)
        assert all(t.grad is not None for t in trainable)
        assert all(
            t.grad.dtype == torch.float32 for t in trainable if t.grad is not None
        )
    (output,) = kinds
    output = output[0] if isinstance(output, tuple) else output
    assert output.dtype == torch.bfloat16


@by_two
@pytest.mark.parametrize("mode", MODES)
def test_training_in_autocast_moves_active_entries_alone(way: Way, mode: Mode) -> None:
    what = setting("cnn")
    model = what.fresh().float()
    before, masks = state_of(model), masks_of(model, what.blocks)
    with way.training(model, what, mode) as trainable:
        optimizer = OPTIMIZERS["adamw"](trainable)
        for t in range(3):
            optimizer.zero_grad()
            in_autocast(what.draw(t).float())(model, True)
            optimizer.step()
    after = state_of(model)
    for name, inside in masks.items():
        assert same_bits(after[name][~inside], before[name][~inside]), name
        assert (after[name] != before[name])[inside].any(), name


@by_leaves
def test_a_scaled_loss_is_scaled_back(way: Way) -> None:
    what = setting("cnn")

    def script(model: nn.Module, weights: list[Tensor]) -> None:
        optimizer, scaler = sgd(weights), torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for t in range(3):
            optimizer.zero_grad()
            loss: Any = scaler.scale(what.loss(model, t))
            loss.backward()
            scaler.unscale_(optimizer)
            clip_norm(weights)
            scaler.step(optimizer)
            scaler.update()

    assert_same(way, what, script)


@by("chain-auto", "kernels-index-fast")
@pytest.mark.parametrize(
    "name", ["mlp", "cnn", "residual", "vit", "unet", "gru", "groupnorm"]
)
def test_a_bfloat16_model_rounds_as_the_plain_one_does(way: Way, name: str) -> None:
    what = setting(name)

    def backward(t: int, model: nn.Module, is_low: bool) -> None:
        x = as_kind(what.draw(t), torch.bfloat16)
        loss_of(model, x if is_low else as_kind(x, torch.float64)).backward()

    # One batch says little: a value at the edge of a ReLU falls on either side.
    model = what.fresh().bfloat16()
    found = [
        errors(way, what, copy.deepcopy(model).double(), model, partial(backward, t))
        for t in range(5)
    ]
    theirs, ours, apart = torch.tensor(found).square().mean(0).sqrt().tolist()
    assert theirs > 1e-3
    assert ours < 2 * theirs
    assert apart < 2.5 * theirs
