"""A small model for everyone: federated averaging at the weakest client's width.

One of the anchors that every comparison needs. The model is the first neurons of w0, as
many as the weakest client has capacity for.
"""

from fractions import Fraction

from torch import Tensor, nn

from fedspu.methods.method import Method, all_neurons
from fedspu.neurons.choose import choose_ordered
from fedspu.neurons.slim import slim_model, slim_neurons, slimmable
from fedspu.neurons.table import Neurons


def smallest(
    model: nn.Module,
    neurons: Neurons,
    capacities: tuple[Fraction, ...],
    example: Tensor,
) -> tuple[nn.Module, Neurons]:
    """The model's first neurons, at the width that the weakest client can train."""
    active = slimmable(neurons, choose_ordered(neurons, min(capacities)))
    return slim_model(model, neurons, active), slim_neurons(neurons, active)


small = Method(
    name="small",
    reference="federated averaging of a smaller model",
    in_words=(
        "a small model: the first neurons, at the lowest capacity of all",
        "the small model",
        "nothing between rounds",
        "the global model, which is small",
    ),
    judged_by="global",
    offer=all_neurons,
    remodel=smallest,
)
