"""A manager's series without a manager."""

import asyncio
import time
from pathlib import Path
from types import MappingProxyType

import pytest

from adapter_manager.application.residency import Fleet
from adapter_manager.domain.adapter import Adapter, Revision, RevisionState
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.errors import ArtifactMissingError, ArtifactStoreError, NodeCallError
from adapter_manager.domain.tenant import Tenant
from adapter_manager.metrics import ManagerMetrics, ObservedArtifacts
from adapter_manager.metrics.push_metrics import Push
from adapter_manager.metrics.registry_series import MAX_TENANTS, RegistryCounts
from lorikeet_contract.status import StatusCode
from lorikeet_rpc.metrics import CallEnd
from tests.support.built_revisions import MemoryArtifacts, make_built
from tests.support.declared_series import declared
from tests.support.manager_parts import make_parts
from tests.support.memory_registry import MemoryRegistry
from tests.support.metrics_table import documented

UPLOAD = "/lorikeet.adapters.v1.AdapterService/Upload"


def make_metrics(tmp_path: Path) -> ManagerMetrics:
    """Over an empty registry, without nodes."""
    metrics = ManagerMetrics()
    ObservedArtifacts(MemoryArtifacts(), metrics.registry)
    mirror = make_parts(MemoryRegistry(), MemoryArtifacts(), tmp_path).mirror
    metrics.follow(mirror, Fleet((), mirror))
    return metrics


async def test_declared_labels_are_the_documented_ones(tmp_path: Path) -> None:
    """Also of what has no samples yet."""
    registry = make_metrics(tmp_path).registry
    assert declared(registry) == {row.name: row.labels for row in documented("manager").values()}


async def test_a_loop_that_is_held_up(tmp_path: Path) -> None:
    """The scrape is served all the same, and says how old its word is."""
    metrics = make_metrics(tmp_path)
    scrape = asyncio.create_task(
        asyncio.to_thread(metrics.registry.get_sample_value, "lorikeet_manager_report_age_seconds")
    )
    await asyncio.sleep(0)
    time.sleep(1.5)  # noqa: ASYNC251 (as a bug would)
    age_s = await scrape
    assert age_s is not None
    assert age_s >= 1


@pytest.mark.parametrize(
    ("facts", "code", "reason", "result"),
    [
        ({"upload": "created"}, "OK", "", "created"),
        ({"upload": "existing"}, "OK", "", "existing"),
        ({"upload": "validated"}, "OK", "", "validated"),
        ({}, "INVALID_ARGUMENT", "INVALID_ADAPTER", "rejected"),
        ({}, "INTERNAL", "INTERNAL", "rejected"),
        ({}, "CANCELLED", "", "interrupted"),
        ({}, "DEADLINE_EXCEEDED", "", "interrupted"),
        # It is registered, though its client did not hear of it.
        ({"upload": "created"}, "CANCELLED", "", "created"),
    ],
)
def test_each_upload_has_one_result(facts: dict[str, str], code: str, reason: str, result: str) -> None:
    """And other calls have none."""
    metrics = ManagerMetrics()
    metrics.uploads.finished(CallEnd(UPLOAD, code, reason, 1.0, facts))
    metrics.uploads.finished(CallEnd(UPLOAD.replace("Upload", "GetUpload"), code, reason, 1.0, facts))
    found = {
        sample.labels["result"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "lorikeet_uploads_total"
    }
    assert {key: value for key, value in found.items() if value} == {result: 1}
    rejected = metrics.registry.get_sample_value("lorikeet_uploads_rejected_total", {"reason": reason})
    assert rejected == (1 if result == "rejected" else None)


def test_the_largest_tenants_are_shown() -> None:
    """A bounded number, ties by name; all of them count in the sums."""
    tenants = {f"t{n:02}": Tenant(f"t{n:02}", 1.0) for n in range(50)}
    adapters = [make_adapter(f"t{n:02}", str(a)) for n in range(50) for a in range(n // 2)]
    view = RegistryView(
        "e", 1, MappingProxyType(tenants), adapters=MappingProxyType({a.name.short: a for a in adapters})
    )
    counts = RegistryCounts.of(view)
    assert counts.num_adapters == len(adapters)
    assert counts.revisions == {RevisionState.READY: len(adapters), RevisionState.PENDING: len(adapters)}
    assert len(counts.adapters_of) == MAX_TENANTS
    assert counts.adapters_of[:3] == (("t48", 24), ("t49", 24), ("t46", 23))
    assert counts.revisions_of["t48"] == {RevisionState.READY: 24, RevisionState.PENDING: 24}


def make_adapter(tenant: str, name: str) -> Adapter:
    """With a READY and a PENDING revision."""
    revisions = tuple(
        Revision(state.value, state, 1.0, 1, "float32", 1, "b")
        for state in (RevisionState.READY, RevisionState.PENDING)
    )
    return Adapter(tenant, name, 1.0, 1.0, revisions)


async def test_artifact_errors_are_counted(tmp_path: Path) -> None:
    """By operation and reason; what succeeds is timed."""

    class Broken(MemoryArtifacts):
        async def manifest(self, digest: str) -> bytes:
            raise ArtifactMissingError("gone") if digest == "gone" else ArtifactStoreError("away")

    metrics = ManagerMetrics()
    store = ObservedArtifacts(Broken(), metrics.registry)
    built = make_built(tmp_path, "one")
    assert await store.put(built)
    assert b"".join([chunk async for chunk in store.payload(built.digest)])
    for digest in ("gone", "x", "x"):
        with pytest.raises(ArtifactStoreError):
            await store.manifest(digest)
    value = metrics.registry.get_sample_value
    for operation, count in (("put", 1), ("payload", 1), ("manifest", 0)):
        name = "lorikeet_artifact_store_duration_seconds_count"
        assert value(name, {"operation": operation}) == count
    for reason, count in (("ARTIFACT_MISSING", 1), ("ARTIFACT_STORE", 2)):
        labels = {"operation": "manifest", "reason": reason}
        assert value("lorikeet_artifact_store_errors_total", labels) == count


def test_pushes_are_counted_with_their_failures() -> None:
    """A cancelled one is a push and no failure."""
    metrics = ManagerMetrics()
    for error in (
        None,
        NodeCallError("n:1", StatusCode.UNAVAILABLE, "DRAINING", "no"),
        asyncio.CancelledError(),
    ):
        try:
            with metrics.pushes.counted("n:1", Push.LOAD):
                if error:
                    raise error
        except (NodeCallError, asyncio.CancelledError):
            continue
    value = metrics.registry.get_sample_value
    assert value("lorikeet_node_pushes_total", {"node": "n:1", "push": "load"}) == 3
    labels = {"node": "n:1", "push": "load", "reason": "DRAINING"}
    assert value("lorikeet_node_push_failures_total", labels) == 1


def test_the_store_up_and_away() -> None:
    """Not up before it answered; a reconnect is an answer after a failure."""
    metrics = ManagerMetrics()
    value = metrics.registry.get_sample_value
    assert value("lorikeet_redis_up") == 0
    for answers, up, reconnects in ((True, 1, 0), (False, 0, 0), (False, 0, 0), (True, 1, 1), (True, 1, 1)):
        if answers:
            metrics.store.answered("read", 0.01)
        else:
            metrics.store.failed("TimeoutError")
        assert value("lorikeet_redis_up") == up
        assert value("lorikeet_redis_reconnects_total") == reconnects
    assert value("lorikeet_redis_errors_total", {"error": "TimeoutError"}) == 2
    assert value("lorikeet_redis_command_duration_seconds_count", {"command": "read"}) == 3
