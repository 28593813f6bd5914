"""HeteroFL: the first neurons of every layer, averaged over the clients that hold them.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated
Learning for Heterogeneous Clients", ICLR 2021. Not in the FedSPU paper; the original
reading alone. A client of capacity p trains the first neurons of every layer, and

- divides what its hidden layers give by p while it trains (the Scaler), so that what
  they pass on has the size it has in the full model;
- leaves the scores of labels it has no example of out of its loss (they count as zero),
  trains no output row of theirs, and returns none;
- has norms without running statistics: they are computed on the client's own training
  examples when a model is judged.

The server's average is over clients, not examples.

Taken from the paper and its authors' code: all of that. Assumed: floor(p n) neurons,
where they round up, as everywhere in fedspu; so the Scaler divides by the fraction of
a layer's neurons that is left, which is p in their networks; capacities are fixed;
statistics are computed as the model is judged, so without the Scaler, in one pass. Only
convolutions, linear layers and embeddings are scaled. All of the output layer is
trained and returned where a model's output is not that of a linear layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu.methods.fjord import first_of, fjord, slice_of_global
from fedspu.methods.method import Lesson, Offer, Own, Situation, local_epochs
from fedspu.neurons.scores import incoming
from fedspu.neurons.table import Active, Axis, NeuronGroup, Neurons
from fedspu.training import cut

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
    given: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, inputs, output, path=path: given.update({path: output})
        )
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    modes = {layer: layer.training for layer in model.modules()}
    try:
        with torch.no_grad():
            scores = model.eval()(example)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, mode in modes.items():
            layer.training = mode
    for path, output in given.items():
        layer = model.get_submodule(path)
        weight = f"{path}.weight".lstrip(".")
        uses = sum(
            p is layer.weight for m in model.modules() for p in m.parameters(False)
        )
        is_free = weight in neurons.shapes and not neurons.positions(weight, 0)
        if output is scores and uses == 1 and is_free:
            names = [f"{path}.{name}".lstrip(".") for name in ("weight", "bias")]
            axes = tuple(Axis(name, dim=0) for name in names if name in neurons.shapes)
            rows = NeuronGroup(LABELS, scores.shape[1], axes, slim=False)
            return model, replace(neurons, groups=(*neurons.groups, rows))
    return model, neurons


def its_own_labels(now: Situation, offer: Offer | None, own: Own) -> Active:
    """What the client was sent, of the output only the rows of labels it has."""
    active = dict(first_of(now).active)
    if LABELS in active:
        active[LABELS] = own.labels.unique().cpu()
    return active


def scaled_epochs(lesson: Lesson) -> float:
    """Local epochs with scaled activations and a loss over the client's own labels."""
    present = lesson.y.unique()

    def masked_loss(scores: Tensor, labels: Tensor) -> Tensor:
        is_absent = torch.ones(scores.shape[1], dtype=torch.bool, device=scores.device)
        is_absent[present] = False
        return F.cross_entropy(scores.masked_fill(is_absent, 0), labels)

    with _scaled(lesson):
        return local_epochs(lesson, masked_loss)


@contextmanager
def _scaled(lesson: Lesson) -> Iterator[None]:
    """Inside, hidden layers give more, by as much as they have fewer neurons."""
    sizes = {group.name: group.size for group in lesson.now.neurons.groups}
    parts: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for group in lesson.neurons.groups:
        for axis in group.axes:
            place = (axis.tensor, axis.dim)
            parts.setdefault(place, []).append((group.size, sizes[group.name]))

    def scaler(factor: float) -> Callable[..., Tensor]:
        return lambda layer, inputs, output: output * factor

    hooks = []
    for path, layer in lesson.model.named_modules():
        if isinstance(layer, SCALED):
            places = [
                (f"{path}.{name}".lstrip("."), dim) for name, dim in incoming(layer)
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
def static_statistics(lesson: Lesson) -> None:
    """Batch norms' statistics over the client's own training examples, in one pass."""
    norms = [
        layer
        for layer in lesson.model.modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        and layer.running_mean is not None
    ]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    lesson.model.eval()
    for norm in norms:
        norm.train()
    for count, batch in enumerate(cut(lesson.x, lesson.recipe.batch_size), start=1):
        for norm in norms:
            norm.momentum = 1 / count  # the plain mean over all batches
        lesson.model(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    lesson.model.eval()


heterofl = replace(
    fjord,
    name="heterofl",
    reference="Diao, Ding and Tarokh, ICLR 2021",
    reading="original",
    keep=its_own_labels,
    judge=slice_of_global,
    train=scaled_epochs,
    settle=static_statistics,
    remodel=with_output_rows,
    weighs_examples=False,
    sends_statistics=False,
    in_words=(
        "the first neurons of every layer, a fraction p",
        "those neurons, and of the output the labels it has; activations scaled by 1/p",
        "nothing between rounds",
        "the first neurons of the global model, norm statistics from its own examples",
    ),
)
