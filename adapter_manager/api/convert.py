"""Adapters, uploads and placements as messages and back. Pure: no I/O; names are parsed further inside."""

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from adapter_manager.application.adapters import AdapterDetails
from adapter_manager.application.ingest import UploadFile
from adapter_manager.application.residency import Placement
from adapter_manager.application.uploads import UploadHeader, UploadResult
from adapter_manager.domain.adapter import Revision, RevisionState, WantedTier
from adapter_manager.domain.errors import InvalidRequestError
from adapter_manager.domain.layout_options import ExpertOrientation, ExpertPacking, LayoutOptions
from adapter_manager.domain.node import ResidencyTier
from adapter_manager.domain.probe import Probe, ProbeVerdict
from adapter_manager.domain.report import (
    MatchedSite,
    ReportedRole,
    SiteCoverage,
    TensorGroup,
    UploadReport,
)
from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_contract.names import AdapterName

_STATES = {
    RevisionState.PENDING: pb.REVISION_STATE_PENDING,
    RevisionState.READY: pb.REVISION_STATE_READY,
    RevisionState.FAILED: pb.REVISION_STATE_FAILED,
    RevisionState.DELETING: pb.REVISION_STATE_DELETING,
}
_TIERS = {
    ResidencyTier.ABSENT: pb.RESIDENCY_STATE_ABSENT,
    ResidencyTier.DISK: pb.RESIDENCY_STATE_DISK,
    ResidencyTier.HOST: pb.RESIDENCY_STATE_HOST,
    ResidencyTier.COPYING: pb.RESIDENCY_STATE_COPYING,
    ResidencyTier.ACTIVE: pb.RESIDENCY_STATE_ACTIVE,
}
_VERDICTS = {
    ProbeVerdict.CHANGES: pb.PROBE_VERDICT_CHANGES,
    ProbeVerdict.CHANGES_NOTHING: pb.PROBE_VERDICT_CHANGES_NOTHING,
    ProbeVerdict.NOT_FINITE: pb.PROBE_VERDICT_NOT_FINITE,
}
_ROLES = {
    ReportedRole.LORA_A: pb.TENSOR_ROLE_LORA_A,
    ReportedRole.LORA_B: pb.TENSOR_ROLE_LORA_B,
    ReportedRole.BASE_WEIGHT: pb.TENSOR_ROLE_BASE_WEIGHT,
}
_WANTED = {
    pb.RESIDENCY_STATE_UNSPECIFIED: WantedTier.ACTIVE,
    pb.RESIDENCY_STATE_HOST: WantedTier.HOST,
    pb.RESIDENCY_STATE_ACTIVE: WantedTier.ACTIVE,
}
_PACKINGS = {
    pb.EXPERT_PACKING_UNSPECIFIED: None,
    pb.EXPERT_PACKING_RANK_MAJOR: ExpertPacking.RANK_MAJOR,
    pb.EXPERT_PACKING_EXPERT_MAJOR: ExpertPacking.EXPERT_MAJOR,
}
_ORIENTATIONS = {
    pb.EXPERT_ORIENTATION_UNSPECIFIED: None,
    pb.EXPERT_ORIENTATION_STANDARD: ExpertOrientation.STANDARD,
    pb.EXPERT_ORIENTATION_EXCHANGED: ExpertOrientation.EXCHANGED,
}


def upload_header(message: pb.UploadRequest) -> UploadHeader:
    """The header that an upload's first message must be."""
    if message.WhichOneof("part") != "header":
        raise InvalidRequestError(
            "the first message of an upload must be its header", metadata={"field": "header"}
        )
    header = message.header
    if header.expert_packing not in _PACKINGS:
        raise _unknown_enum("header.expert_packing", header.expert_packing)
    if header.expert_orientation not in _ORIENTATIONS:
        raise _unknown_enum("header.expert_orientation", header.expert_orientation)
    return UploadHeader(
        adapter=header.adapter,
        aliases=tuple(header.aliases),
        is_validate_only=header.validate_only,
        request_id=header.request_id,
        files=tuple(UploadFile(f.name, f.size_bytes, f.sha256) for f in header.files),
        options=LayoutOptions(_PACKINGS[header.expert_packing], _ORIENTATIONS[header.expert_orientation]),
        base_digest=header.base_digest,
    )


def upload_chunk(message: pb.UploadRequest) -> pb.FileChunk:
    """The chunk that any later message must be."""
    if message.WhichOneof("part") != "chunk":
        raise InvalidRequestError("after the header an upload has only chunks", metadata={"field": "chunk"})
    return message.chunk


def upload_response(result: UploadResult, known: Probe | None = None) -> pb.UploadResponse:
    """What an upload came to, and what a node found out about the same content before."""
    return pb.UploadResponse(
        revision=revision(result.name, result.revision, result.report, known), created=result.is_created
    )


def upload_outcome(result: UploadResult) -> str:
    """The word for it in log lines and metrics."""
    if result.revision.state is RevisionState.PENDING:
        return "validated"
    if result.is_mended:
        return "mended"
    return "created" if result.is_created else "existing"


