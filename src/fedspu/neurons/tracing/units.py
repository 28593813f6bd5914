"""Neurons by where they lie: those along the same axes are found together."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Place = tuple[str, int]
"""A tensor and one of its axes."""


@dataclass(frozen=True)
class Units:
    """Neurons along the same axes, each with equally many positions on an axis.

    ``rows`` has an array for each axis, with the sorted positions of a neuron in each
    row. ``reason`` says why they must always be active, if they must.
    """

    axes: tuple[Place, ...]
    rows: tuple[np.ndarray, ...]
    reason: str = ""


def collect(
    classes: Mapping[Place, np.ndarray], makers: np.ndarray, reasons: Mapping[int, str]
) -> list[Units]:
    """All neurons, in the order of the places where they are met first.

    ``classes`` has the class of each position on each axis. A class is a neuron if it
    is among ``makers``.
    """
    axes = list(classes)
    lengths = [len(found) for found in classes.values()]
    owner = np.concatenate([*classes.values(), np.arange(0)])
    axis = np.repeat(np.arange(len(axes)), lengths)
    position = np.concatenate([*map(np.arange, lengths), np.arange(0)])
    order = np.argsort(owner, kind="stable")
    order = order[np.isin(owner[order], makers)]
    owner, axis, position = owner[order], axis[order], position[order]

    # A stretch: all positions of one neuron on one axis.
    starts = np.flatnonzero(_is_new(owner) | _is_new(axis))
    counts = np.diff(starts, append=len(owner))
    stretches = np.stack([axis[starts], counts], axis=1)
    firsts = np.flatnonzero(_is_new(owner[starts]))
    ends = np.append(firsts, len(starts))[1:]
    alike: dict[tuple[bytes, str], list[int]] = defaultdict(list)
    for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
        reason = reasons.get(int(owner[starts[first]]), "")
        alike[stretches[first:end].tobytes(), reason].append(first)

    found = []
    for (signature, reason), members in alike.items():
        along, widths = np.frombuffer(signature, stretches.dtype).reshape(-1, 2).T
        at = starts[members]
        at = at[np.argsort(position[at])]
        rows = position[at[:, None] + np.arange(widths.sum())]
        met_first = (int(along[0]), int(rows[0, 0]))
        parts = np.split(rows, np.cumsum(widths)[:-1], axis=1)
        found.append(
            (met_first, Units(tuple(axes[a] for a in along), (*parts,), reason))
        )
    return [units for _, units in sorted(found, key=lambda entry: entry[0])]


def _is_new(values: np.ndarray) -> np.ndarray:
    """Whether each value differs from the one before."""
    is_new = np.ones(len(values), dtype=bool)
    is_new[1:] = values[1:] != values[:-1]
    return is_new
