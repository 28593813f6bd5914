"""Pick a fraction p of every neuron group: at random, the first, or the best."""

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from fedspu.errors import ModelError, SettingsError
from fedspu.neurons.table import Active, Neurons

P = float | int | str | Fraction
"""A fraction of neurons as a user gives it."""


def as_fraction(p: P) -> Fraction:
    """The decimal the user typed, exactly: in binary, 0.7 * 90 is less than 63."""
    try:
        exact = p if isinstance(p, Fraction) else Fraction(str(p))
    except (ValueError, ZeroDivisionError):
        raise SettingsError(f"p = {p!r}: expected a number in (0, 1]") from None
    if not 0 < exact.numerator <= exact.denominator:
        raise SettingsError(f"p = {p}: expected a number in (0, 1]")
    return exact


def num_active(p: P, size: int) -> int:
    """How many neurons of a group of ``size`` are active: floor(p n), at least one."""
    # A group with no active neuron would cut a sub-model in two.
    exact = as_fraction(p)
    return max(1, exact.numerator * size // exact.denominator)


def choose_random(neurons: Neurons, p: P, rng: np.random.Generator) -> Active:
    """A uniformly random fraction ``p`` of every group (paper, step 1)."""
    if not isinstance(rng, np.random.Generator):
        raise SettingsError(
            f"rng = {rng!r}: expected a generator of NumPy, like "
            "np.random.default_rng(0)"
        )
    active = {}
    for group in neurons.groups:
        chosen = rng.permutation(group.size)[: num_active(p, group.size)]
        active[group.name] = torch.from_numpy(np.sort(chosen))
    return active


def choose_ordered(neurons: Neurons, p: P) -> Active:
    """The first neurons of every group: a fraction ``p`` of them."""
    return {
        group.name: torch.arange(num_active(p, group.size)) for group in neurons.groups
    }


def choose_top(neurons: Neurons, p: P, scores: Mapping[str, Tensor]) -> Active:
    """A fraction ``p`` of every group: the highest scores; of equals, the first."""
    active = {}
    for group in neurons.groups:
        if group.name not in scores or len(scores[group.name]) != group.size:
            raise ModelError(
                f"scores of group {group.name}: expected {group.size} numbers, one per "
                "neuron"
            )
        ranked = scores[group.name].argsort(descending=True, stable=True)
        active[group.name] = ranked[: num_active(p, group.size)].sort().values
    return active
