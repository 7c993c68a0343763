"""Loads, unloads and pins reach the nodes, and neither failures nor evictions start a fight."""

import asyncio
from pathlib import Path

import pytest

from adapter_manager.domain.adapter import WantedTier
from adapter_manager.domain.errors import RevisionInUseError
from adapter_manager.domain.node import ResidencyTier
from lorikeet.residency.v1 import residency_pb2 as pb
from tests.support.fake_node import RefusedError
from tests.support.node_stack import ACTIVE, DEMO, DISK, HOST, OTHER, stack, tier
from tests.support.waiting import eventually


async def test_load_and_unload_return_when_the_nodes_have_done_it(tmp_path: Path) -> None:
    """With a placement a node; the wish outlives the node's restart until it is taken back."""
    async with stack(tmp_path, num_nodes=2) as (parts, nodes):
        revision, _ = await parts.push("demo/a")
        placements = await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 5)
        assert [p.resident.tier for p in placements] == [ResidencyTier.ACTIVE] * 2
        assert [p.failure for p in placements] == ["", ""]
        assert {p.node for p in placements} == {n.address for n in nodes}
        await nodes[0].restart()
        await eventually(lambda: tier(nodes[0], revision.digest) == ACTIVE)
        assert parts.residency.placement(OTHER, "") == []
        placements = await parts.residency.unload(DEMO, "a", 5)
        assert [p.resident.tier for p in placements] == [ResidencyTier.DISK] * 2
        await asyncio.sleep(0.5)  # a resync must not bring it back
        assert [tier(n, revision.digest) for n in nodes] == [DISK] * 2


async def test_an_unpinned_adapter_that_the_node_moved_to_host_is_left_there(tmp_path: Path) -> None:
    """The two must not fight."""
    async with stack(tmp_path) as (parts, (node,)):
        revision, _ = await parts.push("demo/a")
        await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 5)
        await node.evict(revision.digest, HOST)
        await asyncio.sleep(0.5)
        assert node.loads == [revision.digest]


async def test_a_pin_follows_the_name_and_protects_from_unload(tmp_path: Path) -> None:
    """The next push is pinned instead; evicting a pinned one is undone."""
    async with stack(tmp_path) as (parts, (node,)):
        one, _ = await parts.push("demo/a", "one")
        await parts.adapters.pin(DEMO, "a", is_pinned=True, etag="")
        await eventually(lambda: tier(node, one.digest) == ACTIVE)
        assert node.held[one.digest].pinned
        with pytest.raises(RevisionInUseError):
            await parts.residency.unload(DEMO, "a", 1)
        await node.evict(one.digest, HOST)
        await eventually(lambda: tier(node, one.digest) == ACTIVE)
        two, _ = await parts.push("demo/a", "two")
        await eventually(lambda: tier(node, two.digest) == ACTIVE and node.held[two.digest].pinned)
        assert not node.revisions[one.digest].pinned


async def test_a_bad_adapter_keeps_no_good_one_waiting_and_is_not_retried_for_ever(tmp_path: Path) -> None:
    """A refusal for good is tried once, what may pass is tried again, neither blocks what is behind it."""
    async with stack(tmp_path) as (parts, (node,)):
        bad, _ = await parts.push("demo/bad", "bad")
        good, _ = await parts.push("demo/good", "good")
        node.refusals[bad.digest] = RefusedError("rank too high for my arena")
        placements = await parts.residency.load(DEMO, "bad", WantedTier.ACTIVE, 5)
        assert [p.failure for p in placements] == [f"node {node.address}: rank too high for my arena"]
        assert [p.desired for p in placements] == [ResidencyTier.ACTIVE]
        placements = await parts.residency.load(DEMO, "good", WantedTier.ACTIVE, 5)
        assert [p.failure for p in placements] == [""]
        await asyncio.sleep(1.0)
        assert node.loads.count(bad.digest) == 1
        assert tier(node, good.digest) == ACTIVE
        del node.refusals[bad.digest]  # asked for again, it is tried again
        placements = await parts.residency.load(DEMO, "bad", WantedTier.ACTIVE, 5)
        assert [p.failure for p in placements] == [""]


async def test_an_unload_that_fails_is_repeated_with_pauses_until_it_works(tmp_path: Path) -> None:
    """Neither in a tight loop nor given up: what is deleted must go."""
    async with stack(tmp_path) as (_, (node,)):
        digest = "1" * 64
        node.refusals[digest] = RefusedError("busy")
        node.held[digest] = pb.ResidentAdapter(digest=digest, tier=HOST)
        await eventually(lambda: node.unloads)
        await asyncio.sleep(1.2)
        assert 1 <= len(node.unloads) <= 3
        del node.refusals[digest]
        await eventually(lambda: digest not in node.held)


async def test_many_loads_and_unloads_leave_nothing(tmp_path: Path) -> None:
    """No work, failure or resident entry is kept."""
    async with stack(tmp_path) as (parts, (node,)):
        for index in range(100):
            await parts.push("demo/a", str(index % 5))
            await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 5)
            await parts.residency.unload(DEMO, "a", 5)
        (agent,) = parts.agents
        await eventually(lambda: agent.work.is_idle)
        assert {a.tier for a in node.held.values()} == {DISK}
        assert agent.work.failures == {}
        await parts.deletion.delete(DEMO, "a", "")
        await eventually(lambda: not node.held and not agent.work.held)
