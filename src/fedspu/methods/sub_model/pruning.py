"""For methods whose clients score their neurons once, and keep the best for good.

At its first participation a client gets the whole model and trains it for one epoch, on
its own examples and in a random stream of its own. That only scores the neurons: the
weights it ends with are thrown away, but its time and memory are counted. The client
cuts what it was sent to the top-scored fraction p of every layer, trains that slim
model as usual, and returns it. From then on it is sent only those neurons. A client
that keeps everything has nothing to score.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedspu.methods.method import ClientRound, Method, ModelState, Offer, Turn
from fedspu.neurons.choose import choose_top, num_active
from fedspu.neurons.scores import score_neurons
from fedspu.neurons.slim import slimmable
from fedspu.neurons.table import Active
from fedspu.training.epochs import check_finite, train

Scores = Mapping[str, Tensor]
"""Group name -> a score for each of its neurons."""

Score = Callable[[Turn], Scores]
"""Scores a client's neurons."""


def what_it_kept(now: ClientRound) -> Offer:
    """The neurons the client kept; all of them at first, so that it can choose."""
    return Offer(now.neurons.everything() if now.kept is None else now.kept)


def top_scored(turn: Turn, score: Score) -> Active:
    """What the client kept before; at first, the top-scored neurons."""
    if turn.memory.own is not None and turn.memory.own.active is not None:
        return turn.memory.own.active
    now = turn.now
    groups = now.neurons.groups
    if all(num_active(now.capacity, g.size) == g.size or not g.slim for g in groups):
        return now.neurons.everything()
    scores = score(turn)
    return slimmable(now.neurons, choose_top(now.neurons, now.capacity, scores))


def score_by(turn: Turn, of: Literal["weights", "gradients"], order: int) -> Scores:
    """Each neuron's score after a scoring epoch: an l1 or l2 norm (``order``).

    It is that of the neuron's weights after the epoch, or of their gradients summed
    over the epoch.
    """
    local = turn.prepare(ModelState(turn.merged), "scoring").with_epochs(1)
    parameters = dict(local.model.named_parameters())
    summed = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def add_gradients() -> None:
        for name, parameter in local.model.named_parameters():
            if parameter.grad is not None:
                summed[name] += parameter.grad

    train(local, after_backward=add_gradients)
    weights = {name: p.detach() for name, p in local.model.named_parameters()}
    values = weights if of == "weights" else summed
    check_finite(values, local.settings)
    return score_neurons(local.model, local.neurons, values, order)


def keeps_best(name: str, reference: str, score: Score, in_words: str) -> Method:
    """A method whose clients keep their best neurons; ``in_words`` says by what."""
    return Method(
        name=name,
        reference=reference,
        in_words=(
            "the full model once; then the neurons the client kept",
            f"a fraction p of every layer, chosen once, by {in_words} after an epoch "
            "of full training",
            "its sub-model",
            "its own sub-model",
        ),
        judged_by="own",
        offer=what_it_kept,
        keep=partial(top_scored, score=score),
        is_slim=True,
        is_choice=True,
    )
