"""The laws that every method must obey.

Each law is a function of a case, which is a method on some model and data. If the
method breaks the law, it raises a Violation that says what was found instead.
"""

from fedspu.conformance.laws import (  # each adds its laws, in this order
    averaging,
    messages,
    participation,
    sameness,
)
from fedspu.conformance.laws.law import LAWS, Law, Violation

__all__ = [
    "LAWS",
    "Law",
    "Violation",
    "averaging",
    "messages",
    "participation",
    "sameness",
]
