"""The four forms that a model's values and positions take."""

from dataclasses import dataclass

from torch import Tensor

State = dict[str, Tensor]
"""Parameter or buffer name -> its values."""

Active = dict[str, Tensor]
"""Neuron group name -> sorted indices of its active neurons."""

Blocks = dict[str, tuple[Tensor | None, ...]]
"""Tensor name -> sorted active positions along each axis; None means all of them."""

Payload = dict[str, Tensor]
"""Tensor name -> its active block, dense: the slim sub-model's state."""


@dataclass(frozen=True)
class Update:
    """What one client trained: where, to which values, on how many examples."""

    where: Blocks
    payload: Payload
    num_examples: int
