"""Finds stop strings in text that arrives in pieces, and lets nothing of them through.

The first string to be complete wins, and of those complete at the same place the longest: the same result as
looking after every single character, so it does not depend on how the text is cut into tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """`text` may be shown now. `stop_string` is set where one was found: nothing follows then."""

    text: str
    stop_string: str | None = None


class StopStringMatcher:
    """One request's stop strings; holds back only the longest end of the text that may become one."""

    def __init__(self, stop_strings: Sequence[str], *, include_stop_string: bool) -> None:
        assert all(stop_strings), "an empty stop string was refused at the edge"
        self._stop_strings = tuple(stop_strings)
        self._include_stop_string = include_stop_string
        self._max_length = max(map(len, stop_strings), default=0)
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> StopScan:
        """Take a piece of text; returns what is safe to show. Only if it `may_stop` can it complete any."""
        if not self._stop_strings or not text:
            return StopScan(text)
        num_before = len(self._held)
        text = self._held + text
        found = self._first_complete(text, num_before) if may_stop else None
        if found is not None:
            start, stop_string = found
            self._held = ""
            end = start + len(stop_string) if self._include_stop_string else start
            return StopScan(text[:end], stop_string)
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return StopScan(text[: len(text) - keep])

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str, num_before: int) -> tuple[int, str] | None:
        """Start and value of the stop string that ends first behind the first `num_before` characters.

        The longest of those that end together.
        """
        hits = [
            (start + len(s), start, s)
            for s in self._stop_strings
            if (start := text.find(s, max(0, num_before - len(s) + 1))) >= 0
        ]
        return min(hits)[1:] if hits else None

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._max_length - 1), 0, -1):
            end = text[-length:]
            if any(s.startswith(end) for s in self._stop_strings):
                return length
        return 0
