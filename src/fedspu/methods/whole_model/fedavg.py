"""Federated averaging: the full model for all clients, whatever their capacity.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017. One of the anchors that every comparison needs. With
``method.finetune`` a client trains the global model on its own examples for that many
epochs before the model is used or judged: the strongest simple rival of personal
models. The costs reported are those of the rounds; they do not include fine-tuning.
"""

from functools import partial

from fedspu.methods.method import Method, Which, all_neurons
from fedspu.methods.options import FedAvgOptions
from fedspu.training.epochs import LocalTraining, train


def finetune(local: LocalTraining, which: Which, epochs: int) -> None:
    """Train on the client's own examples; the server's model is left as it is."""
    if which == "personal":
        train(local.with_epochs(epochs))


def fedavg(options: FedAvgOptions) -> Method:
    """FedAvg, with fine-tuning if asked."""
    epochs = options.finetune
    return Method(
        name="fedavg",
        reference="McMahan et al., AISTATS 2017",
        in_words=(
            "the full model, whatever the client's capacity",
            "the full model",
            "nothing between rounds",
            "the global model; fine-tuned if method.finetune is set",
        ),
        judged_by="global",
        offer=all_neurons,
        ready=partial(finetune, epochs=epochs) if epochs else None,
    )
