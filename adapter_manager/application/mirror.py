"""The whole registry in memory, kept current by reading it again: for catalogs, tokens, and when it is away.

Changes are found by the generation counter, never by messages, so nothing is missed over a lost connection.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn

import structlog

from adapter_manager.domain.adapter import Adapter, DigestUse
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.errors import RegistryBehindError, RegistryUnavailableError
from adapter_manager.domain.node import BaseModel
from adapter_manager.domain.tenant import Tenant, TokenOwner
from adapter_manager.ports import Change, ChangeKind, Record, Registry

log = structlog.get_logger(__name__)

_MAX_READS = 5  # in a storm of our own commits; each of them is in the view already


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
            for _ in range(_MAX_READS):
                view = self._view
                try:
                    fresh = await self._registry.refresh(view)
                except RegistryBehindError:
                    # A store that lost something gets back all that was acknowledged; only upload reports and
                    # receipts, which are not in the view, are gone.
                    fresh = await self._registry.restore(view)
                if self._view is view:  # else a commit of our own came first, which `fresh` may not have
                    self._take(fresh)
                    break
            return self._view

    async def committed(self, changes: Sequence[Change], generation: int) -> None:
        """Take in what was just committed: from now on the view has it, whatever becomes of the store.

        Others' commits that came in between are read; where that fails the poll does it later.
        """
        view = self._view
        if view.epoch and generation <= view.generation:
            return  # the poll was faster
        is_next = generation == view.generation + 1
        if view.epoch:  # else it was never read, and must not look as if it had been
            # Nothing is awaited before this: a store that is lost now is restored with these changes in it.
            self._take(_with_changes(view, changes, generation if is_next else view.generation))
        if not (view.epoch and is_next):
            with contextlib.suppress(RegistryUnavailableError):
                await self.refresh()

    def _take(self, view: RegistryView) -> None:
        if view is not self._view:
            self._view = view
            self._changed.set()
            self._changed = asyncio.Event()

    async def changed(self, seen: RegistryView) -> RegistryView:
        """Wait until the view is another than `seen`."""
        while self._view is seen:
            await self._changed.wait()
        return self._view


def _with_changes(view: RegistryView, changes: Sequence[Change], generation: int) -> RegistryView:
    """The view as it is after a commit; records that views do not hold are left out."""
    maps: dict[str, dict[str, Any]] = {}
    for change in changes:
        place = _place(change.record)
        if place is None or change.kind is ChangeKind.CHECK:
            continue
        kind, key = place
        entries = maps.setdefault(kind, dict(getattr(view, kind)))
        if change.kind is ChangeKind.PUT:
            entries[key] = change.record
        else:
            entries.pop(key, None)
    mappings: dict[str, Any] = {kind: MappingProxyType(entries) for kind, entries in maps.items()}
    return replace(view, generation=generation, **mappings)


def _place(record: Record) -> tuple[str, str] | None:
    """The view's mapping that a record belongs to, and its key there."""
    match record:
        case Tenant():
            return "tenants", record.tenant_id
        case TokenOwner():
            return "tokens", record.sha256
        case Adapter():
            return "adapters", record.name.short
        case DigestUse():
            return "uses", record.digest
        case BaseModel():
            return "models", record.base_digest
        case _:
            return None
