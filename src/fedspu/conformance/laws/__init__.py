"""The laws that every method obeys.

Each is one function of a case, a method on some model and data, and raises a Violation
that says what was found instead.
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
