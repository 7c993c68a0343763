"""Whether what was measured on devices decides, or rules alone: one switch of the process.

Measured are the tables of tiles and all that names devices: where specialized warps, routers in parts,
projected prompts and LoRA beside the base are the faster ways. Without, every device is one that nobody
measured; what a device can do at all is no measurement. Whoever builds an engine sets it, before the first
kernel is chosen, and keeps it as long as the engine lives; the rules alone are for comparisons.
"""

import weakref
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
        self._users: list[weakref.ref[object]] = []

    @property
    def are_used(self) -> bool:
        """Whether a device's tables are read; otherwise every device is one that has none."""
        return self._are_used

    def name(self, device: str) -> str:
        """How `device` is called where measurements are filed; a name of none where they do not decide."""
        return device if self._are_used else ""

    def use(self, *, wanted: bool) -> None:
        """Turn the switch. No kernel may be in the making meanwhile.

        Raises:
            RuntimeError: something was compiled for the other way, and lives; nothing was turned.
        """
        if wanted == self._are_used:
            return
        if any(user() is not None for user in self._users):
            raise RuntimeError("tile_tables differs from what another backend of this process was built with")
        self._users.clear()
        self._are_used = wanted
        for forget in self._forget:
            forget()

    def keep_for(self, user: object) -> None:
        """Refuse to be turned as long as `user` lives."""
        self._users.append(weakref.ref(user))

    def decide(self, choose: Choose) -> Choose:
        """A decorator for cached functions whose answer depends on the tables: turned, it is asked anew."""
        self._forget.append(choose.cache_clear)
        return choose


MEASURED = MeasuredTables()
