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


def train_last_layer(local: LocalTraining) -> float:
    """Local epochs of the last layer alone; return the mean loss, as ``train`` does.

    The model is in eval mode: norms keep their statistics, and nothing drops out.
    """
    model, mean = local.model.eval(), RunningMean()
    with only(model, last_layers(local.neurons, 1)):
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = make_optimizer(trainable, local.settings)
        loss, local = local.loss, _from_inputs_of_last(local)
        for _ in range(local.settings.epochs):
            for x, y in local.batches():
                optimizer.zero_grad()
                value = loss(local.model(x), y)
                value.backward()
                take_step(optimizer, local.settings)
                mean.add(value, local.task.count(y))
            mean.check(local.settings)
    return mean.value


def _from_inputs_of_last(local: LocalTraining) -> LocalTraining:
    """The same training of a linear last layer on what it is given, computed once.

    As it was, if the model does not return just what that layer returns, or gives it
    more than one vector for an example.
    """
    owners = {
        name.rpartition(".")[0]
        for name, parameter in local.model.named_parameters()
        if parameter.requires_grad
    }
    layer = local.model.get_submodule(owners.pop()) if len(owners) == 1 else None
    if not isinstance(layer, nn.Linear) or local.augmentation is not None:
        return local
    calls: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        calls.append((given[0], output))

    handle = layer.register_forward_hook(note)
    inputs = []
    try:
        for x in local.x.split(local.settings.batch_size):
            calls.clear()
            with torch.no_grad():
                output = local.model(x)
            if len(calls) != 1 or calls[0][1] is not output or output.dim() != 2:
                return local
            inputs.append(calls[0][0])
    finally:
        handle.remove()
    return replace(local, model=layer, x=torch.cat(inputs))
