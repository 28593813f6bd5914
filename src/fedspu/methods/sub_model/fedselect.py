"""FedSelect: a small sub-model that grows, by the neurons with the largest gradients.

Tamirisa et al., "FedSelect: Personalized Federated Learning with Customized Selection
of Parameters for Fine-Tuning", CVPR 2024, as the FedSPU paper compares with it: "all
clients start with a small sub-model and gradually expand it", from p = .25 to .5,
whatever their capacity. The original goes the other way: it starts with all parameters
shared, and the most changed ones turn personal, entry by entry.

Assumed, as the paper does not say: p grows evenly with the rounds; a client scores its
neurons anew, from the whole global model, whenever its p asks for more of them than it
has; it keeps those it has and adds the top-scored of the others.
"""

from dataclasses import replace
from fractions import Fraction
from functools import partial

import torch

from fedspu.methods.method import ClientRound, Offer, Turn
from fedspu.methods.sub_model.pruning import keeps_best, score_by
from fedspu.neurons.choose import choose_top, num_active
from fedspu.neurons.slim import slimmable
from fedspu.neurons.table import Active

FIRST, LAST = Fraction(1, 4), Fraction(1, 2)

by_gradients = partial(score_by, of="gradients", order=2)


def width(now: ClientRound) -> Fraction:
    """The fraction of neurons in this round: .25 in the first to .5 in the last."""
    return FIRST + (LAST - FIRST) * Fraction(now.round - 1, max(1, now.rounds - 1))


def has_all_it_needs(now: ClientRound, kept: Active | None) -> bool:
    """Whether a client's sub-model is as wide as this round asks for."""
    return kept is not None and all(
        len(kept[group.name]) >= num_active(width(now), group.size)
        for group in now.neurons.groups
    )


def what_it_kept_or_all(now: ClientRound) -> Offer:
    """The neurons the client kept; all of them when it has to choose more."""
    if now.kept is not None and has_all_it_needs(now, now.kept):
        return Offer(now.kept)
    return Offer(now.neurons.everything())


def growing(turn: Turn) -> Active:
    """What the client kept before, and the top-scored of the others."""
    now, own = turn.now, turn.memory.own
    kept = None if own is None else own.active
    if kept is not None and has_all_it_needs(now, kept):
        return kept
    ranked = dict(by_gradients(turn))
    for name, indices in (kept or {}).items():
        ranked[name] = ranked[name].index_fill(0, indices, torch.inf)
    return slimmable(now.neurons, choose_top(now.neurons, width(now), ranked))


fedselect = replace(
    keeps_best("fedselect", "Tamirisa et al., CVPR 2024", by_gradients, ""),
    in_words=(
        "the full model when the client has to choose; else the neurons it kept",
        "p = .25 of every layer, growing to .5 with the rounds, by the l2 norm of "
        "their gradient in an epoch of full training",
        "its sub-model",
        "its own sub-model",
    ),
    offer=what_it_kept_or_all,
    keep=growing,
    departs={"at_full_capacity_it_is_fedavg": "no client trains more than half"},
)
