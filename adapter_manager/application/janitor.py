"""Finishes what was begun and not ended: deletions, uploads that a crash cut, files that nobody holds."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import NoReturn

import structlog

from adapter_manager.application.background import on_thread
from adapter_manager.application.deletion import Deletion
from adapter_manager.application.ingest import UploadStaging
from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.registration import Registration
from adapter_manager.domain.adapter import Adapter, RevisionState
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.errors import ArtifactStoreError, ConcurrentChangeError, RegistryUnavailableError
from adapter_manager.ports import Clock

log = structlog.get_logger(__name__)

_EVERY_S = 5.0
# Another manager's PENDING revision counts as forgotten after this; storing one takes minutes at most.
_FORGOTTEN_S = 3600.0
# A deletion's own call finishes it; the janitor takes over where that call died.
_DELETING_GRACE_S = 15.0
_STAGED_S = 24 * 3600.0


class Janitor:
    """Looks at the mirror, so it costs nothing while there is nothing to do."""

    def __init__(
        self,
        mirror: RegistryMirror,
        registration: Registration,
        deletion: Deletion,
        staging: UploadStaging,
        clock: Clock,
        manager_id: str,
    ) -> None:
        self._mirror = mirror
        self._registration = registration
        self._deletion = deletion
        self._staging = staging
        self._clock = clock
        self._manager_id = manager_id

    async def run(self) -> NoReturn:
        """Look again and again, for ever."""
        while True:
            await self.sweep(is_first=False)
            await asyncio.sleep(_EVERY_S)

    async def sweep(self, *, is_first: bool) -> None:
        """Do all that is due. At the start of the process nothing of its own can be in progress."""
        for adapter in self._mirror.view.adapters.values():
            await self._look_at(adapter, is_first=is_first)
        for digest in _unheld(self._mirror.view):
            await self._tolerant(self._deletion.purge(digest))
        expired = await on_thread(self._staging.expire, _STAGED_S)
        if expired:
            log.info("upload.expired", uploads=expired)

    async def _look_at(self, adapter: Adapter, *, is_first: bool) -> None:
        now_s, name = self._clock(), adapter.name
        is_old = is_first or now_s - adapter.update_time_s > _DELETING_GRACE_S
        deleting = [r.digest for r in adapter.revisions if r.state is RevisionState.DELETING]
        if deleting and is_old:
            await self._tolerant(self._deletion.finish(name, deleting))
            log.info("adapter.deleted", adapter=name.short, revisions=len(deleting), resumed=True)
        for revision in adapter.revisions:
            if revision.state is not RevisionState.PENDING:
                continue
            is_ours = revision.pending_owner == self._manager_id
            is_forgotten = is_ours or now_s - revision.create_time_s > _FORGOTTEN_S
            if is_forgotten and not self._registration.is_in_flight(name, revision.digest):
                log.info("adapter.upload_dropped", adapter=name.short, digest=revision.digest)
                await self._tolerant(self._deletion.drop_pending(name, revision.digest))

    @staticmethod
    async def _tolerant(work: Awaitable[object]) -> None:
        """One thing that fails is tried again at the next sweep and keeps no other from being done."""
        with contextlib.suppress(ArtifactStoreError, ConcurrentChangeError, RegistryUnavailableError):
            await work


def _unheld(view: RegistryView) -> list[str]:
    return [digest for digest, use in view.uses.items() if not use.holders]
