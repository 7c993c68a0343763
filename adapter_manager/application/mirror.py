"""The whole registry in memory, kept current by reading it again: for catalogs, tokens, and when it is away.

Changes are found by the generation counter, never by messages, so nothing is missed over a lost connection.
"""

import asyncio
import contextlib
from typing import NoReturn

import structlog

from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.errors import RegistryEmptiedError, RegistryUnavailableError
from adapter_manager.ports import Registry

log = structlog.get_logger(__name__)


class RegistryMirror:
    """The one owner of the current view. Readers take `view` and keep it as long as they like."""

    def __init__(self, registry: Registry, poll_s: float = 0.5) -> None:
        self._registry = registry
        self._poll_s = poll_s
        self._view = RegistryView()
        self._changed = asyncio.Event()
        self._refreshing = asyncio.Lock()

    @property
    def view(self) -> RegistryView:
        """The newest view; `epoch` is empty until the registry was read for the first time."""
        return self._view

    async def run(self) -> NoReturn:
        """Keep the view current, for ever."""
        while True:
            with contextlib.suppress(RegistryUnavailableError):  # the connection has logged it
                await self.refresh()
            await asyncio.sleep(self._poll_s)

    async def refresh(self) -> RegistryView:
        """Read what changed, now.

        Raises:
            RegistryUnavailableError: the registry is away; the view stays as it was.
        """
        async with self._refreshing:
            try:
                fresh = await self._registry.refresh(self._view)
            except RegistryEmptiedError:
                # A store that lost everything gets back all that was acknowledged; only upload reports and
                # receipts, which are not in the view, are gone.
                fresh = await self._registry.restore(self._view)
            if fresh is not self._view:
                self._view = fresh
                self._changed.set()
                self._changed = asyncio.Event()
            return fresh

    async def reach(self, generation: int) -> None:
        """Bring the view to a generation that was just committed; the poll does it where this cannot."""
        if self._view.generation < generation:
            with contextlib.suppress(RegistryUnavailableError):
                await self.refresh()

    async def changed(self, seen: RegistryView) -> RegistryView:
        """Wait until the view is another than `seen`."""
        while self._view is seen:
            await self._changed.wait()
        return self._view
