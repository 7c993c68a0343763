"""Adapters are compared with the base model once by themselves, and whenever somebody asks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from adapter_manager.domain.adapter import WantedTier
from adapter_manager.domain.errors import (
    AdapterNotFoundError,
    BaseMismatchError,
    NodeCallError,
    NodeUnavailableError,
)
from adapter_manager.domain.probe import ProbeVerdict
from lorikeet.residency.v1 import residency_pb2 as pb
from tests.support.built_revisions import BASE_DIGEST
from tests.support.fake_node import FakeNode, RefusedError
from tests.support.manager_parts import Parts
from tests.support.node_stack import DEMO, HOST, OTHER, stack
from tests.support.waiting import eventually


@asynccontextmanager
async def probing(
    tmp_path: Path, *, num_nodes: int = 1, **options: object
) -> AsyncIterator[tuple[Parts, list[FakeNode]]]:
    """A manager that probes by itself."""
    async with stack(tmp_path, num_nodes=num_nodes, probes_on_load=True, **options) as (parts, nodes):
        task = asyncio.create_task(parts.probes.run())
        try:
            yield parts, nodes
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_an_adapter_is_probed_once_where_it_is_active_first(tmp_path: Path) -> None:
    """Not while it is only in host memory, and not again on another node or after a restart."""
    async with probing(tmp_path, num_nodes=2) as (parts, nodes):
        revision, _ = await parts.push("demo/a")
        await parts.residency.load(DEMO, "a", WantedTier.HOST, 30)
        assert parts.adapters.probe_of(revision.digest) is None
        await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 30)
        for node in nodes:
            await node.evict(revision.digest, pb.RESIDENCY_TIER_ACTIVE)
        await eventually(lambda: parts.adapters.probe_of(revision.digest) is not None, 60)
        probe = parts.adapters.probe_of(revision.digest)
        assert probe is not None
        assert probe.findings.verdict is ProbeVerdict.CHANGES
        assert (probe.findings.max_difference, probe.findings.positions) == (0.5, 9)
        assert probe.node in {n.address for n in nodes}
        other, _ = await parts.push("demo/b", "two")
        await parts.residency.load(DEMO, "b", WantedTier.ACTIVE, 30)
        await eventually(lambda: parts.adapters.probe_of(other.digest) is not None, 60)
        counts = [n.probes.count(revision.digest) for n in nodes]
        assert max(counts) == 1  # both may have begun at once, but neither began again
        details = await parts.adapters.get(DEMO, "b")
        assert set(details.probes) == {other.digest}


async def test_a_probe_changes_no_etag(tmp_path: Path) -> None:
    """It is kept with the content: who read the adapter before may still write it."""
    async with stack(tmp_path) as (parts, _):
        revision, _ = await parts.push("demo/a")
        before = await parts.adapters.get(DEMO, "a")
        await parts.probes.probe(DEMO, "a", 30)
        after = await parts.adapters.get(DEMO, "a")
        assert after.etag == before.etag
        assert after.probes[revision.digest].findings.verdict is ProbeVerdict.CHANGES
        ((listed,), _) = await parts.adapters.list(DEMO, "", 10, "")
        assert set(listed.probes) == {revision.digest}


async def test_names_of_the_same_content_share_its_probe(tmp_path: Path) -> None:
    """And it goes with the content."""
    async with stack(tmp_path) as (parts, _):
        revision, _ = await parts.push("demo/a")
        await parts.push("other/b")
        await parts.probes.probe(DEMO, "a", 30)
        assert (await parts.adapters.get(OTHER, "b")).probes[revision.digest].time_s > 0
        await parts.deletion.delete(DEMO, "a", "")
        assert parts.adapters.probe_of(revision.digest) is not None
        await parts.deletion.delete(OTHER, "b", "")
        assert parts.adapters.probe_of(revision.digest) is None


async def test_a_failed_probe_is_tried_again_and_a_refused_one_is_not(tmp_path: Path) -> None:
    """A busy node is asked later; one that cannot is left alone until it restarts."""
    async with probing(tmp_path) as (parts, (node,)):
        node.probe_error = NodeUnavailableError("busy", retry_after_s=1)
        one, _ = await parts.push("demo/a")
        await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 30)
        await eventually(lambda: len(node.probes) >= 2, 60)
        node.probe_error = None
        await eventually(lambda: parts.adapters.probe_of(one.digest) is not None, 60)
        node.probe_error = RefusedError("no probes here")
        two, _ = await parts.push("demo/b", "two")
        await parts.residency.load(DEMO, "b", WantedTier.ACTIVE, 30)
        await eventually(lambda: two.digest in node.probes, 60)
        node.probe_error = None
        three, _ = await parts.push("demo/c", "three")
        await parts.residency.load(DEMO, "c", WantedTier.ACTIVE, 30)
        await eventually(lambda: parts.adapters.probe_of(three.digest) is not None, 60)
        assert node.probes.count(two.digest) == 1
        assert parts.adapters.probe_of(two.digest) is None
        await node.restart()
        await eventually(lambda: parts.adapters.probe_of(two.digest) is not None, 30)


async def test_a_probe_asked_for_says_what_it_found(tmp_path: Path) -> None:
    """Each time anew, on the node that has the adapter nearest its device."""
    async with stack(tmp_path, num_nodes=2) as (parts, nodes):
        revision, _ = await parts.push("demo/a")
        await eventually(lambda: all("demo/a" in n.names() for n in nodes), 60)
        nodes[1].held[revision.digest] = pb.ResidentAdapter(digest=revision.digest, tier=HOST)
        await nodes[1].evict(revision.digest, HOST)
        await eventually(lambda: revision.digest in parts.agents[1].work.held, 60)
        nodes[1].probe_answer = pb.ProbeAdapterResponse(
            verdict=pb.PROBE_VERDICT_CHANGES_NOTHING, noise=1e-6, positions=4
        )
        done = await parts.probes.probe(DEMO, "a", 30)
        assert (done.probe.node, done.probe.findings.noise) == (nodes[1].address, 1e-6)
        assert done.probe.findings.verdict is ProbeVerdict.CHANGES_NOTHING
        nodes[1].probe_answer = pb.ProbeAdapterResponse(verdict=pb.PROBE_VERDICT_NOT_FINITE)
        assert (
            await parts.probes.probe(DEMO, f"tenants/demo/adapters/a/revisions/{revision.digest}", 30)
        ).revision.digest == revision.digest
        found = parts.adapters.probe_of(revision.digest)
        assert found is not None
        assert found.findings.verdict is ProbeVerdict.NOT_FINITE


async def test_only_ones_own_ready_adapters_are_probed(tmp_path: Path) -> None:
    """Another tenant's is not there."""
    async with stack(tmp_path) as (parts, (node,)):
        await parts.push("demo/a")
        with pytest.raises(AdapterNotFoundError):
            await parts.probes.probe(OTHER, "demo/a", 30)
        with pytest.raises(AdapterNotFoundError):
            await parts.probes.probe(DEMO, f"tenants/demo/adapters/a/revisions/{'9' * 64}", 30)
        node.probe_error = RefusedError("its load failed")
        with pytest.raises(NodeCallError, match="its load failed"):
            await parts.probes.probe(DEMO, "a", 30)
        assert node.probes == [(await parts.adapters.get(DEMO, "a")).adapter.current_digest]


