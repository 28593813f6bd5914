"""The epsilon of a run, by the accountant of dp-accounting, an optional library."""

from importlib.util import find_spec

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
    Two runs are neighbours if all updates of one client are zero in one of them.
    """
    check_installed()
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp.GaussianDpEvent(noise), turns)
    return float(accountant.get_epsilon(delta))
