"""The Registry port on Redis or Valkey: reads, pages and commits. Only server.py builds it."""

import secrets
from collections.abc import Sequence
from typing import Any, cast

import structlog

from adapter_manager.domain.adapter import Adapter, DigestUse, UploadReceipt
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.errors import (
    ConcurrentChangeError,
    RegistryEmptiedError,
    RegistryUnavailableError,
)
from adapter_manager.domain.revision_report import RevisionReport
from adapter_manager.domain.tenant import Tenant, TenantUsage, TokenOwner
from adapter_manager.infra.redis import keys, records, scripts
from adapter_manager.infra.redis.connection import RedisConnection
from adapter_manager.infra.redis.view import ViewBuilder
from adapter_manager.ports import Change, ChangeKind, Page, RecordT, Stored
from lorikeet_contract.names import AdapterName

log = structlog.get_logger(__name__)

_BATCH = 500


class RedisRegistry:
    """Implements `ports.Registry`. Connects on first use, and again whenever the server went away."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._epoch = ""

    async def commit(self, changes: Sequence[Change]) -> int:
        """See ports.Registry."""
        epoch = await self._known_epoch()
        script_keys = [keys.EPOCH, keys.GENERATION, keys.CHANGES, keys.INDEX]
        args: list[str | bytes | int] = [epoch]
        for change in changes:
            record_id = keys.identify(change.record)
            script_keys.append(keys.record_key(record_id))
            args += (
                change.kind.value,
                "*" if change.expected_etag is None else change.expected_etag,
                records.encode(change.record) if change.kind is ChangeKind.PUT else b"",
                round((change.ttl_s or 0) * 1000),
                record_id,
                int(keys.is_indexed(change.record)),
            )
        status, detail = await self._connection.write(scripts.COMMIT, script_keys, args)
        match status:
            case b"OK":
                return int(detail)
            case b"CONFLICT":
                raise ConcurrentChangeError(
                    "somebody else changed the same record at the same time; nothing was changed, try again",
                    metadata={"record": detail.decode()},
                    retry_after_s=0.1,
                )
            case _:
                if detail:  # another registry; an empty answer is left to `restore`
                    self._epoch = ""
                raise RegistryUnavailableError(
                    "the registry's store was emptied or replaced; it is being read anew, try again",
                    retry_after_s=1,
                )

    async def tenant(self, tenant_id: str) -> Stored[Tenant] | None:
        """See ports.Registry."""
        return await self._get(keys.tenant_id(tenant_id), Tenant)

    async def usage(self, tenant_id: str) -> Stored[TenantUsage] | None:
        """See ports.Registry."""
        return await self._get(keys.usage_id(tenant_id), TenantUsage)

    async def tenants(self, after: str, limit: int) -> Page[Tenant]:
        """See ports.Registry."""
        return await self._page("tenant:", after, limit, Tenant)

    async def token(self, sha256: str) -> Stored[TokenOwner] | None:
        """See ports.Registry."""
        return await self._get(keys.token_id(sha256), TokenOwner)

    async def adapter(self, name: AdapterName) -> Stored[Adapter] | None:
        """See ports.Registry."""
        return await self._get(keys.adapter_id(name.tenant, name.adapter), Adapter)

    async def adapters(self, tenant_id: str | None, after: str, limit: int) -> Page[Adapter]:
        """See ports.Registry."""
        prefix = f"adapter:{tenant_id}/" if tenant_id else "adapter:"
        # `after` is "t/a" in both cases, so that one page token serves both.
        behind = after.removeprefix(f"{tenant_id}/") if tenant_id else after
        return await self._page(prefix, behind, limit, Adapter)

    async def use(self, digest: str) -> Stored[DigestUse] | None:
        """See ports.Registry."""
        return await self._get(keys.use_id(digest), DigestUse)

    async def receipt(self, tenant_id: str, request_id: str) -> Stored[UploadReceipt] | None:
        """See ports.Registry."""
        return await self._get(keys.receipt_id(tenant_id, request_id), UploadReceipt)

    async def report(self, name: AdapterName, digest: str) -> Stored[RevisionReport] | None:
        """See ports.Registry."""
        return await self._get(keys.report_id(name.tenant, name.adapter, digest), RevisionReport)

    async def refresh(self, view: RegistryView) -> RegistryView:
        """See ports.Registry."""
        epoch, generation, changed = await self._connection.read(lambda: self._changes_since(view.generation))
        if not epoch and view.epoch:
            raise RegistryEmptiedError("the registry's store lost everything", retry_after_s=1)
        if not epoch:
            epoch = await self._known_epoch()
        self._epoch = epoch
        is_other = epoch != view.epoch or generation < view.generation
        if is_other or generation - view.generation > scripts.CHANGES_KEPT:
            return await self._load(epoch)
        if generation == view.generation:
            return view
        builder = ViewBuilder(view)
        await self._fill(builder, changed)
        return builder.build(epoch, generation)

    async def restore(self, view: RegistryView) -> RegistryView:
        """See ports.Registry."""
        all_records = [
            *view.tenants.values(),
            *view.tokens.values(),
            *view.adapters.values(),
            *view.uses.values(),
            *view.models.values(),
            *_usages(view),
        ]
        ids = [keys.identify(record) for record in all_records]
        args: list[str | bytes | int] = [view.epoch, view.generation + 1]
        for record_id, record in zip(ids, all_records, strict=True):
            args += (record_id, records.encode(record))
        fixed = [keys.EPOCH, keys.GENERATION, keys.CHANGES, keys.INDEX]
        done = await self._connection.write(
            scripts.RESTORE, [*fixed, *(keys.record_key(i) for i in ids)], args
        )
        log.error(
            "redis.restored" if done else "redis.replaced", records=len(ids), generation=view.generation
        )
        return await self._load(view.epoch)

    async def raise_generation(self, minimum: int) -> None:
        """See ports.Registry."""
        await self._connection.write(scripts.RAISE_GENERATION, [keys.GENERATION], [minimum])

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def _known_epoch(self) -> str:
        if not self._epoch:
            opened = await self._connection.write(
                scripts.OPEN, [keys.EPOCH, keys.GENERATION], [secrets.token_hex(8)]
            )
            self._epoch = opened.decode()
        return self._epoch

    async def _load(self, epoch: str) -> RegistryView:
        """Read everything, then what changed meanwhile."""
        _, generation, _ = await self._connection.read(lambda: self._changes_since(None))
        builder, after = ViewBuilder(RegistryView()), b"-"
        while True:
            page = await self._connection.read(
                lambda low=after: self._connection.client.zrangebylex(keys.INDEX, low, b"+", 0, _BATCH)
            )
            await self._fill(builder, page)
            if len(page) < _BATCH:
                break
            after = b"(" + cast("bytes", page[-1])
        return await self.refresh(builder.build(epoch, generation))

    async def _fill(self, builder: ViewBuilder, raw_ids: Sequence[Any]) -> None:
        ids = [raw.decode() for raw in raw_ids]
        for start in range(0, len(ids), _BATCH):
            batch = ids[start : start + _BATCH]
            record_keys = [keys.record_key(i) for i in batch]
            raws = await self._connection.read(lambda k=record_keys: self._connection.client.mget(k))
            for record_id, raw in zip(batch, cast("list[bytes | None]", raws), strict=True):
                builder.put(record_id, raw)

    async def _changes_since(self, generation: int | None) -> tuple[str, int, list[Any]]:
        pipeline = self._connection.client.pipeline(transaction=True)
        pipeline.get(keys.EPOCH)
        pipeline.get(keys.GENERATION)
        if generation is not None:
            pipeline.zrangebyscore(keys.CHANGES, f"({generation}", "+inf")
        epoch, now, *changed = await pipeline.execute()
        return (epoch or b"").decode(), int(now or 0), changed[0] if changed else []

    async def _get(self, record_id: str, kind: type[RecordT]) -> Stored[RecordT] | None:
        raw = await self._connection.read(lambda: self._connection.client.get(keys.record_key(record_id)))
        return None if raw is None else records.decode(cast("bytes", raw), kind)

    async def _page(self, prefix: str, after: str, limit: int, kind: type[RecordT]) -> Page[RecordT]:
        low = f"({prefix}{after}" if after else f"[{prefix}"
        # The character after the prefix's last one bounds all ids that begin with it.
        high = f"({prefix[:-1]}{chr(ord(prefix[-1]) + 1)}"
        raw_ids = await self._connection.read(
            lambda: self._connection.client.zrangebylex(keys.INDEX, low, high, 0, limit)
        )
        ids = [cast("bytes", i).decode() for i in raw_ids]
        if not ids:
            return Page((), "")
        record_keys = [keys.record_key(i) for i in ids]
        raws = await self._connection.read(lambda: self._connection.client.mget(record_keys))
        # One that was deleted between the two reads is simply not there any more.
        items = [records.decode(raw, kind) for raw in cast("list[bytes | None]", raws) if raw is not None]
        return Page(tuple(items), ids[-1].partition(":")[2] if len(ids) == limit else "")


def _usages(view: RegistryView) -> list[TenantUsage]:
    counts = dict.fromkeys(view.tenants, 0)
    for adapter in view.adapters.values():
        counts[adapter.tenant] = counts.get(adapter.tenant, 0) + 1
    return [TenantUsage(tenant, count) for tenant, count in counts.items()]
