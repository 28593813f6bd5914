"""FjORD as its own paper has it: ordered dropout with a width drawn for each batch.

Horváth et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets
with Ordered Dropout", NeurIPS 2021. In each batch a client draws a width p, uniformly
from the capacities in the federation up to its own, and trains the slice of that width;
batch norms have statistics for each width, and share their weights. With
``method.distillation`` the client's full width learns from the labels in every batch,
and the drawn slice learns from the full width's outputs; both gradients are added.

Taken from the authors' implementation (Flower's baseline): one width for all layers,
the uniform choice, statistics per width, the soft targets. Averaging an
entry over the clients that hold it is the same as their average nested by width.
Assumed: p n is rounded down, as everywhere in fedspu, where they round up; the training
loss reported is the one on labels. A drawn slice of full width is not distilled from
itself: that gradient is zero. Outside the drawn slice the gradient is zero too, but
momentum and weight decay still move the weights there, as in their code. Statistics
travel for all widths up to the client's, each with all of the channels that the client
has. Norms other than PyTorch's own batch norms share their statistics.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu.methods.method import (
    ClientRound,
    Method,
    Offer,
    Trained,
    Turn,
    local_epochs,
)
from fedspu.methods.options import FjordOptions
from fedspu.methods.sub_model.fjord import fjord
from fedspu.neurons.blocks import (
    load_state,
    mesh,
    named_tensors,
    put,
    state_of,
    take,
)
from fedspu.neurons.choose import choose_ordered
from fedspu.neurons.slim import slim_model, slimmable
from fedspu.neurons.table import Active, Axis, Blocks, NeuronGroup, Neurons
from fedspu.partial.context import partial_training
from fedspu.random_streams import stream
from fedspu.settings import TrainSettings
from fedspu.tasks.task import Loss
from fedspu.training.epochs import LocalTraining, RunningMean, make_optimizer, take_step

BatchNorm = nn.modules.batchnorm._BatchNorm
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

WIDTHS = "(widths)"
"""The group of batch norms' rows, one for each width."""


def first_neurons(
    neurons: Neurons, p: Fraction, capacities: tuple[Fraction, ...]
) -> Active:
    """The first neurons of every group, and the statistics of all widths up to p."""
    active = slimmable(neurons, choose_ordered(neurons, p))
    if WIDTHS in active:
        active[WIDTHS] = torch.arange(sum(width <= p for width in capacities))
    return active


def offer_first(now: ClientRound) -> Offer:
    """The first neurons of every layer, as many as the client has capacity for."""
    return Offer(first_neurons(now.neurons, now.capacity, now.capacities))


class NormPerWidth(nn.Module):
    """A batch norm with statistics for each width, one row each, and shared weights.

    It is judged at its last width; to train, plain norms replace it (``plain``).
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: BatchNorm, num_widths: int) -> None:
        super().__init__()
        self.kind, self.eps, self.momentum = type(norm), norm.eps, norm.momentum
        self.weight, self.bias = norm.weight, norm.bias
        for name in STATISTICS:
            values = getattr(norm, name)
            rows = values.expand(num_widths, *values.shape).clone()
            self.register_buffer(name, rows)

    def forward(self, x: Tensor) -> Tensor:
        """The norm at the widest of its widths."""
        mean, var = self.running_mean[-1], self.running_var[-1]
        return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)

    def plain(self) -> BatchNorm:
        """A plain batch norm: this one at its full width."""
        width = self.running_mean.shape[1]
        has_weights = self.weight is not None
        norm = self.kind(width, self.eps, self.momentum, affine=has_weights)
        norm.weight, norm.bias = self.weight, self.bias
        for name in STATISTICS:
            setattr(norm, name, getattr(self, name)[-1].clone())
        return norm.train(self.training)


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def norms_per_width(
    model: nn.Module,
    neurons: Neurons,
    capacities: tuple[Fraction, ...],
    example: Tensor,
) -> tuple[nn.Module, Neurons]:
    """The model with statistics for each width in its batch norms."""
    norms = {
        path: layer
        for path, layer in model.named_modules()
        if type(layer) in BATCH_NORMS and layer.running_mean is not None
    }
    if len(capacities) == 1 or not norms:
        return model, neurons
    _replace(model, {n: NormPerWidth(n, len(capacities)) for n in norms.values()})
    names = [f"{path}.{name}".lstrip(".") for path in norms for name in STATISTICS]
    shapes = {
        name: (len(capacities), *shape) if name in names else shape
        for name, shape in neurons.shapes.items()
    }
    groups = tuple(
        replace(
            group,
            axes=tuple(
                replace(axis, dim=1) if axis.tensor in names else axis
                for axis in group.axes
            ),
        )
        for group in neurons.groups
    )
    rows = NeuronGroup(WIDTHS, len(capacities), tuple(Axis(n, dim=0) for n in names))
    return model, replace(neurons, groups=(*groups, rows), shapes=shapes)


def _replace(model: nn.Module, layers: Mapping[nn.Module, Any]) -> None:
    """Replace layers by others, wherever they are used."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in layers:
                parent.register_module(name, layers[child])


