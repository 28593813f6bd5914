"""Every client trains its own full model alone: the anchor without any exchange."""

from fedspu.methods.method import Method

local = Method(
    name="local",
    reference="every client alone",
    in_words=("nothing", "the full model", "a full model of its own", "its own model"),
    judged_by="own",
    offer=None,
)
