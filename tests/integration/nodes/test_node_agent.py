"""The manager's agents against a node's real gRPC services: push, watch, reconcile, demand, restarts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from adapter_manager.application.payloads import PayloadPusher
from adapter_manager.domain.adapter import RevisionState, WantedTier
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.errors import BaseModelUnknownError, NodeCallError, RevisionInUseError
from adapter_manager.domain.node import ResidencyTier
from adapter_manager.infra.node_client import GrpcNodeClient
from adapter_manager.ports import Stored
from lorikeet.residency.v1 import residency_pb2 as pb
from lorikeet_contract.manifest import PayloadDtype
from tests.support.built_revisions import MemoryArtifacts, make_built
from tests.support.fake_node import FakeNode, RefusedError
from tests.support.manager_parts import Parts, make_parts, running_node
from tests.support.memory_registry import MemoryRegistry
from tests.support.waiting import eventually

DEMO, OTHER = Caller("demo", is_admin=False), Caller("other", is_admin=False)
ACTIVE, HOST, DISK = pb.RESIDENCY_TIER_ACTIVE, pb.RESIDENCY_TIER_HOST, pb.RESIDENCY_TIER_DISK


class SharedArtifacts(MemoryArtifacts):
    """Artifacts that a node on this machine can also read as files."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self.url = directory.as_uri()

    async def put(self, built: object) -> bool:
        """As files too."""
        is_new = await super().put(built)  # pyright: ignore[reportArgumentType]
        for digest, (_, payload) in self.stored.items():
            folder = self._directory / "revisions" / digest
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "payload").write_bytes(payload)
        return is_new


@asynccontextmanager
async def running(parts: Parts) -> AsyncIterator[Parts]:
    """The background tasks of a manager."""
    tasks = [asyncio.create_task(parts.mirror.run()), *(asyncio.create_task(a.run()) for a in parts.agents)]
    try:
        yield parts
        for task in tasks:
            assert not task.done(), task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def stack(
    tmp_path: Path, *, num_nodes: int = 1, registry: MemoryRegistry | None = None, **options: object
) -> AsyncIterator[tuple[Parts, list[FakeNode]]]:
    """A manager and its nodes, connected, with two tenants."""
    async with AsyncExitStack() as exits:
        nodes: list[FakeNode] = []
        clients: list[GrpcNodeClient] = []
        for _ in range(num_nodes):
            node, client = await exits.enter_async_context(running_node(**options))
            nodes.append(node)
            clients.append(client)
        store = SharedArtifacts(tmp_path)
        parts = make_parts(registry or MemoryRegistry(), store, tmp_path, clients=clients)
        await exits.enter_async_context(running(parts))
        for tenant in ("demo", "other"):
            if await parts.registry.tenant(tenant) is None:
                await parts.tenant(tenant)
        await eventually(lambda: len(parts.fleet.connected) == num_nodes)
        yield parts, nodes


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
        await eventually(lambda: _tokens(nodes[1]) == {token.sha256})
        await parts.tenants.revoke_token("demo", record.token_id)
        await eventually(lambda: _tokens(nodes[1]) == set())
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


async def test_load_and_unload_return_when_the_nodes_have_done_it(tmp_path: Path) -> None:
    """With a placement a node; the wish outlives the node's restart until it is taken back."""
    async with stack(tmp_path, num_nodes=2) as (parts, nodes):
        revision, _ = await parts.push("demo/a")
        placements = await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 5)
        assert [p.resident.tier for p in placements] == [ResidencyTier.ACTIVE] * 2
        assert [p.failure for p in placements] == ["", ""]
        assert {p.node for p in placements} == {n.address for n in nodes}
        await nodes[0].restart()
        await eventually(lambda: _tier(nodes[0], revision.digest) == ACTIVE)
        assert parts.residency.placement(OTHER, "") == []
        placements = await parts.residency.unload(DEMO, "a", 5)
        assert [p.resident.tier for p in placements] == [ResidencyTier.DISK] * 2
        await asyncio.sleep(0.5)  # a resync must not bring it back
        assert [_tier(n, revision.digest) for n in nodes] == [DISK] * 2


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
        await eventually(lambda: _tier(node, one.digest) == ACTIVE)
        assert node.held[one.digest].pinned
        with pytest.raises(RevisionInUseError):
            await parts.residency.unload(DEMO, "a", 1)
        await node.evict(one.digest, HOST)
        await eventually(lambda: _tier(node, one.digest) == ACTIVE)
        two, _ = await parts.push("demo/a", "two")
        await eventually(lambda: _tier(node, two.digest) == ACTIVE and node.held[two.digest].pinned)
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
        assert _tier(node, good.digest) == ACTIVE
        del node.refusals[bad.digest]  # asked for again, it is tried again
        placements = await parts.residency.load(DEMO, "bad", WantedTier.ACTIVE, 5)
        assert [p.failure for p in placements] == [""]


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
        assert _tier(node, revision.digest) == HOST
        assert node.loads == [revision.digest]


