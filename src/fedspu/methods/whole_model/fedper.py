"""FedPer: the last layers stay with the client; the other layers are averaged.

Arivazhagan, Aggarwal, Singh and Choudhary, "Federated Learning with Personalization
Layers", 2019. Every client trains the full model, whatever its capacity: the base it
was sent, and a head of its own.

Taken from the paper: all of that. Assumed: the head is the last ``method.head`` layers
with weights, in the order in which the model registers them; a norm belongs to the
layer before it. Heads begin from w0. The server's model has no trained head, so it is
not judged.
"""

from functools import partial

from fedspu.methods.method import Method, all_neurons
from fedspu.methods.options import HeadOptions
from fedspu.training.last_layer import last_layers


def fedper(options: HeadOptions) -> Method:
    """FedPer with a head of ``options.head`` layers."""
    return Method(
        name="fedper",
        reference="Arivazhagan, Aggarwal, Singh and Choudhary, 2019",
        reading="original",
        in_words=(
            "the full model except its last layers, whatever the client's capacity",
            "the full model",
            "a full model of its own",
            "its own model",
        ),
        judged_by="own",
        offer=all_neurons,
        stays=partial(last_layers, number=options.head),
    )
