"""A built revision's way into the registry: PENDING, files stored, READY. A crash leaves PENDING at most."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from adapter_manager.application.deletion import Deletion
from adapter_manager.application.transactions import Transactions
from adapter_manager.domain.adapter import Adapter, DigestUse, Revision, RevisionState, UploadReceipt
from adapter_manager.domain.built_revision import BuiltRevision
from adapter_manager.domain.errors import (
    ConcurrentChangeError,
    LimitExceededError,
    PurgeInProgressError,
    TenantNotFoundError,
)
from adapter_manager.domain.revision_report import RevisionReport
from adapter_manager.domain.tenant import TenantUsage
from adapter_manager.ports import (
    ArtifactStore,
    Change,
    Clock,
    Registry,
    create,
    overwrite,
    update,
)
from lorikeet_contract.names import AdapterName

log = structlog.get_logger(__name__)

_RECEIPT_TTL_S = 24 * 3600.0
_PURGE_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class RegistrationLimits:
    """What a tenant may have where its own limits say nothing."""

    max_adapters: int = 10_000
    max_revisions: int = 100


@dataclass(frozen=True, slots=True)
class UploadIdentity:
    """What makes a repeat the same upload, and what the new revision is called."""

    name: AdapterName
    aliases: tuple[str, ...]
    request_id: str
    fingerprint: str
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Registered:
    """A READY revision. `is_mended`: it was registered before, and its files were damaged or lost."""

    revision: Revision
    is_created: bool
    is_mended: bool


class Registration:
    """Registers built revisions. Knows which of them it is storing right now."""

    def __init__(
        self,
        registry: Registry,
        transactions: Transactions,
        store: ArtifactStore,
        deletion: Deletion,
        clock: Clock,
        manager_id: str,
        limits: RegistrationLimits,
    ) -> None:
        self._registry = registry
        self._transactions = transactions
        self._store = store
        self._deletion = deletion
        self._clock = clock
        self._manager_id = manager_id
        self._limits = limits
        self._in_flight = Counter[tuple[str, str]]()

    def is_in_flight(self, name: AdapterName, digest: str) -> bool:
        """Whether an upload of this process is storing that revision."""
        return self._in_flight[(name.short, digest)] > 0

    async def check_room(self, name: AdapterName) -> None:
        """Refuse early what `register` would refuse late.

        Raises:
            TenantNotFoundError: no such tenant.
            LimitExceededError: the tenant has as many adapters as it may have.
        """
        await self._begin_changes(name, None)

    async def register(self, upload: UploadIdentity, built: BuiltRevision) -> Registered:
        """Store a built revision and make it READY and current."""
        key = (upload.name.short, built.digest)
        self._in_flight[key] += 1
        is_stored = False
        try:
            is_new = await self._begin(upload.name, self._pending(built))
            # Also where it was registered before: an upload heals files that got lost.
            is_written = await self._store.put(built)
            revision = await self._finish(upload, built)
            is_stored = True
        finally:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]
                if not is_stored:
                    await self._deletion.abandon(upload.name, built.digest)
        is_mended = is_written and not is_new
        if is_mended:
            log.info("adapter.mended", adapter=upload.name.short, digest=built.digest)
        log.info("adapter.registered", adapter=upload.name.short, digest=built.digest, created=is_new)
        return Registered(revision, is_new, is_mended)

    async def promote(self, upload: UploadIdentity, digest: str) -> Revision | None:
        """Make a READY revision what `upload` would make of it. None: it is gone.

        The bare name answers with what was pushed last, also where that was pushed before something else.
        """
        now_s = self._clock()

        async def attempt() -> tuple[Sequence[Change], tuple[Revision, bool] | None]:
            stored = await self._registry.adapter(upload.name)
            revision = stored.value.revision(digest) if stored else None
            if stored is None or revision is None or revision.state is not RevisionState.READY:
                return [], None
            adapter = stored.value
            if adapter.current_digest == digest and all(adapter.alias(a) == digest for a in upload.aliases):
                return [], (revision, False)
            promoted = adapter.with_ready(digest, upload.aliases, now_s)
            result = promoted.revision(digest)
            assert result is not None, "it was promoted above"
            return [update(stored, promoted)], (result, True)

        done = await self._transactions.run(attempt)
        if done and done[1]:
            log.info("adapter.promoted", adapter=upload.name.short, digest=digest)
        return done[0] if done else None

    def _pending(self, built: BuiltRevision) -> Revision:
        manifest = built.manifest
        return Revision(
            digest=built.digest,
            state=RevisionState.PENDING,
            create_time_s=self._clock(),
            payload_bytes=manifest.payload_bytes,
            dtype=manifest.dtype.value,
            max_rank=manifest.max_rank,
            base_digest=manifest.base_digest,
            pending_owner=self._manager_id,
        )

    async def _begin(self, name: AdapterName, pending: Revision) -> bool:
        deadline_s = self._clock() + _PURGE_WAIT_S

        async def attempt() -> tuple[Sequence[Change], bool]:
            return await self._begin_changes(name, pending)

        while True:
            try:
                return await self._transactions.run(attempt)
            except PurgeInProgressError:
                if self._clock() > deadline_s:
                    raise
                await asyncio.sleep(0.1)

    async def _begin_changes(
        self, name: AdapterName, pending: Revision | None
    ) -> tuple[Sequence[Change], bool]:
        now_s = self._clock()
        usage = await self._registry.usage(name.tenant)
        if usage is None:
            raise TenantNotFoundError(
                f"there is no tenant {name.tenant!r}; create it first", metadata={"tenant": name.tenant}
            )
        stored = await self._registry.adapter(name)
        known = stored.value.revision(pending.digest) if stored and pending else None
        if stored is None:
            await self._check_adapters(usage.value)
        elif pending and known is None:
            self._check_revisions(stored.value)
        if pending is None:
            return [], False
        if known and known.state is RevisionState.DELETING:
            raise ConcurrentChangeError(
                f"revision {known.digest} of {name.short!r} is being deleted; upload again in a moment",
                retry_after_s=1,
            )
        if known and known.state is RevisionState.READY:
            return [], False
        changes: list[Change] = []
        if stored is None:
            adapter = Adapter(name.tenant, name.adapter, now_s, now_s).with_pending(pending, now_s)
            changes.append(create(adapter))
            changes.append(update(usage, TenantUsage(name.tenant, usage.value.num_adapters + 1)))
        else:
            changes.append(update(stored, stored.value.with_pending(pending, now_s)))
        use = await self._registry.use(pending.digest)
        if use and use.value.purge_owner:
            raise PurgeInProgressError(
                "the same content was just deleted and is still being removed; upload again in a moment",
                retry_after_s=1,
            )
        holder = (use.value if use else DigestUse(pending.digest)).held_by(name.short)
        changes.append(update(use, holder) if use else create(holder))
        return changes, True

    async def _finish(self, upload: UploadIdentity, built: BuiltRevision) -> Revision:
        name, digest, now_s = upload.name, built.digest, self._clock()

        async def attempt() -> tuple[Sequence[Change], Revision]:
            stored = await self._registry.adapter(name)
            revision = stored.value.revision(digest) if stored else None
            if stored is None or revision is None or revision.state is RevisionState.DELETING:
                raise ConcurrentChangeError(
                    f"adapter {name.short!r} was deleted while this upload was being stored; upload again",
                    retry_after_s=1,
                )
            ready = stored.value.with_ready(digest, upload.aliases, now_s)
            changes: list[Change] = [
                update(stored, ready),
                overwrite(RevisionReport(name.tenant, name.adapter, digest, built.report)),
            ]
            if upload.request_id:
                receipt = UploadReceipt(
                    tenant=name.tenant,
                    request_id=upload.request_id,
                    adapter=name.adapter,
                    fingerprint=upload.fingerprint,
                    files=upload.files,
                    digest=digest,
                    create_time_s=now_s,
                )
                changes.append(overwrite(receipt, ttl_s=_RECEIPT_TTL_S))
            result = ready.revision(digest)
            assert result is not None, "it was made READY above"
            return changes, result

        return await self._transactions.run(attempt)

    async def _check_adapters(self, usage: TenantUsage) -> None:
        tenant = await self._registry.tenant(usage.tenant_id)
        maximum = (tenant.value.limits.max_adapters if tenant else None) or self._limits.max_adapters
        if usage.num_adapters >= maximum:
            raise LimitExceededError(
                f"tenant {usage.tenant_id!r} has {usage.num_adapters} adapters, its limit is {maximum}; "
                "delete one, or ask an admin for more",
                metadata={
                    "limit": "max_adapters",
                    "value": str(usage.num_adapters + 1),
                    "maximum": str(maximum),
                },
            )

    def _check_revisions(self, adapter: Adapter) -> None:
        maximum = self._limits.max_revisions
        if len(adapter.revisions) >= maximum:
            raise LimitExceededError(
                f"adapter {adapter.name.short!r} has {len(adapter.revisions)} revisions, its limit is "
                f"{maximum}; delete old ones",
                metadata={
                    "limit": "max_revisions",
                    "value": str(len(adapter.revisions) + 1),
                    "maximum": str(maximum),
                },
            )
