"""Tells services that went away from requests that failed."""

import time
from collections.abc import Callable

# A node that is restarted or too busy for a moment answers again long before.
_GONE_S = 15.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Outage:
    """One service's silence: everything that was asked of it since the last answer was UNAVAILABLE."""

    def __init__(self, service: str, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = f"{service} at {address}"
        self._clock = clock
        self._first_s: float | None = None
        self._last_s = 0.0

    def answered(self) -> None:
        """It is there."""
        self._first_s = None

    def unavailable(self) -> None:
        """It did not answer this time."""
        self._last_s = self._clock()
        if self._first_s is None:
            self._first_s = self._last_s

    @property
    def pause_s(self) -> float:
        """How long to wait before asking again; 0 while it answers, more the longer it does not."""
        if self._first_s is None:
            return 0.0
        return min(_FIRST_PAUSE_S + (self._last_s - self._first_s) / 4, _LONGEST_PAUSE_S)

    @property
    def reason(self) -> str:
        """Why nothing more can be asked of it; empty while it may come back."""
        if self._first_s is None or self._last_s - self._first_s < _GONE_S:
            return ""
        return f"the service went away: {self._name} has been unavailable for {_GONE_S:g} s"
