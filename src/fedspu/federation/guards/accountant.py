"""The epsilon of a run, by dp-accounting, an optional library."""

from importlib.util import find_spec
from math import sqrt

from fedspu.errors import SettingsError, how_to_install


def check_installed() -> None:
    """Refuse noise whose epsilon could not be computed."""
    if find_spec("dp_accounting") is None:
        raise SettingsError(
            "guard.noise needs dp-accounting, which is not installed; install it with: "
            f"{how_to_install('privacy')}"
        )


def epsilon(noise: float, delta: float, turns: int) -> float:
    """The epsilon, at this delta, of a client that took part this many times.

    ``noise`` is the standard deviation of the noise over the sensitivity of the sum.
    So many Gaussian mechanisms, one after the other, are exactly as private as one with
    less noise, by the root of their number (Dong, Roth and Su, "Gaussian Differential
    Privacy", 2022, Corollary 3.3), whose epsilon has a formula (Balle and Wang, 2018).
    """
    check_installed()
    if not turns:
        return 0.0
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(noise / sqrt(turns), delta))
