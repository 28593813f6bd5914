"""FedSPU: random neurons train each round; the others stay frozen and personal.

Niu, Dong and Qin, "FedSPU: Personalized Federated Learning for Resource-Constrained
Devices with Stochastic Parameter Update", AAAI 2025. Departs from the paper nowhere.
"""

from fedspu.methods.method import (
    Method,
    own_model,
    random_neurons,
    what_was_offered,
)
from fedspu.neurons.blocks import merge

fedspu = Method(
    name="fedspu",
    reference="Niu, Dong and Qin, AAAI 2025",
    offer=random_neurons,
    start=merge,
    keep=what_was_offered,
    judge=own_model,
    keeps_own=True,
    in_words=(
        "a random fraction p of every layer's neurons, new each round",
        "those neurons; the others are frozen",
        "a full model of its own",
        "its own model",
    ),
)
