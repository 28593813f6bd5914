"""Settings that one method has and others do not: ``method.<name>``.

A method with options is a function from them to its record. They are in this file,
which does not import PyTorch, so that a wrong setting is refused at once.
"""

from typing import Annotated, Literal

from pydantic import Field

from fedspu.settings import Count, Fraction01, Positive, Table, setting

Share = Annotated[float, Field(ge=0, le=1)]


class Options(Table):
    """The options of a method; by default it has none."""


class FedSPUOptions(Options):
    """The options of fedspu."""

    context: Literal["own", "global"] = setting(
        "own",
        "What surrounds the neurons that train: the client's own model, as in the "
        "paper, or the server's, which is then sent whole in every round.",
    )


class FedAvgOptions(Options):
    """The options of fedavg."""

    finetune: Annotated[int, Field(ge=0)] = setting(
        0, "Epochs of training on a client's own examples before the model is used."
    )


class FjordOptions(Options):
    """The options of fjord in its original reading."""

    distillation: bool = setting(False, "Narrow slices learn from the full width.")


class DittoOptions(Options):
    """The options of ditto."""

    pull: Positive = setting(
        1.0, "How strongly personal models are pulled towards the global one (λ)."
    )


class APFLOptions(Options):
    """The options of apfl."""

    mix: Share = setting(0.5, "The share of a client's own weights at first (α).")
    adaptive: bool = setting(True, "Whether that share is learned too.")


class HeadOptions(Options):
    """The options of fedper, and some of fedrep's."""

    head: Count = setting(1, "How many of the last layers stay with the client.")


class FedRepOptions(HeadOptions):
    """The options of fedrep."""

    head_epochs: Count | None = setting(
        None, "Epochs of the head, before one of the body; default: train.epochs - 1."
    )


class FedALAOptions(Options):
    """The options of fedala."""

    layers: Count = setting(1, "How many of the last layers are mixed entry by entry.")
    share: Fraction01 = setting(0.8, "The share of examples the mix is learned on.")
    mix_lr: Positive = setting(1.0, "Learning rate of the mix (η).")
