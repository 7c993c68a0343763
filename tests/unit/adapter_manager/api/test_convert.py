"""Every field of the messages, both ways."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_manager.api import convert, tenant_convert
from adapter_manager.application.adapters import AdapterDetails
from adapter_manager.application.ingest import UploadFile
from adapter_manager.application.residency import Placement
from adapter_manager.application.uploads import UploadResult
from adapter_manager.domain.adapter import Adapter, Revision, RevisionState, WantedTier
from adapter_manager.domain.errors import InvalidRequestError
from adapter_manager.domain.layout_options import ExpertOrientation, ExpertPacking, LayoutOptions
from adapter_manager.domain.node import ResidencyTier, ResidentAdapter
from adapter_manager.domain.probe import Probe, ProbeFindings, ProbeVerdict
from adapter_manager.domain.report import (
    MatchedSite,
    ReportedRole,
    SiteCoverage,
    TensorGroup,
    UploadReport,
)
from adapter_manager.domain.tenant import Tenant, TenantLimits, TokenRecord
from adapter_manager.ports import Stored
from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet.adapters.v1 import tenant_pb2
from lorikeet_contract.names import AdapterName
from lorikeet_rpc.tokens import new_token

DIGEST, OTHER = "d" * 64, "e" * 64
GROUP = TensorGroup(
    "layers.*.experts.*.gate_proj.lora_A.weight", ("0-1", "0,2"), 4, ReportedRole.LORA_A, (4, 8), "BF16", 256,
    "gate_up", "gate", "per-expert", 4, 0.5, "2/4", "lora_B is zero",
)  # fmt: skip
COVERAGE = SiteCoverage(
    "gate_up", "0-1", "2", 4, (2, 4), (0.5, 2.0), ("per-expert",), ("gate", "up"), 1, 2, 8, 77
)
REPORT = UploadReport(
    3, 2, 1, (MatchedSite("gate_up", 0, 4, (0.5, 2.0), "per-expert", 2, 77),), ("mind",), (GROUP,), 5,
    (COVERAGE,), 99,
)  # fmt: skip
REVISION = Revision(DIGEST, RevisionState.FAILED, 1.5, 9, "bfloat16", 16, "b" * 64, failure="gone")


PROBE = Probe(ProbeFindings(ProbeVerdict.CHANGES, 0.5, 0.25, 3, 9), "n:1", 2.5)


def set_fields(message: object) -> set[str]:
    """Names of the fields that are not at their default."""
    return {field.name for field, _ in message.ListFields()}  # pyright: ignore[reportAttributeAccessIssue]


def test_an_upload_header_is_read_whole() -> None:
    """All fields, both options."""
    message = pb.UploadHeader(
        adapter="t/a",
        aliases=["prod", "dev"],
        validate_only=True,
        request_id="r",
        files=[pb.FileHeader(name="x", size_bytes=5, sha256="5" * 64)],
        expert_packing=pb.EXPERT_PACKING_EXPERT_MAJOR,
        expert_orientation=pb.EXPERT_ORIENTATION_EXCHANGED,
        base_digest="b" * 64,
    )
    assert set_fields(message) == {f.name for f in message.DESCRIPTOR.fields}
    header = convert.upload_header(pb.UploadRequest(header=message))
    assert (header.adapter, header.aliases, header.is_validate_only) == ("t/a", ("prod", "dev"), True)
    assert (header.request_id, header.files) == ("r", (UploadFile("x", 5, "5" * 64),))
    assert header.base_digest == "b" * 64
    assert header.options == LayoutOptions(ExpertPacking.EXPERT_MAJOR, ExpertOrientation.EXCHANGED)


@pytest.mark.parametrize(
    "message",
    [
        pb.UploadRequest(),
        pb.UploadRequest(chunk=pb.FileChunk(file_name="x")),
        pb.UploadRequest(header=pb.UploadHeader(expert_packing=9)),  # pyright: ignore[reportArgumentType]
        pb.UploadRequest(header=pb.UploadHeader(expert_orientation=9)),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_is_no_header_is_refused(message: pb.UploadRequest) -> None:
    """A chunk first, nothing, an enum of another release."""
    with pytest.raises(InvalidRequestError):
        convert.upload_header(message)


def test_a_second_header_is_refused() -> None:
    """After the header come chunks only."""
    chunk = pb.FileChunk(file_name="x", offset=3, data=b"abc")
    assert convert.upload_chunk(pb.UploadRequest(chunk=chunk)) == chunk
    with pytest.raises(InvalidRequestError, match="chunks"):
        convert.upload_chunk(pb.UploadRequest(header=pb.UploadHeader()))


def test_revisions_and_reports_are_written_whole() -> None:
    """Every field of the message is set from the record."""
    done = UploadResult(AdapterName("t", "a"), REVISION, REPORT, is_created=True)
    result = convert.upload_response(done, PROBE)
    message = result.revision
    assert result.created
    assert set_fields(message) == {f.name for f in message.DESCRIPTOR.fields}
    assert message.name == f"tenants/t/adapters/a/revisions/{DIGEST}"
    assert (message.state, message.failure) == (pb.REVISION_STATE_FAILED, "gone")
    assert message.create_time.ToMilliseconds() == 1500
    report = message.report
    assert set_fields(report) == {f.name for f in report.DESCRIPTOR.fields}
    site = report.sites[0]
    assert set_fields(site) | {"layer"} == {f.name for f in site.DESCRIPTOR.fields}
    assert site.HasField("layer")
    assert (site.layer, list(site.scales), site.bytes) == (0, [0.5, 2.0], 77)
    (group,), (kind,) = report.tensors, report.coverage
    assert set_fields(group) == {f.name for f in group.DESCRIPTOR.fields}
    assert (group.key, list(group.indices), list(group.shape)) == (GROUP.key, ["0-1", "0,2"], [4, 8])
    assert (group.role, group.scaling, group.neutral) == (
        pb.TENSOR_ROLE_LORA_A,
        "2/4",
        "lora_B is zero",
    )
    assert set_fields(kind) == {f.name for f in kind.DESCRIPTOR.fields}
    assert (kind.layers, kind.layers_without, list(kind.ranks)) == ("0-1", "2", [2, 4])
    assert (kind.min_experts, kind.max_experts, kind.num_experts, kind.bytes) == (1, 2, 8, 77)
    assert (report.tensors_not_listed, report.file_bytes) == (5, 99)


def test_adapters_are_written_whole_with_the_report_on_its_revision() -> None:
    """The other revisions carry none."""
    ready = Revision(OTHER, RevisionState.READY, 2.0, 9, "float32", 4, "b" * 64)
    record = Adapter("t", "a", 1.0, 2.0, (REVISION, ready), (("prod", OTHER),), is_pinned=True)
    message = convert.adapter(AdapterDetails(record, "etag", OTHER, REPORT))
    assert set_fields(message) == {f.name for f in message.DESCRIPTOR.fields}
    assert (message.current_digest, dict(message.aliases)) == (OTHER, {"prod": OTHER})
    assert [r.HasField("report") for r in message.revisions] == [False, True]


@pytest.mark.parametrize("verdict", ProbeVerdict)
def test_probes_are_written_whole_at_their_revision(verdict: ProbeVerdict) -> None:
    """By the same name; a revision that no node probed has none."""
    ready = Revision(OTHER, RevisionState.READY, 2.0, 9, "float32", 4, "b" * 64)
    record = Adapter("t", "a", 1.0, 2.0, (REVISION, ready))
    probe = replace(PROBE, findings=replace(PROBE.findings, verdict=verdict))
    message = convert.adapter(AdapterDetails(record, "etag", probes={OTHER: probe}))
    assert [r.HasField("probe") for r in message.revisions] == [False, True]
    found = message.revisions[1].probe
    assert set_fields(found) == {f.name for f in found.DESCRIPTOR.fields}
    assert pb.ProbeVerdict.Name(found.verdict) == f"PROBE_VERDICT_{verdict.name}"
    assert (found.max_difference, found.noise, found.top1_changes, found.positions) == (0.5, 0.25, 3, 9)
    assert (found.node, found.time.ToMilliseconds()) == ("n:1", 2500)


@pytest.mark.parametrize("state", RevisionState)
def test_every_state_has_its_message(state: RevisionState) -> None:
    """By the same name."""
    record = Revision(DIGEST, state, 0, 0, "float32", 1, "b" * 64)
    message = convert.revision(AdapterName("t", "a"), record, None)
    assert pb.RevisionState.Name(message.state) == f"REVISION_STATE_{state.name}"


@pytest.mark.parametrize("tier", ResidencyTier)
def test_placements_are_written_whole(tier: ResidencyTier) -> None:
    """Tiers by the same name; wanting a revision absent is no wish, and is left out."""
    resident = ResidentAdapter(DIGEST, tier, is_pinned=True, leases=2, payload_bytes=5)
    placement = Placement("n:1", "i", AdapterName("t", "a"), resident, tier, is_pinned=True, failure="no")
    (message,) = convert.placements([placement])
    unwished = {"desired"} if tier is ResidencyTier.ABSENT else set[str]()
    assert set_fields(message) == {f.name for f in message.DESCRIPTOR.fields} - unwished
    assert pb.ResidencyState.Name(message.state) == f"RESIDENCY_STATE_{tier.name}"
    assert message.desired == (pb.RESIDENCY_STATE_UNSPECIFIED if unwished else message.state)


@pytest.mark.parametrize(
    ("tier", "wanted"),
    [
        (pb.RESIDENCY_STATE_UNSPECIFIED, WantedTier.ACTIVE),
        (pb.RESIDENCY_STATE_HOST, WantedTier.HOST),
        (pb.RESIDENCY_STATE_ACTIVE, WantedTier.ACTIVE),
    ],
)
def test_tiers_that_may_be_asked_for(tier: pb.ResidencyState, wanted: WantedTier) -> None:
    """ACTIVE unless HOST is asked for."""
    assert convert.wanted_tier(pb.LoadAdapterRequest(tier=tier)) is wanted


def test_other_tiers_are_refused() -> None:
    """DISK, COPYING, ABSENT and numbers of another release."""
    for tier in (1, 2, 4, 99):
        with pytest.raises(InvalidRequestError, match="tier"):
            convert.wanted_tier(pb.LoadAdapterRequest(tier=tier))  # pyright: ignore[reportArgumentType]


counts = st.none() | st.integers(0, 2**32 - 1)


@given(st.builds(TenantLimits, st.floats(allow_nan=False), counts, counts, counts))
def test_limits_round_trip(limits: TenantLimits) -> None:
    """What is not set stays not set, and 0 is not the same as not set."""
    assert tenant_convert.limits(tenant_convert.limits_message(limits)) == limits


def test_unset_limits_are_the_defaults() -> None:
    """An empty message, as an absent one reads."""
    assert tenant_convert.limits(tenant_pb2.TenantLimits()) == TenantLimits()


def test_tenants_and_tokens_are_written_whole_and_without_hashes() -> None:
    """The sha256 is nobody's business."""
    token = TokenRecord("id", "5" * 64, is_admin=True, create_time_s=1.0)
    message = tenant_convert.tenant(Stored(Tenant("t", 1.0, TenantLimits(), (token,)), "etag"))
    assert set_fields(message) == {f.name for f in message.DESCRIPTOR.fields}
    assert set_fields(message.tokens[0]) == {f.name for f in message.tokens[0].DESCRIPTOR.fields}
    assert "5" * 64 not in str(message)
    fresh = new_token()
    assert tenant_convert.token_response(fresh, token).token == fresh.token


def test_tenant_names() -> None:
    """Only the resource name's form."""
    assert tenant_convert.tenant_id("tenants/demo", "name") == "demo"
    for name in ("demo", "", "tenant/demo"):
        with pytest.raises(InvalidRequestError, match="parent"):
            tenant_convert.tenant_id(name, "parent")
