"""Loading, using and unloading adapters for ever takes nothing for good: no slot, no memory, no file.

Sources: sgl-project/sglang#21381, vllm-project/vllm#54839, ace-step/ACE-Step-1.5#705.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import pytest_asyncio

from lorikeet.residency.v1 import residency_pb2 as pb
from lorikeet_bench import rigs
from tests.support.lone_node import ACTIVE, LoneNode, Revision, lone_node

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_SLOTS = 4
TOKEN = 33


@dataclass
class World:
    """A node with four slots, and a revision of which any number can be made."""

    node: LoneNode
    good: Revision
    stub: Any  # one channel for all requests: a new one each would be the client's leak

    async def cycle(self, number: int, *, is_streamed: bool = False) -> None:
        """Register, load, answer once, unload, and forget an adapter that nobody saw before."""
        node, revision = self.node, self.good.numbered(number)
        name = f"cycle-{number}"
        directory = None if is_streamed else node.put(revision)
        node.names[name] = revision
        await node.sync()
        loaded = await node.load(revision, is_streamed=is_streamed)
        assert loaded.tier == ACTIVE
        await self.answers(name)
        del node.names[name]
        await node.sync()
        assert await node.unload(revision, keep_on_disk=False)
        if directory:
            for path in directory.iterdir():
                path.unlink()
            directory.rmdir()

    async def answers(self, name: str) -> None:
        """One request to its end."""
        done = await self.node.stack.generate([5], adapter=f"demo/{name}", max_tokens=2, stub=self.stub)
        assert done.token_ids == [TOKEN] * 2

    async def tiers(self) -> dict[str, pb.ResidencyTier]:
        """Where each named adapter is, and whatever else is held by its digest."""
        names = {revision.digest: name for name, revision in self.node.names.items()}
        return {names.get(a.digest, a.digest): a.tier for a in (await self.node.resident()).adapters}

    async def is_empty(self) -> None:
        """Nothing is held, on the device, in memory or on disk."""
        assert not await self.node.stack.at_rest()
        report = await self.node.resident()
        assert (list(report.adapters), report.arena_used_bytes, report.host_used_bytes) == ([], 0, 0)
        cache = self.node.store.parent / "stack" / "node" / "adapters"
        assert [p for p in cache.rglob("*") if p.is_file()] == []

    def memory(self) -> dict[str, int]:
        """Resident bytes of the front end and of the engine process."""
        assert self.node.stack.node.popen is not None
        front = psutil.Process(self.node.stack.node.popen.pid)
        (engine,) = front.children()
        return {"front end": front.memory_info().rss, "engine": engine.memory_info().rss}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One for all tests: each leaves it empty."""
    root = tmp_path_factory.mktemp("cycles")
    # Few blocks, so that all of the cache's memory was touched long before memory is compared.
    flags = ["--max-active-adapters", str(NUM_SLOTS), "--num-blocks", "32", "--max-context-tokens", "256"]
    async with lone_node(rigs.write_copy_base(root / "base"), root, flags) as node:
        good = node.ingested(rigs.write_moe_watermark(root / "good", TOKEN))
        yield World(node, good, node.stack.inference())


async def test_sixty_adapters_come_and_go(world: World) -> None:
    """More by far than there are slots; every other one is streamed to the node."""
    for number in range(60):
        await world.cycle(number, is_streamed=bool(number % 2))
    await world.is_empty()


async def test_a_fifth_takes_the_slot_of_the_longest_idle(world: World) -> None:
    """Four idle adapters fill the slots; the fifth and sixth come by a request and by a load."""
    node = world.node
    node.names = {f"n{i}": world.good.numbered(100 + i) for i in range(6)}
    for revision in node.names.values():
        node.put(revision)
    await node.sync()
    for i in range(4):
        await world.answers(f"n{i}")
    assert set((await world.tiers()).values()) == {ACTIVE}
    await world.answers("n4")
    await node.load(node.names["n5"])
    tiers = await world.tiers()
    assert {name for name, tier in tiers.items() if tier == ACTIVE} == {"n2", "n3", "n4", "n5"}
    for i in range(6):
        await world.answers(f"n{i}")
    for revision in node.names.values():
        assert await node.unload(revision, keep_on_disk=False)
    node.names = {}
    await node.sync()
    await world.is_empty()


async def test_pinned_adapters_stay_and_leave_the_rest_to_others(world: World) -> None:
    """Two of four slots are pinned: thirty others pass through the other two; an unload frees them."""
    node = world.node
    node.names = {f"p{i}": world.good.numbered(200 + i) for i in range(2)}
    node.pinned = set(node.names)
    pinned = dict(node.names)
    for revision in pinned.values():
        node.put(revision)
    await node.sync()
    for number in range(300, 330):
        await world.cycle(number)
        for name in pinned:
            await world.answers(name)
    tiers = await world.tiers()
    assert tiers == dict.fromkeys(pinned, ACTIVE)
    node.names, node.pinned = {}, set()
    await node.sync()
    for revision in pinned.values():
        assert await node.unload(revision, keep_on_disk=False)
    await world.is_empty()


@pytest.mark.long
async def test_memory_is_flat_over_five_hundred_adapters(world: World) -> None:
    """After the 500th the processes have what they had after the 50th; nothing is held.

    To 2 MiB, less than 5 kB for each that came and went; 0.8 MB were seen once of an allocator's own.
    """
    samples: list[dict[str, int]] = []
    for number in range(1000, 1500):
        await world.cycle(number, is_streamed=bool(number % 2))
        if number in {1049, 1499}:
            samples.append(world.memory())
    await world.is_empty()
    early, late = samples
    grown = {name: late[name] - early[name] for name in early}
    assert all(num_bytes < 2 << 20 for num_bytes in grown.values()), (grown, early, late)
