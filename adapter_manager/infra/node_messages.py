"""Between the domain and the messages that nodes speak. Pure, apart from reading the payload's chunks."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable

from adapter_manager.domain.adapter import Adapter
from adapter_manager.domain.catalog import NodeCatalog, WantedRevision
from adapter_manager.domain.node import (
    BaseModel,
    Demanded,
    NodeEvent,
    NodeLimits,
    NodeModel,
    ResidencyChanged,
    ResidencySnapshot,
    ResidencyTier,
    ResidentAdapter,
    Used,
)
from adapter_manager.domain.probe import ProbeFindings, ProbeVerdict
from adapter_manager.domain.tenant import Tenant
from adapter_manager.ports import LoadOrder
from lorikeet.inference.v1 import model_pb2
from lorikeet.residency.v1 import residency_pb2 as pb
from lorikeet_contract.status import StatusCode
from lorikeet_rpc.schema_message import schema_from_message

FAILED_PRECONDITION = StatusCode.FAILED_PRECONDITION

# Half of gRPC's default limit, so that a page's last entry may be large.
_PAGE_BYTES = 2 * 1024 * 1024

_TIERS = {
    ResidencyTier.ABSENT: pb.RESIDENCY_TIER_ABSENT,
    ResidencyTier.DISK: pb.RESIDENCY_TIER_DISK,
    ResidencyTier.HOST: pb.RESIDENCY_TIER_HOST,
    ResidencyTier.COPYING: pb.RESIDENCY_TIER_COPYING,
    ResidencyTier.ACTIVE: pb.RESIDENCY_TIER_ACTIVE,
}
_VERDICTS = {
    pb.PROBE_VERDICT_CHANGES: ProbeVerdict.CHANGES,
    pb.PROBE_VERDICT_CHANGES_NOTHING: ProbeVerdict.CHANGES_NOTHING,
    pb.PROBE_VERDICT_NOT_FINITE: ProbeVerdict.NOT_FINITE,
}
_TIERS_BACK = {message: tier for tier, message in _TIERS.items()}


def node_model(message: model_pb2.GetModelResponse) -> NodeModel:
    """What GetModel says. Raises ValueError where the schema is of another release."""
    limits = message.limits
    return NodeModel(
        instance_id=message.instance_id,
        model=BaseModel(
            name=message.name,
            architecture=message.architecture,
            base_digest=message.base_digest,
            dtype=message.dtype,
            max_rank=limits.max_rank,
            schema=schema_from_message(message.lora_schema),
        ),
        limits=NodeLimits(
            max_rank=limits.max_rank,
            max_active_adapters=limits.max_active_adapters,
            arena_bytes=limits.adapter_arena_bytes,
            host_pool_bytes=limits.host_pool_bytes,
        ),
    )


def event(message: pb.WatchResidencyResponse) -> NodeEvent | None:
    """One event; None for kinds that a newer node may send."""
    match message.WhichOneof("event"):
        case "snapshot":
            return snapshot(message.snapshot)
        case "changed":
            return ResidencyChanged(resident_adapter(message.changed))
        case "demand":
            return Demanded(message.demand.digest, message.demand.waiting_requests)
        case "usage":
            usage = message.usage
            return Used(usage.digest, usage.requests, usage.prompt_tokens, usage.output_tokens)
        case None:
            return None


def snapshot(message: pb.ListResidentResponse) -> ResidencySnapshot:
    """All that a node holds."""
    return ResidencySnapshot(
        instance_id=message.instance_id,
        catalog_generation=message.catalog_generation,
        adapters=tuple(resident_adapter(a) for a in message.adapters),
    )


def resident_adapter(message: pb.ResidentAdapter) -> ResidentAdapter:
    """One revision on a node."""
    return ResidentAdapter(
        digest=message.digest,
        tier=_TIERS_BACK.get(message.tier, ResidencyTier.ABSENT),
        is_pinned=message.pinned,
        leases=message.leases,
        payload_bytes=message.payload_bytes,
        arena_bytes=message.arena_bytes,
        failure=message.failure,
    )


def probe_findings(message: pb.ProbeAdapterResponse) -> ProbeFindings:
    """What a probe found. Raises ValueError where the verdict is of another release."""
    if message.verdict not in _VERDICTS:
        raise ValueError(f"the node's probe has the unknown verdict {message.verdict}")
    return ProbeFindings(
        verdict=_VERDICTS[message.verdict],
        max_difference=message.max_difference,
        noise=message.noise,
        top1_changes=message.top1_changes,
        positions=message.positions,
    )


def catalog_pages(catalog: NodeCatalog) -> list[pb.SyncCatalogRequest]:
    """The catalog in pages that any client's default message limit lets through; at least one."""
    entries: list[pb.CatalogTenant | pb.CatalogAdapter | pb.CatalogRevision] = [
        *(_tenant(t) for t in catalog.tenants),
        *(_adapter(a) for a in catalog.adapters),
        *(_revision(r) for r in catalog.revisions),
    ]
    pages = [_page(catalog, 0)]
    size = 0
    for entry in entries:
        entry_bytes = entry.ByteSize() + 8
        if size and size + entry_bytes > _PAGE_BYTES:
            pages.append(_page(catalog, len(pages)))
            size = 0
        size += entry_bytes
        match entry:
            case pb.CatalogTenant():
                pages[-1].tenants.append(entry)
            case pb.CatalogAdapter():
                pages[-1].adapters.append(entry)
            case _:
                pages[-1].revisions.append(entry)
    pages[-1].last_page = True
    return pages


async def load_parts(
    order: LoadOrder, payload: AsyncIterator[bytes] | None
) -> AsyncGenerator[pb.LoadAdapterRequest]:
    """The header, then the payload where there is one to send."""
    yield pb.LoadAdapterRequest(
        header=pb.LoadHeader(
            digest=order.digest,
            manifest=order.manifest,
            tier=_TIERS[order.tier],
            pinned=order.is_pinned,
            store_path=order.store_path,
        )
    )
    if payload is None:
        return
    offset = 0
    async for data in payload:
        yield pb.LoadAdapterRequest(chunk=pb.PayloadChunk(offset=offset, data=data))
        offset += len(data)


def _page(catalog: NodeCatalog, number: int) -> pb.SyncCatalogRequest:
    return pb.SyncCatalogRequest(generation=catalog.generation, page=number, store_url=catalog.store_url)


def _tenant(tenant: Tenant) -> pb.CatalogTenant:
    return pb.CatalogTenant(
        tenant=tenant.tenant_id,
        weight=tenant.limits.weight,
        max_running_requests=tenant.limits.max_running_requests or 0,
        max_waiting_requests=tenant.limits.max_waiting_requests or 0,
        token_sha256=[t.sha256 for t in tenant.tokens],
        admin_token_sha256=[t.sha256 for t in tenant.tokens if t.is_admin],
    )


def _adapter(adapter: Adapter) -> pb.CatalogAdapter:
    return pb.CatalogAdapter(
        tenant=adapter.tenant,
        adapter=adapter.adapter,
        current_digest=adapter.current_digest,
        aliases=dict(adapter.aliases),
        digests=_digests(adapter),
    )


def _digests(adapter: Adapter) -> Iterable[str]:
    return [r.digest for r in adapter.revisions]


def _revision(wish: WantedRevision) -> pb.CatalogRevision:
    return pb.CatalogRevision(
        digest=wish.digest,
        store_path=f"revisions/{wish.digest}",
        payload_bytes=wish.payload_bytes,
        desired=_TIERS[wish.tier],
        pinned=wish.is_pinned,
    )
