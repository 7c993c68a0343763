"""Conversion of residency messages: every field both ways."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.api import convert_residency as convert
from inference_service.api.node_events import AdapterUsage
from inference_service.api.residency_service import ResidencyReport
from inference_service.domain.adapter import AdapterDemand, ResidencyTier, ResidentAdapter
from inference_service.domain.errors import InvalidRequestError
from lorikeet.residency.v1 import residency_pb2
from lorikeet_contract.names import AdapterName
from tests.support.node import catalog_pages

_counts = st.integers(0, 2**32 - 1)
_digests = st.text(alphabet="0123456789abcdef", min_size=64, max_size=64)
_adapters = st.builds(
    ResidentAdapter, _digests, st.sampled_from(ResidencyTier), st.booleans(), _counts, _counts, _counts,
    st.floats(0, 1e12), st.text(max_size=20),
)  # fmt: skip


def back(message: residency_pb2.ResidentAdapter) -> ResidentAdapter:
    """The inverse, by names alone: it shares no table with the code under test."""
    values: dict[str, Any] = {f.name: getattr(message, f.name) for f in message.DESCRIPTOR.fields}
    name = residency_pb2.ResidencyTier.Name(message.tier).removeprefix("RESIDENCY_TIER_").lower()
    return ResidentAdapter(**{**values, "tier": ResidencyTier(name)})


@given(_adapters)
def test_resident_adapter_round_trip(adapter: ResidentAdapter) -> None:
    """Every field comes back."""
    assert back(convert.resident_adapter(adapter)) == adapter


@given(st.builds(ResidencyReport, st.text(max_size=9), _counts, st.tuples(_adapters), *[_counts] * 4))
def test_report_round_trip(report: ResidencyReport) -> None:
    """Every field of a snapshot, also inside a watch event."""
    message = convert.watch_response("i", 5, 6, report)
    assert (message.instance_id, message.catalog_generation, message.sequence) == ("i", 5, 6)
    shown = {f.name: getattr(message.snapshot, f.name) for f in message.snapshot.DESCRIPTOR.fields}
    shown["adapters"] = tuple(map(back, message.snapshot.adapters))
    assert ResidencyReport(**shown) == report


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (ResidentAdapter("1" * 64, ResidencyTier.HOST), "changed"),
        (AdapterDemand("1" * 64, 3), "demand"),
        (AdapterUsage("1" * 64, 1, 2, 3), "usage"),
    ],
)
def test_watch_events(event: Any, kind: str) -> None:
    """Each kind of event, field by field."""
    message = convert.watch_response("i", 1, 2, event)
    assert message.WhichOneof("event") == kind
    inner = getattr(message, kind)
    names = [f.name for f in dataclasses.fields(event) if f.name != "tier"]
    assert [getattr(inner, n) for n in names] == [getattr(event, n) for n in names]


def test_catalog_page() -> None:
    """Tenants with their shares and tokens, adapters with aliases, revisions with tiers."""
    first, second = catalog_pages(7)
    second.revisions[0].desired = residency_pb2.RESIDENCY_TIER_ACTIVE
    second.revisions[0].pinned = True
    page = convert.catalog_page(second)
    assert (page.generation, page.page, page.is_last) == (7, 1, True)
    assert [a.name for a in page.adapters][:1] == [AdapterName("acme", "pirate")]
    assert page.adapters[0].aliases["prod"] == "1" * 64
    assert (page.desired[0].tier, page.desired[0].pinned) == (ResidencyTier.ACTIVE, True)
    assert page.desired[1].tier is ResidencyTier.ABSENT
    tenants = convert.catalog_page(first).tenants
    assert (tenants[0].share.weight, tenants[1].share.weight) == (2.0, 1.0)
    assert len(tenants[0].token_sha256) == len(tenants[0].admin_token_sha256) == 1


@pytest.mark.parametrize("grace_s", [-1.0, float("nan"), float("inf")])
def test_grace_times_that_are_none(grace_s: float) -> None:
    """Drain takes a finite time of 0 or more."""
    with pytest.raises(InvalidRequestError, match="grace_s"):
        convert.grace_s(residency_pb2.DrainRequest(grace_s=grace_s))


def test_keep_on_disk_is_true_by_default() -> None:
    """Absent means keep."""
    assert convert.keep_on_disk(residency_pb2.UnloadAdapterRequest())
    assert not convert.keep_on_disk(residency_pb2.UnloadAdapterRequest(keep_on_disk=False))


@pytest.mark.parametrize("path", ["/x", "a/../b", "..", "a\x00b", "a b", "~/x", "x" * 600, "s3://b/x"])
def test_store_paths_that_leave_the_store(path: str) -> None:
    """Only plain relative paths."""
    header = residency_pb2.LoadHeader(
        digest="1" * 64, tier=residency_pb2.RESIDENCY_TIER_HOST, store_path=path
    )
    with pytest.raises(InvalidRequestError, match="relative path"):
        convert.load_part(residency_pb2.LoadAdapterRequest(header=header))
