"""Optimistic transactions: read, decide, commit if nothing changed meanwhile, else once more."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.domain.errors import ConcurrentChangeError
from adapter_manager.ports import Change, Registry

_MAX_ATTEMPTS = 12
_T = TypeVar("_T")


class Transactions:
    """Runs attempts against the registry and keeps the mirror up with what was committed."""

    def __init__(self, registry: Registry, mirror: RegistryMirror) -> None:
        self._registry = registry
        self._mirror = mirror

    async def run(self, attempt: Callable[[], Awaitable[tuple[Sequence[Change], _T]]]) -> _T:
        """Call `attempt` for the changes to commit and the result to return, until its commit holds.

        `attempt` reads what it needs each time; no changes means that there is nothing to commit.

        Raises:
            ConcurrentChangeError: others were always faster; nothing was changed.
        """
        for number in range(_MAX_ATTEMPTS):
            changes, result = await attempt()
            if not changes:
                return result
            try:
                generation = await self._registry.commit(changes)
            except ConcurrentChangeError:
                if number == _MAX_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(random.uniform(0, 0.005 * 2**number))  # noqa: S311 (not a secret)
                continue
            await self._mirror.committed(changes, generation)
            return result
        raise AssertionError("the last attempt returns or raises")
