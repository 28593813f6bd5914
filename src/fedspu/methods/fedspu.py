"""FedSPU: random neurons train each round; the others stay frozen and personal.

Niu, Dong and Qin, "FedSPU: Personalized Federated Learning for Resource-Constrained
Devices with Stochastic Parameter Update", AAAI 2025. It follows the paper
throughout.
"""

from fedspu.methods.method import Method, random_neurons

fedspu = Method(
    name="fedspu",
    reference="Niu, Dong and Qin, AAAI 2025",
    in_words=(
        "a random fraction p of every layer's neurons, new each round",
        "those neurons; the others are frozen",
        "a full model of its own",
        "its own model",
    ),
    judged_by="own",
    offer=random_neurons,
)
