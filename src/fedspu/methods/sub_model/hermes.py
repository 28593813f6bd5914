"""Hermes: a client keeps the neurons with the largest weights, by their l2 norm.

Li et al., "Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile
Clients", MobiCom 2021, as the FedSPU paper compares with it: each client prunes
once, to its own capacity. The original prunes step by step when the validation accuracy
allows, and averages only what sub-networks share; no code of its authors was found.
"""

from functools import partial

from fedspu.methods.sub_model.pruning import keeps_best, score_by

hermes = keeps_best(
    "hermes",
    "Li et al., MobiCom 2021",
    score=partial(score_by, of="weights", order=2),
    in_words="the l2 norm of their weights",
)
