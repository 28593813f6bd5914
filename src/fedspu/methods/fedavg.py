"""Federated averaging: the full model for all clients, whatever their capacity.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017. One of the anchors that every comparison needs. With
``method.finetune`` a client trains the global model on its own examples for that many
epochs before the model is used or judged: the strongest simple rival of personal
models. What that costs is not among the costs reported, which are those of the rounds.
"""

from dataclasses import replace

from fedspu.methods.method import (
    Lesson,
    Method,
    all_neurons,
    global_model,
    local_epochs,
    what_was_offered,
)
from fedspu.neurons.blocks import merge


def finetune(lesson: Lesson) -> None:
    """Train on the client's own examples for ``method.finetune`` epochs."""
    epochs = lesson.now.options.finetune
    local_epochs(replace(lesson, recipe=replace(lesson.recipe, epochs=epochs)))


fedavg = Method(
    name="fedavg",
    reference="McMahan et al., AISTATS 2017",
    offer=all_neurons,
    start=merge,
    keep=what_was_offered,
    judge=global_model,
    adapt=finetune,
    keeps_own=False,
    options=frozenset({"finetune"}),
    in_words=(
        "the full model, whatever the client's capacity",
        "the full model",
        "nothing between rounds",
        "the global model; fine-tuned if method.finetune says how long",
    ),
)
