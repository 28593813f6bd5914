"""The early-stopping rule (Algorithm 2, lines 11 to 15)."""

from collections.abc import Sequence
from itertools import pairwise


def blended_loss(train_loss: float, val_loss: float, blend: float) -> float:
    """Eq. 5: L = λ L_train + (1 - λ) L_test, with ``blend`` for λ."""
    return blend * train_loss + (1 - blend) * val_loss


def has_stopped(losses: Sequence[float], patience: int = 1) -> bool:
    """Whether a client with these losses, one per participation, stops now.

    It stops once the last ``patience`` losses each exceed, strictly, the one before; so
    never at its first participation.
    """
    if len(losses) <= patience:
        return False
    recent = losses[-patience - 1 :]
    return all(now > before for before, now in pairwise(recent))