async def test_nothing_of_an_adapter_goes_to_a_node_of_another_base_model(tmp_path: Path) -> None:
    """Two nodes, two base models: loads, demands and probes stay with their own; both digests are told."""
    theirs = "0" * 64
    async with stack(tmp_path, base_digests=(BASE_DIGEST, theirs), shares_store=False) as (parts, nodes):
        ours, other = nodes
        revision, _ = await parts.push("demo/a")
        placements = {p.node: p for p in await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 30)}
        assert placements[ours.address].failure == ""
        failure = placements[other.address].failure
        assert BASE_DIGEST in failure
        assert theirs in failure
        await other.demand(revision.digest)
        assert (await parts.probes.probe(DEMO, "a", 30)).probe.node == ours.address
        await parts.push("demo/b", "two")
        await eventually(lambda: other.syncs and other.syncs[-1] == parts.mirror.view.generation, 60)
        assert other.names() == {}
        assert other.loads == []
        assert other.streamed == {}
        assert other.probes == []
        await ours.stop()
        await eventually(lambda: len(parts.fleet.connected) == 1, 60)
        with pytest.raises(BaseMismatchError) as mismatch:
            await parts.probes.probe(DEMO, "a", 30)
        assert mismatch.value.metadata == {"base_digest": BASE_DIGEST, "served": theirs}
        await other.stop()
        await eventually(lambda: not parts.fleet.connected, 60)
        with pytest.raises(NodeUnavailableError):
            await parts.probes.probe(DEMO, "a", 30)
