"""Settings that one method has and others do not: ``method.<name>``.

A method with options is a function from them to its record. They stand here, away from
PyTorch, so that a wrong setting is refused before anything large is imported.
"""

from typing import Annotated

from pydantic import Field

from fedspu.settings import Count, Fraction01, Positive, Table, setting

Share = Annotated[float, Field(ge=0, le=1)]


class Options(Table):
    """The options of a method; none here."""


class FedAvgOptions(Options):
    """Of fedavg."""

    finetune: Annotated[int, Field(ge=0)] = setting(
        0, "Epochs of training on a client's own examples before the model is used."
    )


class FjordOptions(Options):
    """Of fjord as its own paper has it."""

    distillation: bool = setting(False, "Narrow slices learn from the full width.")


class DittoOptions(Options):
    """Of ditto."""

    pull: Positive = setting(
        1.0, "How strongly personal models are drawn to the global one (λ)."
    )


class APFLOptions(Options):
    """Of apfl."""

    mix: Share = setting(0.5, "The first share of a client's own weights (α).")
    adaptive: bool = setting(True, "The share is learned too.")


class HeadOptions(Options):
    """Of fedper and fedrep."""

    head: Count = setting(1, "How many of the last layers stay with the client.")


class FedRepOptions(HeadOptions):
    """Of fedrep."""

    head_epochs: Count | None = setting(
        None, "Epochs of the head, before one of the body; default: train.epochs - 1."
    )


class FedALAOptions(Options):
    """Of fedala."""

    layers: Count = setting(1, "How many of the last layers are mixed entry by entry.")
    share: Fraction01 = setting(0.8, "The share of examples the mix is learned on.")
    mix_lr: Positive = setting(1.0, "Learning rate of the mix (η).")
