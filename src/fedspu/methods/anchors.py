"""Three anchors that every comparison needs: no exchange, full exchange, a small model.

``local``: every client trains its own full model alone.
``fedavg``: McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017: the full model for all, whatever their capacity.
With ``method.finetune`` a client trains the global model on its own examples for so
many epochs before it is used or judged: the strongest simple rival of personal models.
What that costs comes on top of the costs reported, which are those of the rounds.
``small``: federated averaging of the one model that all clients can train: the first
neurons of w0, as many as the weakest has capacity for.
"""

from dataclasses import replace
from fractions import Fraction

from torch import Tensor, nn

from fedspu.core.active import choose_ordered
from fedspu.core.blocks import merge
from fedspu.core.neurons import Neurons
from fedspu.core.slim import slim_model, slim_neurons, slimmable
from fedspu.methods.method import (
    Lesson,
    Method,
    all_neurons,
    global_model,
    local_epochs,
    nothing,
    own_model,
    own_state,
    what_was_offered,
)

local = Method(
    name="local",
    reference="every client alone",
    offer=nothing,
    start=own_state,
    keep=what_was_offered,
    judge=own_model,
    keeps_own=True,
    in_words=(
        "nothing",
        "the full model",
        "a full model of its own",
        "its own model",
    ),
)


def finetune(lesson: Lesson) -> None:
    """Train on the client's own examples for ``method.finetune`` epochs."""
    epochs = lesson.now.options.finetune
    local_epochs(replace(lesson, recipe=replace(lesson.recipe, epochs=epochs)))


fedavg = Method(
    name="fedavg",
    reference="McMahan et al., AISTATS 2017",
    offer=all_neurons,
    start=merge,
    keep=what_was_offered,
    judge=global_model,
    adapt=finetune,
    keeps_own=False,
    options=frozenset({"finetune"}),
    in_words=(
        "the full model, whatever the client's capacity",
        "the full model",
        "nothing between rounds",
        "the global model; fine-tuned if method.finetune says how long",
    ),
)


def smallest(
    model: nn.Module,
    neurons: Neurons,
    capacities: tuple[Fraction, ...],
    example: Tensor,
) -> tuple[nn.Module, Neurons]:
    """The model's first neurons, at the width that the weakest client can train."""
    active = slimmable(neurons, choose_ordered(neurons, min(capacities)))
    return slim_model(model, neurons, active), slim_neurons(neurons, active)


small = replace(
    fedavg,
    name="small",
    reference="federated averaging of a smaller model",
    adapt=None,
    remodel=smallest,
    options=frozenset(),
    in_words=(
        "a small model: the first neurons, at the lowest capacity of all",
        "the small model",
        "nothing between rounds",
        "the global model, which is small",
    ),
)
