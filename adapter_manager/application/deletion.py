"""Deleting adapters and revisions, in steps; after a crash the janitor goes on from any of them.

1. DELETING in the registry: no catalog names it any more
2. off the nodes (as far as they are there; a node that comes back is reconciled)
3. out of the record, and the digest released: the adapter is gone from every list
4. files removed from the store, where no adapter of any tenant holds the digest
"""

import contextlib
from collections.abc import Sequence

import structlog

from adapter_manager.application.adapters import check_etag
from adapter_manager.application.naming import not_found, reference
from adapter_manager.application.residency import Fleet
from adapter_manager.application.transactions import Transactions
from adapter_manager.domain.adapter import Adapter, DigestUse, RevisionState
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.errors import (
    AdapterNotFoundError,
    ArtifactStoreError,
    ConcurrentChangeError,
    RegistryUnavailableError,
    RevisionInUseError,
)
from adapter_manager.domain.report import UploadReport
from adapter_manager.domain.revision_report import RevisionReport
from adapter_manager.domain.tenant import TenantUsage
from adapter_manager.ports import (
    ArtifactStore,
    Change,
    Clock,
    Registry,
    Stored,
    create,
    delete,
    forget,
    update,
)
from lorikeet_contract.names import AdapterName, AdapterReference

log = structlog.get_logger(__name__)

# A manager that claimed a removal and died is believed dead after this; removals take seconds.
_CLAIM_S = 300.0
_NO_REPORT = UploadReport(0, 0, 0, (), ())


class Deletion:
    """Carries deletions through. `manager_id` stays the same over restarts of one manager."""

    def __init__(
        self,
        registry: Registry,
        transactions: Transactions,
        store: ArtifactStore,
        fleet: Fleet,
        clock: Clock,
        manager_id: str,
        unload_timeout_s: float = 5.0,
    ) -> None:
        self._registry = registry
        self._transactions = transactions
        self._store = store
        self._fleet = fleet
        self._clock = clock
        self._manager_id = manager_id
        self._unload_timeout_s = unload_timeout_s

    async def delete(self, caller: Caller, name: str, etag: str) -> None:
        """Delete an adapter or one revision of it; returns when it is gone from every list."""
        wanted = reference(caller, name)
        digests = await self._mark(wanted, etag)
        await self._fleet.forget(digests, self._unload_timeout_s)
        await self.finish(wanted.name, digests)
        log.info("adapter.deleted", adapter=wanted.name.short, revisions=len(digests))
        for digest in digests:
            # Acknowledged already: what fails here, the janitor repeats.
            with contextlib.suppress(ArtifactStoreError, RegistryUnavailableError):
                await self.purge(digest)

    async def finish(self, name: AdapterName, digests: Sequence[str]) -> None:
        """Step 3: take DELETING revisions out of the record, and their digests' holders with them."""

        async def attempt() -> tuple[Sequence[Change], None]:
            stored = await self._registry.adapter(name)
            if stored is None:
                return [], None
            gone = [
                r.digest
                for r in stored.value.revisions
                if r.digest in digests and r.state is RevisionState.DELETING
            ]
            return await self._removal(stored, gone) if gone else [], None

        await self._transactions.run(attempt)

    async def drop_pending(self, name: AdapterName, digest: str) -> None:
        """Forget a PENDING revision whose upload this manager gave up or did not survive."""

        async def attempt() -> tuple[Sequence[Change], None]:
            stored = await self._registry.adapter(name)
            revision = stored.value.revision(digest) if stored else None
            if stored is None or revision is None or revision.state is not RevisionState.PENDING:
                return [], None
            return await self._removal(stored, [digest]), None

        await self._transactions.run(attempt)

    async def purge(self, digest: str) -> bool:
        """Step 4: remove a digest's files if nobody holds it. False: somebody does, or others are at it."""

        async def claim() -> tuple[Sequence[Change], bool]:
            stored = await self._registry.use(digest)
            if stored is None or stored.value.holders:
                return [], False
            now_s, use = self._clock(), stored.value
            if use.purge_owner not in ("", self._manager_id) and now_s - use.purge_time_s < _CLAIM_S:
                return [], False
            return [update(stored, DigestUse(digest, (), self._manager_id, now_s))], True

        async def release() -> tuple[Sequence[Change], None]:
            stored = await self._registry.use(digest)
            is_ours = stored and not stored.value.holders and stored.value.purge_owner == self._manager_id
            return [delete(stored)] if stored and is_ours else [], None

        if not await self._transactions.run(claim):
            return False
        await self._store.delete(digest)
        await self._transactions.run(release)
        log.info("artifact.removed", digest=digest)
        return True

    async def abandon(self, name: AdapterName, digest: str) -> None:
        """Leave nothing of an upload that failed; where this fails too, the janitor does it later."""

        async def disown() -> tuple[Sequence[Change], None]:
            # The adapter may have been deleted, digest and all, while the files were still being written.
            known = await self._registry.use(digest)
            return [] if known else [create(DigestUse(digest))], None

        with contextlib.suppress(ArtifactStoreError, RegistryUnavailableError, ConcurrentChangeError):
            await self.drop_pending(name, digest)
            await self._transactions.run(disown)
            await self.purge(digest)

    async def _mark(self, wanted: AdapterReference, etag: str) -> Sequence[str]:
        async def attempt() -> tuple[Sequence[Change], Sequence[str]]:
            stored = await self._registry.adapter(wanted.name)
            if stored is None:
                raise not_found(wanted.name)
            check_etag(stored, etag)
            digests = _targets(stored.value, wanted)
            return [update(stored, stored.value.with_deleting(digests, self._clock()))], digests

        return await self._transactions.run(attempt)

    async def _removal(self, stored: Stored[Adapter], digests: Sequence[str]) -> list[Change]:
        adapter = stored.value
        rest = adapter.without(digests, self._clock())
        changes: list[Change] = []
        if rest.revisions:
            changes.append(update(stored, rest))
        else:
            changes.append(delete(stored))
            usage = await self._registry.usage(adapter.tenant)
            if usage:
                left = max(0, usage.value.num_adapters - 1)
                changes.append(update(usage, TenantUsage(adapter.tenant, left)))
        for digest in digests:
            changes.append(forget(RevisionReport(adapter.tenant, adapter.adapter, digest, _NO_REPORT)))
            use = await self._registry.use(digest)
            if use:
                changes.append(update(use, use.value.released_by(adapter.name.short)))
        return changes


def _targets(adapter: Adapter, wanted: AdapterReference) -> Sequence[str]:
    if wanted.alias is None and wanted.digest is None:
        return [r.digest for r in adapter.revisions]
    digest = wanted.digest or adapter.alias(wanted.alias or "")
    if digest is None or adapter.revision(digest) is None:
        raise AdapterNotFoundError(
            f"adapter {adapter.name.short!r} has no such revision or alias",
            metadata={"adapter": adapter.name.short},
        )
    pointing = [a for a, d in adapter.aliases if d == digest]
    if pointing:
        raise RevisionInUseError(
            f"alias {pointing[0]!r} of {adapter.name.short!r} points at revision {digest}; move or remove "
            "the alias first",
            metadata={"adapter": adapter.name.short, "alias": pointing[0], "digest": digest},
        )
    return [digest]
