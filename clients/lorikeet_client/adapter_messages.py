"""Registry values from their messages. Pure."""

from collections.abc import Iterable
from datetime import UTC, datetime

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet.adapters.v1 import tenant_pb2
from lorikeet_client.adapters import (
    Adapter,
    MatchedSite,
    Placement,
    Probe,
    ProbeVerdict,
    ResidencyState,
    Revision,
    RevisionState,
    SiteCoverage,
    TensorGroup,
    TensorRole,
    UploadReport,
    UploadResult,
)
from lorikeet_client.enums import from_number
from lorikeet_client.tenants import NewToken, Tenant, TenantLimits, TokenRecord


def adapter(message: pb.Adapter) -> Adapter:
    """An adapter with its revisions."""
    return Adapter(
        name=message.name,
        current_digest=message.current_digest,
        aliases=dict(message.aliases),
        revisions=tuple(revision(item) for item in message.revisions),
        pinned=message.pinned,
        create_time=_time(message, "create_time", message.create_time),
        update_time=_time(message, "update_time", message.update_time),
        etag=message.etag,
    )


def revision(message: pb.Revision) -> Revision:
    """One revision; `report` is None where the server did not keep it."""
    return Revision(
        name=message.name,
        digest=message.digest,
        state=from_number(RevisionState, pb.RevisionState, message.state, "REVISION_STATE_"),
        failure=message.failure,
        create_time=_time(message, "create_time", message.create_time),
        payload_bytes=message.payload_bytes,
        dtype=message.dtype,
        max_rank=message.max_rank,
        base_digest=message.base_digest,
        report=_report(message.report) if message.HasField("report") else None,
        probe=_probe(message.probe) if message.HasField("probe") else None,
    )


def upload_result(message: pb.UploadResponse) -> UploadResult:
    """The end of an upload."""
    return UploadResult(revision(message.revision), message.created)


def placements(messages: Iterable[pb.Placement]) -> tuple[Placement, ...]:
    """Where revisions are."""
    return tuple(
        Placement(
            node=item.node,
            instance_id=item.instance_id,
            revision=item.revision,
            state=_residency(item.state),
            desired=_residency(item.desired),
            pinned=item.pinned,
            bytes=item.bytes,
            leases=item.leases,
            failure=item.failure,
        )
        for item in messages
    )


def tenant(message: tenant_pb2.Tenant) -> Tenant:
    """A tenant."""
    return Tenant(
        name=message.name,
        create_time=_time(message, "create_time", message.create_time),
        limits=TenantLimits(**{field.name: value for field, value in message.limits.ListFields()}),
        tokens=tuple(_token_record(token) for token in message.tokens),
        etag=message.etag,
    )


def tenant_limits(limits: TenantLimits) -> tenant_pb2.TenantLimits:
    """None fields stay absent, so that defaults apply."""
    return tenant_pb2.TenantLimits(
        weight=limits.weight,
        max_running_requests=limits.max_running_requests,
        max_waiting_requests=limits.max_waiting_requests,
        max_adapters=limits.max_adapters,
    )


def new_token(message: tenant_pb2.CreateTokenResponse) -> NewToken:
    """A token, shown this once."""
    return NewToken(message.token, _token_record(message.record))


def _token_record(message: tenant_pb2.TokenRecord) -> TokenRecord:
    return TokenRecord(
        token_id=message.token_id,
        create_time=_time(message, "create_time", message.create_time),
        admin=message.admin,
    )


def _report(message: pb.UploadReport) -> UploadReport:
    return UploadReport(
        tensors_total=message.tensors_total,
        tensors_used=message.tensors_used,
        tensors_neutral=message.tensors_neutral,
        sites=tuple(
            MatchedSite(
                site=site.site,
                layer=site.layer if site.HasField("layer") else None,
                rank=site.rank,
                scales=tuple(site.scales),
                layout=site.layout,
                tensors=site.tensors,
                bytes=site.bytes,
            )
            for site in message.sites
        ),
        warnings=tuple(message.warnings),
        tensors=tuple(_tensor_group(group) for group in message.tensors),
        tensors_not_listed=message.tensors_not_listed,
        coverage=tuple(_coverage(kind) for kind in message.coverage),
        file_bytes=message.file_bytes,
    )


def _tensor_group(message: pb.TensorGroup) -> TensorGroup:
    return TensorGroup(
        key=message.key,
        indices=tuple(message.indices),
        count=message.count,
        role=from_number(TensorRole, pb.TensorRole, message.role, "TENSOR_ROLE_"),
        shape=tuple(message.shape),
        dtype=message.dtype,
        bytes=message.bytes,
        site=message.site,
        slice=message.slice,
        layout=message.layout,
        rank=message.rank,
        scale=message.scale,
        scaling=message.scaling,
        neutral=message.neutral,
    )


def _coverage(message: pb.SiteCoverage) -> SiteCoverage:
    return SiteCoverage(
        site=message.site,
        layers=message.layers,
        layers_without=message.layers_without,
        tensors=message.tensors,
        ranks=tuple(message.ranks),
        scales=tuple(message.scales),
        layouts=tuple(message.layouts),
        slices=tuple(message.slices),
        min_experts=message.min_experts,
        max_experts=message.max_experts,
        num_experts=message.num_experts,
        bytes=message.bytes,
    )


def _probe(message: pb.Probe) -> Probe:
    return Probe(
        verdict=from_number(ProbeVerdict, pb.ProbeVerdict, message.verdict, "PROBE_VERDICT_"),
        max_difference=message.max_difference,
        noise=message.noise,
        top1_changes=message.top1_changes,
        positions=message.positions,
        node=message.node,
        time=_time(message, "time", message.time),
    )


def _residency(number: int) -> ResidencyState:
    return from_number(ResidencyState, pb.ResidencyState, number, "RESIDENCY_STATE_")


def _time(owner: Message, field: str, stamp: Timestamp) -> datetime | None:
    return stamp.ToDatetime(tzinfo=UTC) if owner.HasField(field) else None
