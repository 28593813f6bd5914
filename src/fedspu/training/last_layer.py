"""Train only a model's last layers: all before them is frozen, and runs as in use."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedspu.neurons.table import Neurons
from fedspu.training.epochs import (
    LocalTraining,
    RunningMean,
    make_optimizer,
    take_step,
    train,
)


def last_layers(neurons: Neurons, number: int) -> frozenset[str]:
    """The tensors of the last layers that have weights, and of all that follows."""
    names = list(neurons.shapes)
    weighted = [name for name in names if len(neurons.shapes[name]) > 1]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in weighted))
    first = layers[-min(number, len(layers))] if layers else ""
    start = next(i for i, name in enumerate(names) if name.rpartition(".")[0] == first)
    return frozenset(names[start:])


@contextmanager
def only(model: nn.Module, names: set[str] | frozenset[str]) -> Iterator[None]:
    """Inside, only these parameters train."""
    others = {n: p for n, p in model.named_parameters() if n not in names}
    trainable = [p for p in others.values() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_()


def train_last_layer(local: LocalTraining, inputs: Tensor | None = None) -> float:
    """Local epochs of the last layer alone; return the mean loss, as ``train`` does.

    The model is in eval mode: norms keep their statistics, and nothing drops out. With
    ``inputs``, what that layer is given for each example, all before it need not run.
    """
    if inputs is not None:
        return train(_alone(local, inputs))
    model, mean, loss = local.model.eval(), RunningMean(), local.loss
    with only(model, last_layers(local.neurons, 1)):
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = make_optimizer(trainable, local.settings)
        for _ in range(local.settings.epochs):
            for x, y in local.batches():
                optimizer.zero_grad()
                value = loss(model(x), y)
                value.backward()
                take_step(optimizer, local.settings)
                mean.add(value, local.task.count(y))
            mean.check(local.settings)
    return mean.value


def _alone(local: LocalTraining, inputs: Tensor) -> LocalTraining:
    """The same training for a model that is the last layer, all of which trains."""
    layer = nn.Sequential(_last_layer(local))
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    table = Neurons((), shapes)
    return replace(local, model=layer, neurons=table, active={}, x=inputs)


def inputs_of_last_layer(local: LocalTraining) -> Tensor | None:
    """What the last layer is given for each example, however long it trains.

    None if that is not enough to train it: if the model does not return just what a
    linear layer returns, or gives it more than one vector for an example, or if the
    examples are changed at random.
    """
    layer = _last_layer(local)
    if not isinstance(layer, nn.Linear) or local.augmentation is not None:
        return None
    calls: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        calls.append((given[0], output))

    local.model.eval()
    handle = layer.register_forward_hook(note)
    inputs = []
    try:
        for x in local.x.split(AT_ONCE):
            calls.clear()
            with torch.no_grad():
                output = local.model(x)
            if len(calls) != 1 or calls[0][1] is not output or output.dim() != 2:
                return None
            inputs.append(calls[0][0])
    finally:
        handle.remove()
    return torch.cat(inputs)


AT_ONCE = 4
"""Examples at once: few, so that it takes less memory than a step of training."""


def _last_layer(local: LocalTraining) -> nn.Module:
    """The module that has all parameters of the last layer; the model, if none does."""
    names = {name for name, _ in local.model.named_parameters()}
    owners = {n.rpartition(".")[0] for n in names & last_layers(local.neurons, 1)}
    return local.model.get_submodule(owners.pop() if len(owners) == 1 else "")
