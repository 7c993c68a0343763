"""A Registry in memory, with switches for what goes wrong: away, emptied, overtaken, killed."""

import itertools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from adapter_manager.domain.adapter import Adapter, DigestUse, UploadReceipt
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.errors import (
    ConcurrentChangeError,
    RegistryBehindError,
    RegistryUnavailableError,
)
from adapter_manager.domain.node import BaseModel
from adapter_manager.domain.revision_report import RevisionReport
from adapter_manager.domain.tenant import Tenant, TenantUsage, TokenOwner
from adapter_manager.ports import Change, ChangeKind, Page, Stored
from lorikeet_contract.names import AdapterName

Key = tuple[type[Any], str]


def key_of(record: Any) -> Key:
    """Kind and identity of a record."""
    match record:
        case Tenant() | TenantUsage():
            return type(record), record.tenant_id
        case TokenOwner():
            return TokenOwner, record.sha256
        case Adapter():
            return Adapter, record.name.short
        case BaseModel():
            return BaseModel, record.base_digest
        case UploadReceipt():
            return UploadReceipt, f"{record.tenant}/{record.request_id}"
        case RevisionReport():
            return RevisionReport, f"{record.tenant}/{record.adapter}/{record.digest}"
        case _:
            return DigestUse, record.digest


class MemoryRegistry:
    """Implements adapter_manager.ports.Registry."""

    def __init__(self) -> None:
        self.records: dict[Key, Stored[Any]] = {}
        self.generation = 0
        self.epoch = "memory"
        self.is_away = False
        # Called before each commit with its number, from 0: may change state or raise.
        self.before_commit: Callable[[int], None] = lambda _: None
        self.num_commits = 0
        self._etags = itertools.count(1)

    async def commit(self, changes: Sequence[Change]) -> int:
        self._check_away()
        number, self.num_commits = self.num_commits, self.num_commits + 1
        self.before_commit(number)
        for change in changes:
            known = self.records.get(key_of(change.record))
            if change.expected_etag is not None and change.expected_etag != (known.etag if known else ""):
                raise ConcurrentChangeError("conflict")
        for change in changes:
            if change.kind is ChangeKind.PUT:
                self.records[key_of(change.record)] = Stored(change.record, f"e{next(self._etags)}")
            elif change.kind is ChangeKind.DELETE:
                self.records.pop(key_of(change.record), None)
        self.generation += 1
        return self.generation

    async def tenant(self, tenant_id: str) -> Stored[Tenant] | None:
        return self._get(Tenant, tenant_id)

    async def usage(self, tenant_id: str) -> Stored[TenantUsage] | None:
        return self._get(TenantUsage, tenant_id)

    async def tenants(self, after: str, limit: int) -> Page[Tenant]:
        return self._page(Tenant, "", after, limit)

    async def token(self, sha256: str) -> Stored[TokenOwner] | None:
        return self._get(TokenOwner, sha256)

    async def adapter(self, name: AdapterName) -> Stored[Adapter] | None:
        return self._get(Adapter, name.short)

    async def adapters(self, tenant_id: str | None, after: str, limit: int) -> Page[Adapter]:
        return self._page(Adapter, f"{tenant_id}/" if tenant_id else "", after, limit)

    async def use(self, digest: str) -> Stored[DigestUse] | None:
        return self._get(DigestUse, digest)

    async def receipt(self, tenant_id: str, request_id: str) -> Stored[UploadReceipt] | None:
        return self._get(UploadReceipt, f"{tenant_id}/{request_id}")

    async def report(self, name: AdapterName, digest: str) -> Stored[RevisionReport] | None:
        return self._get(RevisionReport, f"{name.short}/{digest}")

    async def refresh(self, view: RegistryView) -> RegistryView:
        self._check_away()
        if not self.epoch:
            raise RegistryBehindError("emptied")
        if (view.epoch, view.generation) == (self.epoch, self.generation):
            return view
        return RegistryView(
            self.epoch,
            self.generation,
            *(self._all(kind) for kind in (Tenant, TokenOwner, Adapter, DigestUse, BaseModel)),
        )

    async def restore(self, view: RegistryView) -> RegistryView:
        self.epoch, self.generation = view.epoch, view.generation + 1
        for mapping in (view.tenants, view.tokens, view.adapters, view.uses, view.models):
            for record in mapping.values():
                self.records[key_of(record)] = Stored(record, f"e{next(self._etags)}")
        for tenant in view.tenants:
            count = sum(a.tenant == tenant for a in view.adapters.values())
            self.records[TenantUsage, tenant] = Stored(TenantUsage(tenant, count), f"e{next(self._etags)}")
        return await self.refresh(RegistryView())

    async def raise_generation(self, minimum: int) -> None:
        self._check_away()
        self.generation = max(self.generation, minimum + 1)

    def empty(self) -> None:
        """Lose everything, as a store without persistence does when it restarts."""
        self.records.clear()
        self.generation, self.epoch = 0, ""

    def _check_away(self) -> None:
        if self.is_away:
            raise RegistryUnavailableError("away", retry_after_s=1)

    def _get(self, kind: type[Any], key: str) -> Any:
        self._check_away()
        return self.records.get((kind, key))

    def _all(self, kind: type[Any]) -> MappingProxyType[str, Any]:
        return MappingProxyType({k: s.value for (t, k), s in self.records.items() if t is kind})

    def _page(self, kind: type[Any], prefix: str, after: str, limit: int) -> Page[Any]:
        self._check_away()
        keys = sorted(k for t, k in self.records if t is kind and k.startswith(prefix) and k > after)
        items = tuple(self.records[kind, k] for k in keys[:limit])
        return Page(items, keys[limit - 1] if len(keys) > limit else "")
