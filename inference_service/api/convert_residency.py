"""Residency messages to checked values and back. Pure. The manager is trusted; its bytes are checked."""

import math
import re
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from inference_service.api.adapter_intake import LoadHeader, PayloadChunk
from inference_service.api.catalog import CatalogAdapter
from inference_service.api.catalog_pages import CatalogPage, CatalogTenant
from inference_service.api.node_events import AdapterUsage
from inference_service.api.residency_service import ResidencyReport
from inference_service.domain.adapter import (
    AdapterDemand,
    AdapterSource,
    DesiredAdapter,
    ResidencyTier,
    ResidentAdapter,
)
from inference_service.domain.errors import InvalidRequestError
from inference_service.domain.probe import ProbeResult, ProbeVerdict
from inference_service.domain.tenant import TenantShare
from lorikeet.residency.v1 import residency_pb2
from lorikeet_contract.names import AdapterName, InvalidNameError, check_segment

_DIGEST_RE = re.compile(r"[0-9a-f]{64}")
_TIERS = {
    ResidencyTier.ABSENT: residency_pb2.RESIDENCY_TIER_ABSENT,
    ResidencyTier.DISK: residency_pb2.RESIDENCY_TIER_DISK,
    ResidencyTier.HOST: residency_pb2.RESIDENCY_TIER_HOST,
    ResidencyTier.COPYING: residency_pb2.RESIDENCY_TIER_COPYING,
    ResidencyTier.ACTIVE: residency_pb2.RESIDENCY_TIER_ACTIVE,
}
_VERDICTS = {
    ProbeVerdict.CHANGES: residency_pb2.PROBE_VERDICT_CHANGES,
    ProbeVerdict.CHANGES_NOTHING: residency_pb2.PROBE_VERDICT_CHANGES_NOTHING,
    ProbeVerdict.NOT_FINITE: residency_pb2.PROBE_VERDICT_NOT_FINITE,
}
_TIERS_BACK = {message: tier for tier, message in _TIERS.items()}
_Message = TypeVar("_Message")
_Value = TypeVar("_Value")
_WANTED = frozenset({ResidencyTier.HOST, ResidencyTier.ACTIVE})


def catalog_page(message: residency_pb2.SyncCatalogRequest) -> CatalogPage:
    """One page of a catalog.

    Raises:
        InvalidRequestError: a name, digest, path or limit in it is not well formed.
    """
    return CatalogPage(
        generation=message.generation,
        page=message.page,
        is_last=message.last_page,
        tenants=tuple(_tenant(t) for t in message.tenants),
        adapters=tuple(_adapter(a) for a in message.adapters),
        desired=tuple(_revision(r) for r in message.revisions),
        store_url=message.store_url,
    )


def load_part(message: residency_pb2.LoadAdapterRequest) -> LoadHeader | PayloadChunk:
    """A load's header or one of its chunks."""
    match message.WhichOneof("part"):
        case "header":
            header = message.header
            return LoadHeader(
                digest=digest("header.digest", header.digest),
                manifest=header.manifest,
                tier=_wanted_tier("header.tier", header.tier),
                pinned=header.pinned,
                store_path=_store_path("header.store_path", header.store_path),
            )
        case "chunk":
            return PayloadChunk(message.chunk.offset, message.chunk.data)
        case _:
            raise _invalid("part", "not set", "set header or chunk")


async def each(
    messages: AsyncIterator[_Message], convert: Callable[[_Message], _Value]
) -> AsyncIterator[_Value]:
    """Convert a stream as it comes."""
    async for message in messages:
        yield convert(message)


def digest(field: str, text: str) -> str:
    """Check a revision's digest."""
    if not _DIGEST_RE.fullmatch(text):
        raise _invalid(field, repr(text[:80]), "use 64 characters of lower-case hex")
    return text


def grace_s(message: residency_pb2.DrainRequest) -> float:
    """Check a drain's grace time."""
    if not math.isfinite(message.grace_s) or message.grace_s < 0:
        raise _invalid("grace_s", f"{message.grace_s:g}", "use a number of seconds, 0 or more")
    return message.grace_s


def keep_on_disk(message: residency_pb2.UnloadAdapterRequest) -> bool:
    """The flag, true by default."""
    return message.keep_on_disk if message.HasField("keep_on_disk") else True


def probe_response(result: ProbeResult) -> residency_pb2.ProbeAdapterResponse:
    """What a probe found."""
    return residency_pb2.ProbeAdapterResponse(
        verdict=_VERDICTS[result.verdict],
        max_difference=result.max_difference,
        noise=result.noise,
        top1_changes=result.top1_changes,
        positions=result.positions,
    )


