"""Federated dropout: a random sub-model for each client, new each round.

Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018; "Random Dropout" in the FedSPU paper. The server sends random
neurons of every layer as a dense, smaller model; the client trains that, and the server
averages what was trained. Nobody has a model of its own.

Taken from the paper: all of that. Left out: its compression of what is sent. Assumed: a
client's p is its capacity (there, one p for all), each client draws its own neurons,
and activations are not scaled up in the smaller model, of which the paper says nothing.
"""

from fedspu.methods.method import (
    Method,
    Offer,
    Situation,
    global_model,
    random_neurons,
    what_was_offered,
)
from fedspu.neurons.blocks import merge
from fedspu.neurons.slim import slimmable


def random_sub_model(now: Situation) -> Offer:
    """Random neurons, new each round; whole layers where a slim model needs them."""
    drawn = random_neurons(now)
    if all(group.slim for group in now.neurons.groups):
        return drawn
    return Offer(slimmable(now.neurons, drawn.active))


feddrop = Method(
    name="feddrop",
    reference="Caldas et al., 2018",
    offer=random_sub_model,
    start=merge,
    keep=what_was_offered,
    judge=global_model,
    keeps_own=False,
    is_slim=True,
    in_words=(
        "a random sub-model: a fraction p of every layer's neurons, new each round",
        "the sub-model",
        "nothing between rounds",
        "the global model",
    ),
)
