"""How long a worker may take for one client before it counts as dead."""

from math import inf

from fedspu.federation.messages import Request

LEAST = 60.0
"""Seconds that every turn may take, if no setting says otherwise."""

FIRST = 3600.0
"""The same, as long as no turn of its kind has ended."""

TIMES = 20
"""A turn may take this many times as long as the slowest so far, by its length."""


class Deadline:
    """The deadline of every turn, as set, or from what turns of its kind took.

    ``asked`` is the setting: None for a deadline from experience, 0 for none at all. As
    long as no turn of a kind has ended, there is no experience, but an hour's time.
    """

    def __init__(self, asked: float | None) -> None:
        self.asked = asked
        self._pace: dict[type[Request], float] = {}  # seconds by length, the slowest

    def note(self, request: Request, length: float, seconds: float) -> None:
        """A turn of this length has ended after so many seconds."""
        kind = type(request)
        self._pace[kind] = max(self._pace.get(kind, 0.0), seconds / length)

    def seconds(self, request: Request, length: float) -> float:
        """The seconds that a turn of this length may take."""
        if self.asked is not None:
            return self.asked or inf
        pace = self._pace.get(type(request))
        return FIRST if pace is None else max(LEAST, TIMES * pace * length)
