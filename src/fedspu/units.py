"""Shares, sizes and time spans, as people write them."""

PAPER_GB = 1000 * 2**20
"""The paper's "GB" are 1000 x 2^20 bits (docs/paper.md, Table 3)."""


def percent(value: float | None) -> str:
    """A share as a percentage; a dash if there is none."""
    return "-" if value is None else f"{100 * value:.1f} %"


def shown(value: float | None, is_share: bool) -> str:
    """A metric's value: a share as a percentage, any other with four digits."""
    if value is None or is_share:
        return percent(value)
    return digits(value, 4)


def digits(value: float, number: int) -> str:
    """A value with this many digits; zeros at the end are kept: 1.000 for 1.0003."""
    return f"{value:#.{number}g}".removesuffix(".")


def titled(name: str) -> str:
    """A name from the records, with spaces instead of underscores."""
    return name.replace("_", " ")


def size(num_bytes: float) -> str:
    """A number of bytes in a readable unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """A time span in a readable form."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02} min"


def paper_gb(num_bytes: float) -> str:
    """A number of bytes in the unit of the paper's Table 3."""
    return digits(8 * num_bytes / PAPER_GB, 4)
