"""FedBN: normalisation layers stay with the client; the rest is averaged.

Li, Jiang, Zhang, Kamp and Dou, "FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization", ICLR 2021. Every client trains the full model, whatever its
capacity. Weights, biases and statistics of its norms are its own.

Taken from the paper: all of that. Assumed: norms of every kind stay, not only batch
norms. The server's model has no trained norms, so it is not judged.
"""

from fedspu.methods.method import Method, all_neurons
from fedspu.neurons.table import Neurons


def norms(neurons: Neurons) -> frozenset[str]:
    """All tensors of normalisation layers."""
    return neurons.norm_tensors


fedbn = Method(
    name="fedbn",
    reference="Li, Jiang, Zhang, Kamp and Dou, ICLR 2021",
    reading="original",
    in_words=(
        "the full model except its norms, whatever the client's capacity",
        "the full model",
        "a full model of its own",
        "its own model",
    ),
    judged_by="own",
    offer=all_neurons,
    stays=norms,
)
