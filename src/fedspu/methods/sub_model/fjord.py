"""FjORD as the FedSPU paper has it: a client trains each layer's first neurons.

Horváth et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets
with Ordered Dropout", NeurIPS 2021. The server prunes "in a fixed right-to-left order",
so a client of capacity p always trains the first floor(p n) neurons, and is judged by
that slice of the global model. ``fjord_original.py`` has what FjORD's own paper says.
"""

from fedspu.methods.method import ClientRound, Method, Offer
from fedspu.neurons.choose import choose_ordered
from fedspu.neurons.slim import slimmable


def first_neurons(now: ClientRound) -> Offer:
    """The first neurons of every layer, as many as the client has capacity for."""
    return Offer(slimmable(now.neurons, choose_ordered(now.neurons, now.capacity)))


fjord = Method(
    name="fjord",
    reference="Horváth et al., NeurIPS 2021",
    in_words=(
        "the first neurons of every layer, a fraction p",
        "those neurons",
        "nothing between rounds",
        "the first neurons of the global model",
    ),
    judged_by="slice",
    offer=first_neurons,
    is_slim=True,
)
