"""The Registry port on Redis or Valkey: reads, pages and commits. Only server.py builds it."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import structlog

from adapter_manager.domain.adapter import Adapter, DigestUse, UploadReceipt
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.errors import (
    ConcurrentChangeError,
    RegistryBehindError,
)
from adapter_manager.domain.revision_report import RevisionReport
from adapter_manager.domain.tenant import Tenant, TenantUsage, TokenOwner
from adapter_manager.infra.redis import keys, records, scripts
from adapter_manager.infra.redis.connection import RedisConnection
from adapter_manager.infra.redis.identity import RegistryIdentity
from adapter_manager.infra.redis.view import ViewBuilder
from adapter_manager.ports import Change, ChangeKind, Page, RecordT, Stored
from lorikeet_contract.names import AdapterName

log = structlog.get_logger(__name__)

_BATCH = 500


class RedisRegistry:
    """Implements `ports.Registry`. Connects on first use, and again whenever the server went away."""

    def __init__(self, connection: RedisConnection, identity: RegistryIdentity | None = None) -> None:
        self._connection = connection
        self._identity = identity or RegistryIdentity()
        # The newest that this process has seen: a store that is behind it has lost acknowledged commits.
        self._generation = 0

    async def commit(self, changes: Sequence[Change]) -> int:
        """See ports.Registry."""
        epoch = await self._known_epoch()
        script_keys = [keys.EPOCH, keys.GENERATION, keys.CHANGES, keys.INDEX]
        args: list[str | bytes | int] = [epoch, self._generation]
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
                self._generation = max(self._generation, int(detail))
                return int(detail)
            case b"CONFLICT":
                raise ConcurrentChangeError(
                    "somebody else changed the same record at the same time; nothing was changed, try again",
                    metadata={"record": detail.decode()},
                    retry_after_s=0.1,
                )
            case b"EPOCH":
                self._identity.check(detail.decode(), is_read=self._generation > 0)
            case _:
                pass
        raise RegistryBehindError(
            "the registry's store came back older than it was; it is given back what it lost, try again",
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
        state = await self._connection.read(lambda: self._changes_since(view.generation))
        if not state.epoch and not self._identity.epoch:
            state = replace(state, epoch=await self._known_epoch())
        self._identity.check(state.epoch, is_read=bool(view.epoch))
        if state.lacks(view):
            raise RegistryBehindError("the registry's store lost acknowledged commits", retry_after_s=1)
        self._generation = max(self._generation, state.generation)
        if state.epoch != view.epoch or state.generation - view.generation > scripts.CHANGES_KEPT:
            return await self._load(state.epoch)
        if state.generation == view.generation:
            return view
        builder = ViewBuilder(view)
        await self._fill(builder, state.changed)
        return builder.build(state.epoch, state.generation)

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
        args: list[str | bytes | int] = [view.epoch, view.generation, keys.record_key("")]
        for record_id, record in zip(ids, all_records, strict=True):
            args += (record_id, records.encode(record))
        fixed = [keys.EPOCH, keys.GENERATION, keys.CHANGES, keys.INDEX, keys.RESTORED]
        done = await self._connection.write(
            scripts.RESTORE, [*fixed, *(keys.record_key(i) for i in ids)], args
        )
        if done:
            log.error("redis.restored", records=len(ids), generation=view.generation)
        return await self._load(view.epoch)

    async def raise_generation(self, minimum: int) -> None:
        """See ports.Registry."""
        script_keys = [keys.EPOCH, keys.GENERATION]
        await self._connection.write(scripts.RAISE_GENERATION, script_keys, [self._identity.epoch, minimum])

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def _known_epoch(self) -> str:
        if not self._identity.epoch:
            opened = await self._connection.write(
                scripts.OPEN, [keys.EPOCH, keys.GENERATION], [secrets.token_hex(8)]
            )
            self._identity.follow(opened.decode())
        return self._identity.epoch

    async def _load(self, epoch: str) -> RegistryView:
        """Read everything, then what changed meanwhile."""
        state = await self._connection.read(lambda: self._changes_since(None))
        builder, after = ViewBuilder(RegistryView()), b"-"
        while True:
            page = await self._connection.read(
                lambda low=after: self._connection.client.zrangebylex(keys.INDEX, low, b"+", 0, _BATCH)
            )
            await self._fill(builder, page)
            if len(page) < _BATCH:
                break
            after = b"(" + cast("bytes", page[-1])
        return await self.refresh(builder.build(epoch, state.generation))

    async def _fill(self, builder: ViewBuilder, raw_ids: Sequence[Any]) -> None:
        ids = [raw.decode() for raw in raw_ids]
        for start in range(0, len(ids), _BATCH):
            batch = ids[start : start + _BATCH]
            raws = await self._values(batch)
            for record_id, raw in zip(batch, raws, strict=True):
                builder.put(record_id, raw)

    async def _changes_since(self, generation: int | None) -> "_State":
        pipeline = self._connection.client.pipeline(transaction=True)
        pipeline.get(keys.EPOCH)
        pipeline.get(keys.GENERATION)
        pipeline.hmget(keys.RESTORED, "from", "as")
        if generation is not None:
            pipeline.zrangebyscore(keys.CHANGES, f"({generation}", "+inf")
        epoch, now, restored, *changed = await pipeline.execute()
        return _State(
            epoch=(epoch or b"").decode(),
            generation=int(now or 0),
            restored_from=int(restored[0] or 0),
            restored_as=int(restored[1] or 0),
            changed=changed[0] if changed else (),
        )

    async def _values(self, ids: Sequence[str]) -> list[bytes | None]:
        """The records of these ids, from the registry that is followed and no other.

        Its epoch is read with them: an emptied store must not look as if it held none of them.
        """
        wanted = [keys.EPOCH, *(keys.record_key(i) for i in ids)]
        found = await self._connection.read(lambda: self._connection.client.mget(wanted))
        epoch, *raws = cast("list[bytes | None]", found)
        self._identity.check((epoch or b"").decode(), is_read=self._generation > 0)
        return raws

    async def _get(self, record_id: str, kind: type[RecordT]) -> Stored[RecordT] | None:
        (raw,) = await self._values([record_id])
        return None if raw is None else records.decode(raw, kind)

    async def _page(self, prefix: str, after: str, limit: int, kind: type[RecordT]) -> Page[RecordT]:
        low = f"({prefix}{after}" if after else f"[{prefix}"
        # The character after the prefix's last one bounds all ids that begin with it.
        high = f"({prefix[:-1]}{chr(ord(prefix[-1]) + 1)}"
        raw_ids = await self._connection.read(
            lambda: self._connection.client.zrangebylex(keys.INDEX, low, high, 0, limit)
        )
        ids = [cast("bytes", i).decode() for i in raw_ids]
        raws = await self._values(ids)
        # One that was deleted between the two reads is simply not there any more.
        items = [records.decode(raw, kind) for raw in raws if raw is not None]
        return Page(tuple(items), ids[-1].partition(":")[2] if ids and len(ids) == limit else "")


@dataclass(frozen=True, slots=True)
class _State:
    """The registry's counters as of one moment, and the ids of what changed since an older one."""

    epoch: str
    generation: int
    restored_from: int
    restored_as: int
    changed: Sequence[Any]

    def lacks(self, view: RegistryView) -> bool:
        """Whether commits that the view has seen are not in the store any more.

        Either the store is older than the view, or another manager restored it from a view that was older:
        it is known by a generation between what was restored and what the restore made of it.
        """
        is_older = self.generation < view.generation
        return is_older or self.restored_from < view.generation < self.restored_as


def _usages(view: RegistryView) -> list[TenantUsage]:
    counts = dict.fromkeys(view.tenants, 0)
    for adapter in view.adapters.values():
        counts[adapter.tenant] = counts.get(adapter.tenant, 0) + 1
    return [TenantUsage(tenant, count) for tenant, count in counts.items()]
