"""A node or a manager that starts again ends where it was; models outlive both."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapter_manager.domain.adapter import WantedTier
from adapter_manager.domain.errors import BaseModelUnknownError
from tests.support.built_revisions import MemoryArtifacts
from tests.support.manager_parts import make_parts, running_node
from tests.support.memory_registry import MemoryRegistry
from tests.support.node_stack import ACTIVE, DEMO, SharedArtifacts, running, stack, tier
from tests.support.waiting import eventually


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
        await eventually(lambda: tier(node, digests["demo/a1"]) == ACTIVE)
        await eventually(lambda: parts.agents[0].is_connected)
        assert parts.agents[0].model
        assert parts.agents[0].model.instance_id == node.instance_id != former


async def test_models_are_remembered_and_the_newest_seen_is_current(tmp_path: Path) -> None:
    """Over restarts of the manager, with the node away; before any node there is an error that says so."""
    registry = MemoryRegistry()
    parts = make_parts(registry, MemoryArtifacts(), tmp_path)
    with pytest.raises(BaseModelUnknownError, match="--nodes"):
        parts.models.current()
    for base in ("1" * 64, "2" * 64):
        async with stack(tmp_path, registry=registry, base_digest=base) as (parts, _):
            await eventually(lambda base=base: base in _recorded_models(registry))
            assert parts.models.current().base_digest == base
    parts = make_parts(registry, MemoryArtifacts(), tmp_path)
    await parts.mirror.refresh()
    assert parts.models.current().base_digest == "2" * 64


def _recorded_models(registry: MemoryRegistry) -> set[str]:
    """Base digests that are recorded."""
    return {key for kind, key in registry.records if kind.__name__ == "BaseModel"}


async def test_a_load_ends_when_its_node_goes_away(tmp_path: Path) -> None:
    """While it takes the catalog that names the wish: told so long before the load's own time is up."""
    async with stack(tmp_path) as (parts, (node,)):
        await parts.push("demo/a")
        await eventually(node.names)
        taking, release = asyncio.Event(), asyncio.Event()

        async def never(pages: AsyncIterator[object]) -> None:
            async for _ in pages:
                taking.set()
            await release.wait()

        node.sync = never  # type: ignore[assignment, method-assign]
        loading = asyncio.create_task(parts.residency.load(DEMO, "a", WantedTier.ACTIVE, 60))
        await taking.wait()
        stopping = asyncio.create_task(node.stop())
        (placement,) = await asyncio.wait_for(loading, 20)
        assert placement.failure
        assert "not connected" in placement.failure
        release.set()
        await stopping
