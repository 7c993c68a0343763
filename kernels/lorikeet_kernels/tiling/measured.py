"""Whether tiles are chosen from the measured tables or by the rules alone: one switch of the process.

Whoever builds an engine sets it, before the first kernel is chosen; the rules alone are for comparisons.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar


class Remembering(Protocol):
    """What functools.cache makes."""

    def cache_clear(self) -> None:
        """Forget all."""
        ...


Choose = TypeVar("Choose", bound=Remembering)


class MeasuredTables:
    """Owns the switch. Choices are remembered until it is turned."""

    def __init__(self) -> None:
        self._are_used = True
        self._forget: list[Callable[[], None]] = []

    @property
    def are_used(self) -> bool:
        """Whether a device's tables are read; otherwise every device is one that has none."""
        return self._are_used

    def use(self, *, wanted: bool) -> None:
        """Turn the switch. No kernel may be in the making meanwhile."""
        if wanted != self._are_used:
            self._are_used = wanted
            for forget in self._forget:
                forget()

    def decide(self, choose: Choose) -> Choose:
        """A decorator for cached functions whose answer depends on the tables: turned, it is asked anew."""
        self._forget.append(choose.cache_clear)
        return choose


MEASURED = MeasuredTables()
