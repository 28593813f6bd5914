"""Every client trains its own full model alone: the anchor without any exchange."""

from fedspu.methods.method import (
    Method,
    nothing,
    own_model,
    own_state,
    what_was_offered,
)

local = Method(
    name="local",
    reference="every client alone",
    offer=nothing,
    start=own_state,
    keep=what_was_offered,
    judge=own_model,
    keeps_own=True,
    in_words=(
        "nothing",
        "the full model",
        "a full model of its own",
        "its own model",
    ),
)
