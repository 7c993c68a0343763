"""Adapters as their owners see and change them: get, list, pin, alias."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.naming import (
    not_found,
    parent_tenant,
    ready_revision,
    reference,
    whole_adapter,
)
from adapter_manager.application.transactions import Transactions
from adapter_manager.domain.adapter import Adapter
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.errors import EtagMismatchError, InvalidRequestError, RegistryUnavailableError
from adapter_manager.domain.page import decode_token, encode_token, page_size
from adapter_manager.domain.probe import Probe
from adapter_manager.domain.report import UploadReport
from adapter_manager.domain.shown_text import shown
from adapter_manager.ports import Change, Clock, Page, Registry, Stored, update
from lorikeet_contract.names import AdapterName, AdapterReference, InvalidNameError, check_segment

log = structlog.get_logger(__name__)

# Replies stay below clients' default limit of 4 MiB: pages of adapters with many revisions are shorter.
_MAX_PAGE_BYTES = 2 * 1024 * 1024
_REVISION_BYTES = 512
_ALIAS_BYTES = 160


@dataclass(frozen=True, slots=True)
class AdapterDetails:
    """An adapter with the upload report of one of its revisions (the one named, else the current one).

    `etag` is empty where the answer comes from memory because the registry is away. `probes` are of those
    revisions that a node has probed, by digest.
    """

    adapter: Adapter
    etag: str
    report_digest: str = ""
    report: UploadReport | None = None
    probes: Mapping[str, Probe] = field(default_factory=dict[str, Probe])


class AdapterDirectory:
    """Reads fall back to the mirror while the registry is away; changes need the registry."""

    def __init__(
        self, registry: Registry, mirror: RegistryMirror, transactions: Transactions, clock: Clock
    ) -> None:
        self._registry = registry
        self._mirror = mirror
        self._transactions = transactions
        self._clock = clock

    async def get(self, caller: Caller, name: str) -> AdapterDetails:
        """One adapter with all its revisions; a name with a revision or alias also must name one of them."""
        wanted = reference(caller, name)
        try:
            stored = await self.stored(wanted.name)
            digest = stored.value.current_digest
            if wanted.alias is not None or wanted.digest is not None:
                digest = ready_revision(stored.value, wanted).digest
            report = await self._registry.report(wanted.name, digest) if digest else None
        except RegistryUnavailableError:
            adapter = self._remembered(wanted)
            return AdapterDetails(adapter, "", probes=self._probes(adapter))
        return AdapterDetails(
            stored.value,
            stored.etag,
            digest,
            report.value.report if report else None,
            self._probes(stored.value),
        )

    async def list(
        self, caller: Caller, parent: str, size: int, token: str
    ) -> tuple[Sequence[AdapterDetails], str]:
        """One page, in order of tenant and name, and the next page's token."""
        tenant = parent_tenant(caller, parent)
        listing = f"adapters:{tenant or '*'}"
        after, limit = decode_token(token, listing), page_size(size)
        try:
            page = await self._registry.adapters(tenant, after, limit)
        except RegistryUnavailableError:
            page = self._remembered_page(tenant, after, limit)
        items, next_after = _bounded(page)
        return (
            [AdapterDetails(i.value, i.etag, probes=self._probes(i.value)) for i in items],
            encode_token(listing, next_after) if next_after else "",
        )

    async def pin(self, caller: Caller, name: str, is_pinned: bool, etag: str) -> AdapterDetails:
        """Keep what the adapter's names answer with on the nodes' devices, or no longer."""
        target = whole_adapter(caller, name)

        def change(adapter: Adapter) -> Adapter:
            if is_pinned:
                ready_revision(adapter, AdapterReference(target))
            return adapter.with_pin(is_pinned, self._clock())

        changed = await self.change(target, etag, change)
        log.info("residency.pinned" if is_pinned else "residency.unpinned", adapter=target.short)
        return changed

    async def set_alias(
        self, caller: Caller, name: str, alias: str, digest: str, etag: str
    ) -> AdapterDetails:
        """Point an alias at a READY revision; an empty digest removes the alias."""
        target = whole_adapter(caller, name)
        check_alias(alias, "alias")
        if digest:
            check_digest(digest, "digest")

        def change(adapter: Adapter) -> Adapter:
            if digest:
                ready_revision(adapter, AdapterReference(target, digest=digest))
            return adapter.with_alias(alias, digest, self._clock())

        changed = await self.change(target, etag, change)
        log.info("adapter.aliased", adapter=target.short, alias=alias, digest=digest)
        return changed

    async def stored(self, name: AdapterName) -> Stored[Adapter]:
        """The record, or AdapterNotFoundError."""
        stored = await self._registry.adapter(name)
        if stored is None:
            raise not_found(name)
        return stored

    async def change(
        self, name: AdapterName, etag: str, change: Callable[[Adapter], Adapter]
    ) -> AdapterDetails:
        """Apply a pure change to one adapter's record; a set `etag` must still be the record's."""

        async def attempt() -> tuple[Sequence[Change], None]:
            stored = await self.stored(name)
            check_etag(stored, etag)
            return [update(stored, change(stored.value))], None

        await self._transactions.run(attempt)
        stored = await self.stored(name)
        return AdapterDetails(stored.value, stored.etag, probes=self._probes(stored.value))

    def probe_of(self, digest: str) -> Probe | None:
        """What a node found out about a revision."""
        use = self._mirror.view.uses.get(digest)
        return use.probe if use else None

    def _probes(self, adapter: Adapter) -> dict[str, Probe]:
        probes = ((r.digest, self.probe_of(r.digest)) for r in adapter.revisions)
        return {digest: probe for digest, probe in probes if probe is not None}

    def _remembered(self, wanted: AdapterReference) -> Adapter:
        adapter = self._mirror.view.adapters.get(wanted.name.short)
        if adapter is None:
            # Not NOT_FOUND: it may have been registered since the registry went away.
            raise RegistryUnavailableError(
                f"the registry is away and {wanted.name.short!r} is not known from memory; try again",
                retry_after_s=1,
            )
        if wanted.alias is not None or wanted.digest is not None:
            ready_revision(adapter, wanted)
        return adapter

    def _remembered_page(self, tenant: str | None, after: str, limit: int) -> Page[Adapter]:
        view = self._mirror.view
        if not view.epoch:
            raise RegistryUnavailableError(
                "the registry is away and was not read before; try again", retry_after_s=1
            )
        prefix = f"{tenant}/" if tenant else ""
        names = sorted(n for n in view.adapters if n.startswith(prefix) and n > after)
        items = tuple(Stored(view.adapters[n], "") for n in names[:limit])
        return Page(items, names[limit - 1] if len(names) > limit else "")


