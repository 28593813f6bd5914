"""FedRolex: sub-models by capacity that roll over the layers' neurons, round by round.

Alam, Liu, Yan and Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling
Sub-Model Extraction", NeurIPS 2022. In round t a client of capacity p trains the
neurons t - 1, t, … of every layer, floor(p n) of them, and wraps around after the last
one, so every neuron is trained equally often. No client has a model of its own.

Taken from the paper: all of that; the neurons move one step each round. Assumed: a
client's p is its capacity; clients are judged by the global model, as in federated
dropout, since no slice of it is theirs.
"""

import torch

from fedspu.methods.method import ClientRound, Method, Offer
from fedspu.neurons.choose import num_active
from fedspu.neurons.slim import slimmable


def rolling_sub_model(now: ClientRound) -> Offer:
    """Neighbouring neurons of every layer, starting one further each round."""
    active = {
        group.name: (
            (now.round - 1 + torch.arange(num_active(now.capacity, group.size)))
            % group.size
        )
        .sort()
        .values
        for group in now.neurons.groups
    }
    return Offer(slimmable(now.neurons, active))


fedrolex = Method(
    name="fedrolex",
    reference="Alam, Liu, Yan and Zhang, NeurIPS 2022",
    reading="original",
    in_words=(
        "a fraction p of neighbouring neurons of every layer, one further each round",
        "the sub-model",
        "nothing between rounds",
        "the global model",
    ),
    judged_by="global",
    offer=rolling_sub_model,
    is_slim=True,
)
