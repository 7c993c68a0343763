"""Payloads for nodes that cannot read the store, on a load or on their own demand."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapter_manager.application.payloads import PayloadPusher
from adapter_manager.domain.adapter import WantedTier
from adapter_manager.domain.errors import ArtifactMissingError, NodeCallError
from adapter_manager.domain.node import ResidencyTier
from lorikeet_contract.manifest import PayloadDtype
from lorikeet_contract.status import ServiceError, StatusCode
from tests.support.built_revisions import MemoryArtifacts, make_built
from tests.support.fake_node import RefusedError
from tests.support.manager_parts import running_node
from tests.support.node_stack import DEMO, HOST, stack, tier
from tests.support.waiting import eventually


async def test_a_node_that_does_not_share_the_store_is_sent_the_payload(tmp_path: Path) -> None:
    """In chunks, byte for byte; from then on without asking it to read first."""
    async with stack(tmp_path, shares_store=False) as (parts, (node,)):
        for seed in ("one", "two"):
            revision, _ = await parts.push(f"demo/{seed}", seed)
            placements = await parts.residency.load(DEMO, seed, WantedTier.HOST, 5)
            assert [p.failure for p in placements] == [""]
            assert node.streamed[revision.digest] == make_built(tmp_path, seed).payload_path.read_bytes()
        assert len(node.loads) == 3


async def test_a_demand_is_answered_with_the_payload(tmp_path: Path) -> None:
    """Only for what is registered."""
    async with stack(tmp_path, shares_store=False) as (parts, (node,)):
        revision, _ = await parts.push("demo/a")
        await eventually(node.names)
        await node.demand("0" * 64)
        await node.demand(revision.digest)
        await eventually(lambda: revision.digest in node.streamed)
        assert tier(node, revision.digest) == HOST
        assert node.loads == [revision.digest]


async def test_files_that_are_gone_leave_the_names_where_they_are(tmp_path: Path) -> None:
    """The name never falls back to an older revision; who waits is told; once back, a demand is met."""
    async with stack(tmp_path, shares_store=False) as (parts, (node,)):
        assert isinstance(parts.store, MemoryArtifacts)
        await parts.push("demo/a", "one")
        second, _ = await parts.push("demo/a", "two", aliases=["prod"])
        kept = parts.store.stored.pop(second.digest)
        await eventually(lambda: node.names() == {"demo/a": second.digest})
        await node.demand(second.digest)
        agent = parts.agents[0]
        await eventually(lambda: second.digest in agent.work.failures)
        await eventually(lambda: "is not in the store" in node.refused.get(second.digest, ""))
        adapter = (await parts.adapters.get(DEMO, "a")).adapter
        assert (adapter.current_digest, adapter.alias("prod")) == (second.digest, second.digest)
        assert node.names() == {"demo/a": second.digest}
        parts.store.stored[second.digest] = kept
        await node.demand(second.digest)
        await eventually(lambda: second.digest in node.streamed)


async def test_calls_to_a_node_that_is_away_or_refuses_are_named(tmp_path: Path) -> None:
    """Which node, its own code and reason."""
    async with running_node() as (node, client):
        store = MemoryArtifacts()
        built = make_built(tmp_path, "x", dtype=PayloadDtype.BFLOAT16)
        await store.put(built)
        node.refusals[built.digest] = RefusedError("no")
        with pytest.raises(NodeCallError, match=node.address) as caught:
            await PayloadPusher(client, store).load(
                built.digest, ResidencyTier.HOST, is_pinned=False, timeout_s=5
            )
        assert caught.value.node_code == "FAILED_PRECONDITION"
        assert caught.value.node_reason == "ADAPTER_UNAVAILABLE"
        await node.stop()
        with pytest.raises(NodeCallError) as caught:
            await client.resident()
        assert caught.value.node_code == "UNAVAILABLE"


async def test_a_payload_that_is_lost_while_it_is_sent_is_a_failure_like_others(tmp_path: Path) -> None:
    """The manifest was there, the payload is not: told, remembered, and not tried again at once."""
    async with stack(tmp_path, shares_store=False) as (parts, (node,)):
        revision, _ = await parts.push("demo/a")

        async def lost(digest: str, offset: int = 0) -> AsyncIterator[bytes]:
            yield b"x"
            raise ArtifactMissingError(f"revision {digest} is not whole")

        parts.store.payload = lost  # type: ignore[method-assign]
        (placement,) = await parts.residency.load(DEMO, "a", WantedTier.HOST, 5)
        assert placement.failure == f"revision {revision.digest} is not whole"
        assert node.refused == {revision.digest: placement.failure}
        await asyncio.sleep(1.0)
        assert 2 <= len(node.loads) <= 6  # one that reads the store, and then with growing pauses


async def test_what_the_node_takes_for_bad_is_refused_in_the_nodes_words(tmp_path: Path) -> None:
    """Without the node's address, which is no business of tenants."""
    async with stack(tmp_path, shares_store=False) as (parts, (node,)):
        revision, _ = await parts.push("demo/a")
        await eventually(node.names)
        node.refusals[revision.digest] = RefusedError("layer 3 is damaged")
        await node.demand(revision.digest)
        await eventually(lambda: node.refused == {revision.digest: "layer 3 is damaged"})


class DiskFullError(ServiceError):
    """What a node answers that was full and made room."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "DISK_CACHE"


async def test_a_node_that_made_room_is_sent_the_payload_once_more(tmp_path: Path) -> None:
    """At once, for requests wait for it; a disk that stays full is a failure like others."""
    async with stack(tmp_path, shares_store=False) as (parts, (node,)):
        revision, _ = await parts.push("demo/a")
        await eventually(node.names)
        load, num_full = node.load, [1]

        async def full(header: object, payload: bytes) -> object:
            if num_full[0]:
                num_full[0] -= 1
                raise DiskFullError("no space left")
            return await load(header, payload)  # type: ignore[arg-type]

        node.load = full  # type: ignore[method-assign, assignment]
        await node.demand(revision.digest)
        await eventually(lambda: revision.digest in node.streamed)
        # the node has it before its answer is here, and who asks meanwhile is answered by that
        await eventually(lambda: parts.agents[0].work.is_idle)
        assert not parts.agents[0].work.failures
        num_full[0] = 2
        await node.demand(revision.digest)
        await eventually(lambda: revision.digest in parts.agents[0].work.failures)
        assert "no space left" in parts.agents[0].work.failures[revision.digest].message
        assert not parts.agents[0].work.failures[revision.digest].is_final