async def test_what_nobody_registers_is_taken_off_the_node(tmp_path: Path) -> None:
    """Deleted while the node was away: gone when it is back, its disk cache included."""
    async with stack(tmp_path) as (parts, (node,)):
        revision, _ = await parts.push("demo/a")
        await parts.push("demo/b", "b")
        await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 5)
        await node.stop()
        await eventually(lambda: not parts.fleet.connected)
        await parts.deletion.delete(DEMO, "a", "")
        await node.start()
        node.held[revision.digest] = pb.ResidentAdapter(digest=revision.digest, tier=DISK)  # from its disk
        await eventually(lambda: revision.digest not in node.held)
        await eventually(lambda: list(node.names()) == ["demo/b"])


async def test_deleting_takes_the_adapter_off_the_nodes_but_not_shared_content(tmp_path: Path) -> None:
    """Another tenant's adapter of the same digest stays where it is."""
    async with stack(tmp_path) as (parts, (node,)):
        revision, _ = await parts.push("demo/a", "same")
        await parts.push("other/b", "same")
        await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 5)
        await parts.deletion.delete(DEMO, "a", "")
        assert list(node.names()) == ["other/b"]
        assert _tier(node, revision.digest) == ACTIVE
        await parts.deletion.delete(OTHER, "b", "")
        assert revision.digest not in node.held


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


async def test_a_restarted_manager_changes_nothing_on_a_node_that_agrees(tmp_path: Path) -> None:
    """The registry is what it was; so are the catalog and what is loaded."""
    registry = MemoryRegistry()
    async with running_node() as (node, client):
        store = SharedArtifacts(tmp_path)
        async with running(make_parts(registry, store, tmp_path, clients=[client])) as parts:
            await parts.tenant("demo")
            revision, _ = await parts.push("demo/a")
            await eventually(lambda: parts.fleet.connected)
            await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 5)
        pushes = len(node.syncs)
        async with running(make_parts(registry, store, tmp_path, clients=[client])) as parts:
            await eventually(lambda: parts.fleet.connected and len(node.syncs) > pushes)
            await asyncio.sleep(0.4)
            assert node.loads == [revision.digest]
            assert node.names() == {"demo/a": revision.digest}


async def test_a_restarted_node_gets_everything_again(tmp_path: Path) -> None:
    """New instance: catalog and wanted revisions; the list equals what was acknowledged."""
    async with stack(tmp_path) as (parts, (node,)):
        digests = {}
        for index in range(3):
            revision, _ = await parts.push(f"demo/a{index}", str(index))
            digests[f"demo/a{index}"] = revision.digest
        await parts.residency.load(DEMO, "a1", WantedTier.ACTIVE, 5)
        former = node.instance_id
        await node.restart()
        await eventually(lambda: node.names() == digests)
        await eventually(lambda: _tier(node, digests["demo/a1"]) == ACTIVE)
        await eventually(lambda: parts.agents[0].is_connected)
        assert parts.agents[0].model
        assert parts.agents[0].model.instance_id == node.instance_id != former


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


async def test_adapters_of_another_base_model_are_not_pushed(tmp_path: Path) -> None:
    """And a load says why."""
    async with stack(tmp_path, base_digest="0" * 64) as (parts, (node,)):
        await parts.push("demo/a")
        await eventually(lambda: node.syncs and node.syncs[-1] == parts.mirror.view.generation)
        assert node.names() == {}
        (placement,) = await parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 1)
        assert "another base model" in placement.failure


async def test_models_are_remembered_and_the_newest_seen_is_current(tmp_path: Path) -> None:
    """Over restarts of the manager, with the node away; before any node there is an error that says so."""
    registry = MemoryRegistry()
    parts = make_parts(registry, MemoryArtifacts(), tmp_path)
    with pytest.raises(BaseModelUnknownError, match="--nodes"):
        parts.models.current()
    for base in ("1" * 64, "2" * 64):
        async with stack(tmp_path, registry=registry, base_digest=base) as (parts, _):
            await eventually(lambda base=base: base in registry_models(registry))
            assert parts.models.current().base_digest == base
    parts = make_parts(registry, MemoryArtifacts(), tmp_path)
    await parts.mirror.refresh()
    assert parts.models.current().base_digest == "2" * 64


async def test_files_that_are_gone_make_the_revision_failed(tmp_path: Path) -> None:
    """It leaves the catalog, so a request for it is refused and never answered by something else."""
    async with stack(tmp_path, shares_store=False) as (parts, (node,)):
        revision, _ = await parts.push("demo/a")
        assert isinstance(parts.store, MemoryArtifacts)
        parts.store.stored.clear()
        await eventually(node.names)
        await node.demand(revision.digest)
        await eventually(lambda: node.names() == {})
        details = await parts.adapters.get(DEMO, "a")
        assert details.adapter.revisions[0].state is RevisionState.FAILED


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
        await parts.push("demo/last", "last")
        await eventually(lambda: len(node.adapters) == 20_002, 20)


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


def registry_models(registry: MemoryRegistry) -> set[str]:
    """Base digests that are recorded."""
    return {key for kind, key in registry.records if kind.__name__ == "BaseModel"}


def _tokens(node: FakeNode) -> set[str]:
    return {t for tenant in node.tenants for t in tenant.token_sha256}


def _tier(node: FakeNode, digest: str) -> int:
    return node.held[digest].tier if digest in node.held else pb.RESIDENCY_TIER_ABSENT
