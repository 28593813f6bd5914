"""FedMP: a client keeps the neurons with the largest weights, by their l1 norm.

Jiang et al., "FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous
Edge Computing", ICDE 2022, as the FedSPU paper compares with it: each client prunes
once, to its own capacity. In the original the server prunes, by a ratio that a bandit
chooses from round times; before it averages, it adds back what it had cut off.
"""

from functools import partial

from fedspu.methods.sub_model.pruning import keeps_best, score_by

fedmp = keeps_best(
    "fedmp",
    "Jiang et al., ICDE 2022",
    score=partial(score_by, of="weights", order=1),
    in_words="the l1 norm of their weights",
)
