"""Means and their 95 % intervals."""

from collections.abc import Sequence
from math import sqrt

# Student's t, two-sided 95 %, for 1, 2, … degrees of freedom.
_T95 = (
    *(12.706, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def half_interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % interval (Student's t); None for one value."""
    n = len(values)
    if n < 2:
        return None
    middle = mean(values)
    variance = sum((value - middle) ** 2 for value in values) / (n - 1)
    return _t95(n - 1) * sqrt(variance / n)


def _t95(freedom: int) -> float:
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return 1.95996 + 2.3723 / freedom + 2.8225 / freedom**2  # expansion for large n
