"""Federated dropout: a random sub-model for each client, new each round.

Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018; "Random Dropout" in the FedSPU paper. The server sends random
neurons of every layer as a dense, smaller model; the client trains that, and the server
averages what was trained. No client has a model of its own.

Taken from the paper: all of that. Left out: its compression of what is sent. Assumed: a
client's p is its capacity (the paper has one p for all), each client draws its own
neurons, and activations are not scaled up in the smaller model, as the paper does not
mention that.
"""

from fedspu.methods.method import ClientRound, Method, Offer, random_neurons
from fedspu.neurons.slim import slimmable


def random_sub_model(now: ClientRound) -> Offer:
    """Random neurons, new each round; whole layers where a slim model needs them."""
    drawn = random_neurons(now)
    return Offer(slimmable(now.neurons, drawn.active), drawn.key)


feddrop = Method(
    name="feddrop",
    reference="Caldas et al., 2018",
    in_words=(
        "a random sub-model: a fraction p of every layer's neurons, new each round",
        "the sub-model",
        "nothing between rounds",
        "the global model",
    ),
    judged_by="global",
    offer=random_sub_model,
    is_slim=True,
)
