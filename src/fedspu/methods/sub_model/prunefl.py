"""PruneFL: a client keeps the neurons with the largest gradients, by their l2 norm.

Jiang et al., "Model Pruning Enables Efficient Federated Learning on Edge Devices",
TNNLS 2022, as the FedSPU paper compares with it: each client prunes whole neurons,
once, to its own capacity. The original prunes single weights, by one mask for all
clients, which is reconfigured during training by the gain in loss per time.

Assumed: the gradient of a weight is summed over the batches of the scoring epoch, as
the original accumulates it, and the norm is taken of the sums.
"""

from functools import partial

from fedspu.methods.sub_model.pruning import keeps_best, score_by

prunefl = keeps_best(
    "prunefl",
    "Jiang et al., TNNLS 2022",
    score=partial(score_by, of="gradients", order=2),
    in_words="the l2 norm of their gradient",
)
