"""Two anchors that every comparison needs: no exchange at all, and full exchange.

``local``: every client trains its own full model alone.
``fedavg``: McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017: the full model for all, whatever their capacity.
"""

from fedspu.core.blocks import merge
from fedspu.methods.method import (
    Method,
    all_neurons,
    global_model,
    nothing,
    own_state,
    personal_model,
    what_was_offered,
)

local = Method(
    name="local",
    reference="every client alone",
    offer=nothing,
    start=own_state,
    keep=what_was_offered,
    judge=personal_model,
    keeps_own=True,
    in_words=(
        "nothing",
        "the full model",
        "a full model of its own",
        "its own model",
    ),
)

fedavg = Method(
    name="fedavg",
    reference="McMahan et al., AISTATS 2017",
    offer=all_neurons,
    start=merge,
    keep=what_was_offered,
    judge=global_model,
    keeps_own=False,
    in_words=(
        "the full model, whatever the client's capacity",
        "the full model",
        "nothing between rounds",
        "the global model",
    ),
)