def adapter(details: AdapterDetails) -> pb.Adapter:
    """An adapter with its revisions; the report is on the one revision that it was asked for."""
    record = details.adapter
    return pb.Adapter(
        name=str(record.name),
        current_digest=record.current_digest,
        aliases=dict(record.aliases),
        revisions=[
            revision(
                record.name,
                r,
                details.report if r.digest == details.report_digest else None,
                details.probes.get(r.digest),
            )
            for r in record.revisions
        ],
        pinned=record.is_pinned,
        create_time=timestamp(record.create_time_s),
        update_time=timestamp(record.update_time_s),
        etag=details.etag,
    )


def revision(
    name: AdapterName, record: Revision, report: UploadReport | None, known: Probe | None = None
) -> pb.Revision:
    """One revision, with its probe if there was one."""
    return pb.Revision(
        name=name.revision(record.digest),
        digest=record.digest,
        state=_STATES[record.state],
        failure=record.failure,
        create_time=timestamp(record.create_time_s),
        payload_bytes=record.payload_bytes,
        dtype=record.dtype,
        max_rank=record.max_rank,
        base_digest=record.base_digest,
        report=upload_report(report) if report else None,
        probe=probe(known) if known else None,
    )


def probe(record: Probe) -> pb.Probe:
    """What a node found out about a revision."""
    found = record.findings
    return pb.Probe(
        verdict=_VERDICTS[found.verdict],
        max_difference=found.max_difference,
        noise=found.noise,
        top1_changes=found.top1_changes,
        positions=found.positions,
        node=record.node,
        time=timestamp(record.time_s),
    )


def upload_report(report: UploadReport) -> pb.UploadReport:
    """What the files were found to hold."""
    return pb.UploadReport(
        tensors_total=report.tensors_total,
        tensors_used=report.tensors_used,
        tensors_neutral=report.tensors_neutral,
        sites=[matched_site(site) for site in report.sites],
        warnings=report.warnings,
        tensors=[tensor_group(group) for group in report.tensors],
        tensors_not_listed=report.tensors_not_listed,
        coverage=[site_coverage(kind) for kind in report.coverage],
        file_bytes=report.file_bytes,
    )


def tensor_group(group: TensorGroup) -> pb.TensorGroup:
    """Tensors that were read alike."""
    return pb.TensorGroup(
        key=group.key,
        indices=group.indices,
        count=group.count,
        role=_ROLES[group.role],
        shape=group.shape,
        dtype=group.dtype,
        bytes=group.bytes,
        site=group.site,
        slice=group.slice,
        layout=group.layout,
        rank=group.rank,
        scale=group.scale,
        scaling=group.scaling,
        neutral=group.neutral,
    )


def site_coverage(kind: SiteCoverage) -> pb.SiteCoverage:
    """What an adapter has for one kind of site."""
    return pb.SiteCoverage(
        site=kind.site,
        layers=kind.layers,
        layers_without=kind.layers_without,
        tensors=kind.tensors,
        ranks=kind.ranks,
        scales=kind.scales,
        layouts=kind.layouts,
        slices=kind.slices,
        min_experts=kind.min_experts,
        max_experts=kind.max_experts,
        num_experts=kind.num_experts,
        bytes=kind.bytes,
    )


def matched_site(site: MatchedSite) -> pb.MatchedSite:
    """One place of the base model and what was found for it."""
    return pb.MatchedSite(
        site=site.site,
        layer=site.layer,
        rank=site.rank,
        scales=site.scales,
        layout=site.layout,
        tensors=site.tensors,
        bytes=site.bytes,
    )


def wanted_tier(message: pb.LoadAdapterRequest) -> WantedTier:
    """HOST or ACTIVE, the latter by default."""
    if message.tier not in _WANTED:
        raise InvalidRequestError(
            "tier must be RESIDENCY_STATE_HOST or RESIDENCY_STATE_ACTIVE, or be left out for ACTIVE",
            metadata={"field": "tier", "value": str(message.tier)},
        )
    return _WANTED[message.tier]


def placements(records: Iterable[Placement]) -> list[pb.Placement]:
    """Where revisions are and should be."""
    return [
        pb.Placement(
            node=p.node,
            instance_id=p.instance_id,
            revision=p.name.revision(p.resident.digest),
            state=_TIERS[p.resident.tier],
            # Wanting nothing is no wish: what is there came on demand and may stay.
            desired=_TIERS[p.desired]
            if p.desired is not ResidencyTier.ABSENT
            else pb.RESIDENCY_STATE_UNSPECIFIED,
            pinned=p.is_pinned,
            bytes=p.resident.payload_bytes,
            leases=p.resident.leases,
            failure=p.failure,
        )
        for p in records
    ]


def timestamp(seconds: float) -> Timestamp:
    """A point in time, to the microsecond."""
    result = Timestamp()
    result.FromMicroseconds(round(seconds * 1e6))
    return result


def _unknown_enum(field: str, value: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field} is {value}, which this server does not know; leave it out, or upgrade the server",
        metadata={"field": field, "value": str(value)},
    )
