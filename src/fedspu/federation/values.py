"""A metric's two values; apart from all else, as it needs no PyTorch."""

from typing import NamedTuple


class Values(NamedTuple):
    """The task's metric on test and on validation examples: a client's, or a mean."""

    test: float
    val: float
