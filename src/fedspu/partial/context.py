"""Train the active part of a model; everything else is frozen, and costs less.

Inside ``partial_training`` each parameter with frozen entries is a ``PartialWeight``:
it reads as the full weight everywhere, while the value that trains is a leaf, its
active block. Weighted operations (``block_gradients.py``) compute only the block's
gradient; any other operation on the weight computes the full gradient and passes on the
block's part. So frozen entries have no gradient and no optimizer state, whatever the
optimizer, and functional calls, tied weights and layers used twice need no special
handling. Small networks that are one chain of layers take a faster path
(``chain/autograd.py``).
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fedspu.partial.operations  # noqa: F401  # registers the kernels
from fedspu.compiled.library import find
from fedspu.errors import ModelError
from fedspu.neurons.table import Active, Neurons
from fedspu.partial.chain.autograd import running_chain
from fedspu.partial.chain.native.models import Kernels, check_kernels
from fedspu.partial.interception import Order
from fedspu.partial.lean import lean_forward
from fedspu.partial.spans import Arrangement, Layout, Spans, arrange
from fedspu.partial.weight import How, Mode, PartialWeight, Saves


@contextmanager
def partial_training(
    model: nn.Module,
    neurons: Neurons,
    active: Active,
    mode: Mode = "exact",
    layout: Layout = "auto",
    saves: Saves = "fast",
    kernels: Kernels = "auto",
) -> Iterator[list[Tensor]]:
    """Yield the trainable tensors of ``model``: the active blocks of its parameters.

    Give them to any optimizer; use ``model`` as usual. On exit, also by an exception,
    the model has its own parameters back, with the new values in the active blocks and
    every other learnable entry bit for bit as before.

    ``exact`` is the true gradient of the active entries (the paper's Eq. 4).
    ``truncated`` also stops it at frozen neurons: a weighted layer passes gradient only
    from active outputs to active inputs. It is cheaper, but an approximation.

    ``layout``: inside the context, active neurons come first wherever the table proves
    that to be a symmetry (``auto``), or all keep their places (``index``): float32 then
    rounds as in the plain model, and dropout draws the same masks.

    ``saves``: keep for the backward pass what is fastest (``fast``), or as little as
    possible, which is somewhat slower (``lean``). The numbers are the same.

    ``kernels``: small networks that are a chain of layers run as compiled code, if
    there is a compiler, and so do batch norms of other networks (``auto``); the same,
    but a missing compiler is an error (``native``); or all by PyTorch (``torch``). They
    round differently.
    Compiled code needs as little memory with ``fast`` as with ``lean``.
    """
    if mode not in ("exact", "truncated"):
        raise ModelError(f"mode = {mode!r}: expected exact or truncated")
    if layout not in ("auto", "index"):
        raise ModelError(f"layout = {layout!r}: expected auto or index")
    if saves not in ("fast", "lean"):
        raise ModelError(f"saves = {saves!r}: expected fast or lean")
    check_kernels(kernels)
    _check_fits(model, neurons)
    neurons.blocks(active)  # refuses a choice that does not fit the table
    how = How(
        is_truncated=mode == "truncated",
        is_lean=saves == "lean",
        rounds_as_torch=layout == "index",
        has_code=kernels != "torch" and find().library is not None,
    )
    arrangement = arrange(model, neurons, active, layout)
    with _arranged(model, arrangement):
        order = Order(arrangement)
        trainable, weights = _leaves(model, arrangement.spans, how, order)
        with ExitStack() as stack:
            if layout == "auto":
                num_hooks = 1 if arrangement.orders else 0
                chain = running_chain(
                    model, arrangement.spans, trainable, how, num_hooks, kernels
                )
                stack.enter_context(chain)
            if saves == "lean":
                stack.enter_context(lean_forward(model, how))
            stack.enter_context(_replaced(model, weights))
            stack.enter_context(order.kept(model, weights))
            stack.enter_context(_watching_optimizers(weights))
            yield list(trainable.values())


def paths(model: nn.Module) -> dict[str, str]:
    """How the gradient of each parameter was computed, after a step in the context.

    ``native``: by compiled code; ``chain``: by the fast path for small chains;
    ``block``: only for the active block; ``full``: in full, and then cut down;
    ``whole``: by plain PyTorch, because no entry is frozen; ``unused``: not at all.
    """
    return {
        name: p.path if isinstance(p, PartialWeight) else "whole"
        for name, p in model.named_parameters()
    }


def _check_fits(model: nn.Module, neurons: Neurons) -> None:
    own = dict(model.named_parameters())
    for name, shape in neurons.shapes.items():
        if name not in neurons.statistics and (
            name not in own or tuple(own[name].shape) != shape
        ):
            found = tuple(own[name].shape) if name in own else "no such tensor"
            raise ModelError(
                f"the neuron table was made for another model: {name} is {shape} in "
                f"the table and {found} in the model; call map_neurons on this one"
            )
    if inside := [name for name, p in own.items() if isinstance(p, PartialWeight)]:
        raise ModelError(
            f"{inside[0]} is already in partial training; leave that context first"
        )


@contextmanager
def _arranged(model: nn.Module, arrangement: Arrangement) -> Iterator[None]:
    arrangement.enter(model)
    try:
        yield
    finally:
        arrangement.leave(model)


# What stands in for its parameters ---------------------------------------------------


def _leaves(
    model: nn.Module,
    spans: Mapping[str, Spans],
    how: How,
    order: Order,
) -> tuple[dict[str, Tensor], dict[int, PartialWeight]]:
    """What trains, by name; and the partial weights, by the id of their parameter."""
    trainable: dict[str, Tensor] = {}
    weights: dict[int, PartialWeight] = {}
    for name, parameter in model.named_parameters():
        is_whole = all(span is None for span in spans[name])
        if parameter.requires_grad and is_whole:
            trainable[name] = parameter
        elif parameter.requires_grad or (how.is_truncated and not is_whole):
            weight = PartialWeight.of(parameter, spans[name], how)
            weight.shown = partial(order.shown, name)
            weights[id(parameter)] = weight
            if parameter.requires_grad:
                trainable[name] = weight.leaf
    return trainable, weights


@contextmanager
def _replaced(model: nn.Module, weights: Mapping[int, PartialWeight]) -> Iterator[None]:
    """Inside, partial weights replace their parameters everywhere in the model."""
    places = [
        (layer, name, parameter)
        for layer in model.modules()
        for name, parameter in layer._parameters.items()
        if parameter is not None and id(parameter) in weights
    ]
    for layer, name, parameter in places:
        _assign(layer, name, weights[id(parameter)])
    try:
        yield
    finally:
        for weight in weights.values():
            weight.write_back()
        for layer, name, parameter in places:
            _assign(layer, name, parameter)


def _assign(layer: nn.Module, name: str, value: Any) -> None:
    layer._parameters[name] = value
    if isinstance(layer, nn.RNNBase):  # it also keeps a list of its weights
        layer._flat_weights[layer._flat_weights_names.index(name)] = value


@contextmanager
def _watching_optimizers(weights: Mapping[int, PartialWeight]) -> Iterator[None]:
    """Write leaves back after an optimizer's step; refuse one that would break them."""
    by_leaf = {id(weight.leaf): weight for weight in weights.values()}
    not_to_train = {*weights, *(id(weight) for weight in weights.values())}

    def ours(group: dict[str, Any]) -> list[PartialWeight]:
        return [by_leaf[id(p)] for p in group["params"] if id(p) in by_leaf]

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if any(id(p) in not_to_train for p in group["params"]):
                raise ModelError(
                    f"{type(optimizer).__name__} has whole parameters of a model in "
                    "partial training; give it the tensors that partial_training "
                    "yields: with partial_training(...) as trainable"
                )
            if group.get("fused") and any(
                not w.leaf.is_contiguous() for w in ours(group)
            ):
                raise ModelError(
                    f"{type(optimizer).__name__}(fused=True) would write outside the "
                    "active entries; leave fused out, or use layout='index'"
                )

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for weight in ours(group):
                weight.write_back()

    hooks = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