def resident_adapter(adapter: ResidentAdapter) -> residency_pb2.ResidentAdapter:
    """Observed state of one revision."""
    return residency_pb2.ResidentAdapter(
        digest=adapter.digest,
        tier=_TIERS[adapter.tier],
        pinned=adapter.pinned,
        leases=adapter.leases,
        payload_bytes=adapter.payload_bytes,
        arena_bytes=adapter.arena_bytes,
        last_used_unix_s=adapter.last_used_unix_s,
        failure=adapter.failure,
    )


def list_response(report: ResidencyReport) -> residency_pb2.ListResidentResponse:
    """Everything that this node holds."""
    return residency_pb2.ListResidentResponse(
        instance_id=report.instance_id,
        catalog_generation=report.catalog_generation,
        adapters=map(resident_adapter, report.adapters),
        arena_total_bytes=report.arena_total_bytes,
        arena_used_bytes=report.arena_used_bytes,
        host_total_bytes=report.host_total_bytes,
        host_used_bytes=report.host_used_bytes,
    )


def watch_response(
    instance_id: str,
    generation: int,
    sequence: int,
    event: ResidencyReport | ResidentAdapter | AdapterDemand | AdapterUsage,
) -> residency_pb2.WatchResidencyResponse:
    """One event of a watch."""
    response = residency_pb2.WatchResidencyResponse(
        instance_id=instance_id, sequence=sequence, catalog_generation=generation
    )
    match event:
        case ResidencyReport():
            response.snapshot.CopyFrom(list_response(event))
        case ResidentAdapter():
            response.changed.CopyFrom(resident_adapter(event))
        case AdapterDemand():
            response.demand.digest = event.digest
            response.demand.waiting_requests = event.waiting_requests
        case AdapterUsage():
            response.usage.digest = event.digest
            response.usage.requests = event.requests
            response.usage.prompt_tokens = event.prompt_tokens
            response.usage.output_tokens = event.output_tokens
    return response


def _tenant(message: residency_pb2.CatalogTenant) -> CatalogTenant:
    if not math.isfinite(message.weight) or message.weight < 0:
        raise _invalid("tenants.weight", f"{message.weight:g}", "use a positive number")
    share = TenantShare(
        tenant=_segment("tenants.tenant", message.tenant),
        weight=message.weight or 1.0,
        max_running_requests=message.max_running_requests,
        max_waiting_requests=message.max_waiting_requests,
    )
    tokens = frozenset(digest("tenants.token_sha256", t) for t in message.token_sha256)
    admins = frozenset(digest("tenants.admin_token_sha256", t) for t in message.admin_token_sha256)
    return CatalogTenant(share, tokens, admins)


def _adapter(message: residency_pb2.CatalogAdapter) -> CatalogAdapter:
    return CatalogAdapter(
        name=AdapterName(
            _segment("adapters.tenant", message.tenant), _segment("adapters.adapter", message.adapter)
        ),
        current_digest=message.current_digest and digest("adapters.current_digest", message.current_digest),
        aliases={
            _segment("adapters.aliases", k): digest("adapters.aliases", v) for k, v in message.aliases.items()
        },
        digests=frozenset(digest("adapters.digests", d) for d in message.digests),
    )


def _revision(message: residency_pb2.CatalogRevision) -> DesiredAdapter:
    unspecified = message.desired == residency_pb2.RESIDENCY_TIER_UNSPECIFIED
    source = AdapterSource(
        digest("revisions.digest", message.digest),
        _store_path("revisions.store_path", message.store_path),
        message.payload_bytes,
    )
    tier = ResidencyTier.ABSENT if unspecified else _tier("revisions.desired", message.desired)
    return DesiredAdapter(source, tier, message.pinned)


def _tier(field: str, value: residency_pb2.ResidencyTier.ValueType) -> ResidencyTier:
    tier = _TIERS_BACK.get(value)
    if tier is None:
        raise _invalid(field, str(value), "use a tier that this release knows")
    return tier


def _wanted_tier(field: str, value: residency_pb2.ResidencyTier.ValueType) -> ResidencyTier:
    tier = _tier(field, value)
    if tier not in _WANTED:
        raise _invalid(field, tier.value, "use HOST or ACTIVE")
    return tier


def _store_path(field: str, path: str) -> str:
    """A relative path that stays below the store, whatever joins it."""
    if path and (not re.fullmatch(r"[A-Za-z0-9._/-]{1,512}", path) or path[0] == "/" or ".." in path):
        raise _invalid(field, repr(path[:80]), "use a relative path such as revisions/<digest>")
    return path


def _segment(field: str, text: str) -> str:
    try:
        return check_segment(text, field)
    except InvalidNameError as error:
        raise InvalidRequestError(str(error), metadata={"field": field}) from error


def _invalid(field: str, value: str, advice: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} is {value}: {advice}", metadata={"field": field, "value": value})
