"""HeteroFL: the first neurons of every layer, averaged over the clients that hold them.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated
Learning for Heterogeneous Clients", ICLR 2021. It is not in the FedSPU paper, so
there is only the original reading. A client of capacity p trains the first neurons of
every layer, and

- divides the outputs of its hidden layers by p while it trains (the Scaler), so that
  they are as large as in the full model;
- leaves labels of which it has no example out of its loss (their scores count as zero),
  and neither trains nor returns their output rows;
- has norms without running statistics: they are computed on the client's own training
  examples when a model is judged.

The server's average gives every client the same weight, however many examples it has.

Taken from the paper and its authors' code: all of that. Assumed: floor(p n) neurons, as
everywhere in fedspu, where they round up; so the Scaler divides by the fraction of a
layer's neurons that is left, which is p in their networks; capacities are fixed; norm
statistics are computed in one pass and, like judging, without the Scaler. Only
convolutions, linear layers and embeddings are scaled. Where a model's output does not
come from a linear layer, all of the output layer is trained and returned.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from fedspu.methods.method import Trained, Turn, Which
from fedspu.methods.sub_model.fjord import first_neurons, fjord
from fedspu.neurons.average import average_by_clients
from fedspu.neurons.blocks import state_of
from fedspu.neurons.layers import kind_of
from fedspu.neurons.output_layer import output_layer
from fedspu.neurons.table import Active, Axis, NeuronGroup, Neurons
from fedspu.training.epochs import LocalTraining, cut, train

LABELS = "(labels)"
"""The group of the output rows, one for each label."""


def with_output_rows(
    model: nn.Module,
    neurons: Neurons,
    capacities: tuple[Fraction, ...],
    example: Tensor,
) -> tuple[nn.Module, Neurons]:
    """The same model; in its table, the rows of the output layer are a group.

    The output layer is a linear one whose output is what the model returns, and whose
    weight nothing else uses.
    """
    path = output_layer(model, example)
    if path is None:
        return model, neurons
    layer = model.get_submodule(path)
    names = [f"{path}.{name}".lstrip(".") for name in ("weight", "bias")]
    uses = sum(p is layer.weight for m in model.modules() for p in m.parameters(False))
    is_free = names[0] in neurons.shapes and not neurons.positions(names[0], 0)
    if uses == 1 and is_free:
        axes = tuple(Axis(name, dim=0) for name in names if name in neurons.shapes)
        rows = NeuronGroup(LABELS, neurons.shapes[names[0]][0], axes, slim=False)
        return model, replace(neurons, groups=(*neurons.groups, rows))
    return model, neurons


def its_own_labels(turn: Turn) -> Active:
    """What the client was sent; of the output, only the rows of labels it has."""
    active = dict(first_neurons(turn.now).active)
    if LABELS in active:
        active[LABELS] = turn.y.unique().cpu()
    return active


def scaled_epochs(turn: Turn, local: LocalTraining) -> Trained:
    """Local epochs with scaled activations and a loss over the client's own labels."""
    present, loss = local.y.unique(), local.loss

    def masked_loss(
        scores: Tensor, labels: Tensor, /, *, reduction: str = "mean"
    ) -> Tensor:
        is_absent = torch.ones(scores.shape[1], dtype=torch.bool, device=scores.device)
        is_absent[present] = False
        return loss(scores.masked_fill(is_absent, 0), labels, reduction=reduction)

    with _scaled(turn.now.neurons, local):
        value = train(local, masked_loss)
    state = state_of(local.model)
    return Trained(value, sent=state, own=state)


@contextmanager
def _scaled(full: Neurons, local: LocalTraining) -> Iterator[None]:
    """Inside, outputs of hidden layers are scaled up by full size / slim size."""
    sizes = {group.name: group.size for group in full.groups}
    parts: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for group in local.neurons.groups:
        for axis in group.axes:
            place = (axis.tensor, axis.dim)
            parts.setdefault(place, []).append((group.size, sizes[group.name]))

    def scaler(factor: float) -> Callable[..., Tensor]:
        return lambda layer, inputs, output: output * factor

    hooks = []
    for path, layer in local.model.named_modules():
        if isinstance(layer, SCALED):
            places = [
                (f"{path}.{name}".lstrip("."), dim)
                for name, dim in kind_of(layer).incoming(layer)
            ]
            found = next((parts[place] for place in places if place in parts), [])
            kept, size = sum(k for k, _ in found), sum(n for _, n in found)
            if kept < size:
                hooks.append(layer.register_forward_hook(scaler(size / kept)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


SCALED = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


@torch.no_grad()
def static_statistics(local: LocalTraining, which: Which) -> None:
    """Batch norms' statistics over the client's own training examples, in one pass."""
    model = local.model
    norms = [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        and layer.running_mean is not None
    ]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.train()
    for count, batch in enumerate(cut(local.x, local.settings.batch_size), start=1):
        for norm in norms:
            norm.momentum = 1 / count  # the plain mean over all batches
        model(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def statistics_of_norms(neurons: Neurons) -> frozenset[str]:
    """Running statistics do not travel; each client computes its own."""
    return neurons.statistics


heterofl = replace(
    fjord,
    name="heterofl",
    reference="Diao, Ding and Tarokh, ICLR 2021",
    reading="original",
    in_words=(
        "the first neurons of every layer, a fraction p",
        "those neurons, and of the output the labels it has; activations scaled by 1/p",
        "nothing between rounds",
        "the first neurons of the global model, norm statistics from its own examples",
    ),
    keep=its_own_labels,
    train=scaled_epochs,
    ready=static_statistics,
    stays=statistics_of_norms,
    combine=average_by_clients,
    remodel=with_output_rows,
    tasks=frozenset({"classification"}),
)
