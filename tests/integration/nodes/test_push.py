"""The catalog on the nodes follows the registry: changes, bursts, large catalogs, other base models."""

import asyncio
from dataclasses import replace
from pathlib import Path

from adapter_manager.domain.adapter import WantedTier
from adapter_manager.ports import Stored
from lorikeet.residency.v1 import residency_pb2 as pb
from tests.support.built_revisions import MemoryArtifacts
from tests.support.manager_parts import make_parts, running_node
from tests.support.memory_registry import MemoryRegistry
from tests.support.node_stack import ACTIVE, DEMO, running, stack, tokens
from tests.support.waiting import eventually


async def test_the_catalog_follows_every_change(tmp_path: Path) -> None:
    """Push, alias, replace, delete, token: each reaches every node, with growing generations."""
    async with stack(tmp_path, num_nodes=2) as (parts, nodes):
        one, _ = await parts.push("demo/a", "one", aliases=["prod"])
        await eventually(lambda: all(n.names() == {"demo/a": one.digest} for n in nodes))
        assert dict(nodes[0].adapters[0].aliases) == {"prod": one.digest}
        assert nodes[0].revisions[one.digest].store_path == f"revisions/{one.digest}"
        two, _ = await parts.push("demo/a", "two")
        await eventually(lambda: all(n.names() == {"demo/a": two.digest} for n in nodes))
        assert sorted(nodes[0].adapters[0].digests) == sorted([one.digest, two.digest])
        token, record = await parts.tenants.create_token("demo", is_admin=True)
        await eventually(lambda: tokens(nodes[1]) == {token.sha256})
        await parts.tenants.revoke_token("demo", record.token_id)
        await eventually(lambda: tokens(nodes[1]) == set())
        await parts.deletion.delete(DEMO, "a", "")
        await eventually(lambda: all(n.names() == {} for n in nodes))
        for node in nodes:
            assert node.syncs == sorted(node.syncs)


async def test_a_burst_of_changes_is_one_push(tmp_path: Path) -> None:
    """Debounced, and the last state arrives soon after."""
    async with stack(tmp_path) as (parts, (node,)):
        await eventually(lambda: node.syncs)
        before = len(node.syncs)
        for index in range(10):
            await parts.push(f"demo/a{index}", "same")
        await eventually(lambda: len(node.names()) == 10, 1.0)
        assert len(node.syncs) - before < 10


async def test_large_catalogs_are_paged(tmp_path: Path) -> None:
    """Each message stays below the default limit of 4 MiB; the node swaps all pages in at once."""
    async with stack(tmp_path) as (parts, (node,)):
        assert isinstance(parts.registry, MemoryRegistry)
        registry = parts.registry
        await parts.push("demo/a")
        adapter = (await parts.adapters.get(DEMO, "a")).adapter
        for index in range(20_000):
            copy = replace(adapter, adapter=f"a{index}")
            registry.records[(type(copy), copy.name.short)] = Stored(copy, "e")
        registry.generation += 1  # as for a commit of another manager
        await parts.push("demo/last", "last")
        await eventually(lambda: len(node.adapters) == 20_002, 20)


async def test_adapters_of_another_base_model_are_not_pushed(tmp_path: Path) -> None:
    """And a load says why."""
    async with stack(tmp_path, base_digest="0" * 64) as (parts, (node,)):
        await parts.push("demo/a")
        await eventually(lambda: node.syncs and node.syncs[-1] == parts.mirror.view.generation)
        assert node.names() == {}
        (placement,) = await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 1)
        assert "another base model" in placement.failure


async def test_nothing_is_pushed_before_the_registry_was_read(tmp_path: Path) -> None:
    """A manager that starts without its registry must not take the node's adapters away."""
    registry = MemoryRegistry()
    async with running_node() as (node, client):
        node.held["1" * 64] = pb.ResidentAdapter(digest="1" * 64, tier=ACTIVE)
        node.generation = 5
        registry.is_away = True
        async with running(make_parts(registry, MemoryArtifacts(), tmp_path, clients=[client])) as parts:
            await eventually(lambda: parts.fleet.connected)
            await asyncio.sleep(0.5)
            assert (node.syncs, list(node.held)) == ([], ["1" * 64])


async def test_a_registry_older_than_the_node_goes_past_it(tmp_path: Path) -> None:
    """Restored from a backup: the node refuses lower generations, so the next ones are higher."""
    registry = MemoryRegistry()
    async with running_node() as (node, client):
        node.generation = 500
        async with running(make_parts(registry, MemoryArtifacts(), tmp_path, clients=[client])) as parts:
            await parts.tenant("demo")
            await eventually(lambda: node.syncs and node.syncs[-1] > 500)


async def test_an_emptied_registry_is_filled_again_and_the_nodes_lose_nothing(tmp_path: Path) -> None:
    """From the manager's memory."""
    registry = MemoryRegistry()
    async with stack(tmp_path, registry=registry) as (parts, (node,)):
        revision, _ = await parts.push("demo/a")
        await eventually(lambda: node.names() == {"demo/a": revision.digest})
        registry.empty()
        await eventually(lambda: registry.epoch)
        await parts.push("demo/b", "b")
        await eventually(lambda: sorted(node.names()) == ["demo/a", "demo/b"])