@dataclass(frozen=True)
class Slice:
    """A client's model at one width, with plain norms, and its place in the model."""

    model: nn.Module
    where: Blocks
    norms: Mapping[str, BatchNorm]  # the plain norms, by their path

    @classmethod
    def of(cls, now: ClientRound, local: LocalTraining, p: Fraction) -> "Slice":
        """The slice of width p."""
        first = first_neurons(now.neurons, p, now.capacities)
        active = {name: torch.arange(len(first[name])) for name in local.active}
        model = slim_model(local.model, local.neurons, active)
        plain: dict[nn.Module, BatchNorm] = {
            layer: layer.plain()
            for layer in model.modules()
            if isinstance(layer, NormPerWidth)
        }
        paths = {path: plain[n] for path, n in model.named_modules() if n in plain}
        _replace(model, plain)
        shapes = {name: tuple(t.shape) for name, t in named_tensors(local.model)}
        return cls(model, local.neurons.blocks(active, shapes), paths)

    @contextmanager
    def training(self, settings: TrainSettings) -> Iterator[list[Tensor]]:
        """Inside, all of the slice trains, by the same steps as any model."""
        table = Neurons(groups=(), shapes={})
        with partial_training(
            self.model.train(),
            table,
            {},
            settings.gradient,
            saves=settings.saves,
            kernels=settings.kernels,
        ) as trainable:
            yield trainable


def ordered_epochs(turn: Turn, local: LocalTraining, distills: bool) -> Trained:
    """Local epochs in which a width is drawn for each batch, and that slice trains."""
    now, settings = turn.now, local.settings
    if len(now.capacities) == 1:
        return local_epochs(turn, local)
    slices = [Slice.of(now, local, p) for p in now.capacities if p <= now.capacity]
    widths = stream(now.seed, "widths", now.round, now.client)
    mean, loss = RunningMean(), local.loss
    with ExitStack() as stack:
        stack.enter_context(local.dropout())
        trainable = [stack.enter_context(each.training(settings)) for each in slices]
        optimizer = make_optimizer(trainable[-1], settings)
        for _ in range(settings.epochs):
            for x, y in local.batches():
                chosen = slices[int(widths.integers(len(slices)))]
                optimizer.zero_grad()
                value = _backward(chosen, slices[-1], x, y, loss, distills)
                take_step(optimizer, settings)
                mean.add(value, local.task.count(y))
            mean.check(settings)
    _write_back(local.model, slices)
    state = state_of(local.model)
    return Trained(mean.value, sent=state, own=state)


def _backward(
    chosen: Slice, widest: Slice, x: Tensor, y: Tensor, loss_of: Loss, distills: bool
) -> Tensor:
    """Leave a batch's gradient in the widest slice; return the loss on labels."""
    if chosen is widest or distills:
        scores = widest.model(x)
        by_labels = loss_of(scores, y)
        by_labels.backward()
    if chosen is not widest:
        whole = dict(widest.model.named_parameters())
        part = dict(chosen.model.named_parameters())
        with torch.no_grad():
            for name, values in part.items():
                values.copy_(take(whole[name], chosen.where[name]))
                values.grad = None
        if distills:
            target = scores.detach().softmax(1)
            loss = F.cross_entropy(chosen.model(x), target)
        else:
            loss = loss_of(chosen.model(x), y)
        loss.backward()
        for name, values in part.items():
            if values.grad is not None:
                grad = whole[name].grad
                if grad is None:
                    grad = whole[name].grad = torch.zeros_like(whole[name])
                grad[mesh(grad, chosen.where[name])] += values.grad
    return by_labels if distills or chosen is widest else loss


def _write_back(model: nn.Module, slices: Sequence[Slice]) -> None:
    """Copy the widest slice's weights and all slices' statistics into the model."""
    trained = slices[-1].model.named_parameters()
    load_state(model, {name: values.detach() for name, values in trained})
    for row, each in enumerate(slices):
        for path, norm in each.norms.items():
            whole = dict(model.get_submodule(path).named_buffers())
            for name, values in norm.named_buffers():
                columns = each.where[f"{path}.{name}"][1:]
                put(whole[name][row], columns, values)


def fjord_original(options: FjordOptions) -> Method:
    """Ordered dropout, with distillation if asked."""
    distills = options.distillation
    return replace(
        fjord,
        reading="original",
        in_words=(
            "the first neurons of every layer, a fraction p",
            "in each batch the first neurons at a width drawn up to p",
            "nothing between rounds",
            "the first neurons of the global model, with that width's norm statistics",
        ),
        offer=offer_first,
        train=partial(ordered_epochs, distills=distills),
        remodel=norms_per_width,
        # Distillation turns outputs of the full width into class probabilities.
        tasks=frozenset({"classification"}) if distills else None,
    )