def check_etag(stored: Stored[Adapter], etag: str) -> None:
    """Raise EtagMismatchError where a caller's etag is not the record's."""
    if etag and etag != stored.etag:
        raise EtagMismatchError(
            f"adapter {stored.value.name.short!r} changed since you read it; read it again, then repeat",
            metadata={"adapter": stored.value.name.short},
        )


def check_alias(alias: str, field: str) -> None:
    """Raise InvalidRequestError where an alias is outside the grammar of names."""
    try:
        check_segment(alias, "alias")
    except InvalidNameError as error:
        raise InvalidRequestError(str(error), metadata={"field": field}) from None


def check_digest(digest: str, field: str, what: str = "a revision's digest") -> None:
    """Raise InvalidRequestError for what can be no digest; `what` says whose is wanted."""
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise InvalidRequestError(
            f"{field} is {shown(digest)}; it must be {what}: 64 lower-case hex digits",
            metadata={"field": field},
        )


def _bounded(page: Page[Adapter]) -> tuple[Sequence[Stored[Adapter]], str]:
    size = 0
    for index, item in enumerate(page.items):
        size += _REVISION_BYTES * (1 + len(item.value.revisions)) + _ALIAS_BYTES * len(item.value.aliases)
        if size > _MAX_PAGE_BYTES and index:
            return page.items[:index], page.items[index - 1].value.name.short
    return page.items, page.next_after
