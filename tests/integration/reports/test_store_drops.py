"""Uploads and deletions around a store that drops away: every node converges by reading state, not messages.

Sources: redis/redis-py#1464, redis/redis-py#3979, open-webui/open-webui#28910. Listeners that never subscribe
again, or that lose what was published meanwhile, leave workers with deleted adapters and without new ones.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio
import msgspec
import pytest
import pytest_asyncio

from lorikeet.residency.v1 import residency_pb2, residency_service_pb2_grpc
from lorikeet_bench import rigs
from tests.support.faulty_store import FaultyStore
from tests.support.journal import PATIENCE_S, Journal, answered, until_acknowledged
from tests.support.redis_server import BINARY
from tests.support.stack import NODE_TOKEN, Stack

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(BINARY is None, reason="redis-server is not installed (Debian: redis-server)"),
]

V1, V2, KEPT, GONE, LATER = 11, 22, 33, 44, 55
_AWAY_S = 5.0


@dataclass
class Served:
    """Two nodes, and two managers that each push to both of them, over one registry."""

    store: FaultyStore
    first: Stack
    second: Stack
    journal: Journal
    others: Journal

    @property
    def nodes(self) -> list[Stack]:
        """Both."""
        return [self.first, self.second]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """The second manager shares the registry and the artifact store, and has a data directory of its own."""
    root = tmp_path_factory.mktemp("drops")
    base = rigs.write_copy_base(root / "base")
    shared = (root / "artifacts").as_uri()
    async with FaultyStore(root / "redis") as store:
        flags = ["--redis-url", store.url, "--store-url", shared]
        first, second = (Stack(base, root / n, manager_flags=flags) for n in ("first", "second"))
        for stack in (first, second):
            nodes = stack.manager.command.index("--nodes") + 1
            stack.manager.command[nodes] = f"{first.node_address},{second.node_address}"
        async with first:
            (second.root / "manager").mkdir()
            (second.root / "manager" / "bootstrap-token").write_text(first.token)
            async with second:
                second.token = first.token
                yield Served(store, first, second, Journal(first, root), Journal(second, root))


async def prepare(served: Served, label: str) -> tuple[str, str, str]:
    """Register what is replaced, what is kept and what is deleted; both nodes serve them."""
    names = {f"demo/{label}-a": V1, f"demo/{label}-kept": KEPT, f"demo/{label}-b": GONE}
    for name, token in names.items():
        await served.journal.upload(name, token)
    assert await served.journal.compare(list(names), served.nodes) == ([], [])
    a, kept, b = names
    return a, kept, b


async def converged(served: Served, names: list[str], since_s: float) -> None:
    """All nodes agree with the journal, and list what the registry's own records say, within the interval."""
    deadline_s = since_s + PATIENCE_S
    assert await served.journal.compare(names, served.nodes, deadline_s - time.monotonic()) == ([], [])
    while not await agrees_with_registry(served):
        assert time.monotonic() < deadline_s, "nodes and registry differ"
        await asyncio.sleep(0.1)
    print(f"all nodes agree with the registry {time.monotonic() - since_s:.1f} s after the last answer")


async def agrees_with_registry(served: Served) -> bool:
    """Whether every node works by the registry's generation and holds nothing that no adapter holds."""
    recorded = await registry_snapshot(served.store)
    assert recorded["demo"] >= {served.journal.digests[V2], served.journal.digests[KEPT]}
    listings = [await listed(node) for node in served.nodes]
    known = set[str]().union(*recorded.values())
    return all(generation == recorded.generation and held <= known for generation, held in listings)


class Snapshot(dict[str, set[str]]):
    """READY digests by tenant, and the generation."""

    generation = 0


async def registry_snapshot(store: FaultyStore) -> Snapshot:
    """What Redis itself holds, read past managers and proxy."""
    found = Snapshot()
    found.generation = int(await store.command("GET", "{lorikeet}:generation"))
    for key in await store.command("KEYS", "{lorikeet}:record:adapter:*"):
        record = msgspec.json.decode(await store.command("GET", key.decode()))["record"]
        ready = {r["digest"] for r in record["revisions"] if r["state"] == "ready"}
        found.setdefault(record["tenant"], set()).update(ready)
    return found


async def listed(node: Stack) -> tuple[int, set[str]]:
    """A node's own listing: the generation of its catalog, and what it holds anywhere."""
    async with grpc.aio.insecure_channel(node.node_address) as channel:
        stub = residency_service_pb2_grpc.ResidencyServiceStub(channel)
        reply = await stub.ListResident(
            residency_pb2.ListResidentRequest(),
            metadata=(("authorization", f"Bearer {NODE_TOKEN}"),),
            timeout=20,
        )
    return reply.catalog_generation, {a.digest for a in reply.adapters}


async def drop(
    served: Served, label: str, begin: Callable[[], Awaitable[object]], end: Callable[[], Awaitable[object]]
) -> None:
    """Upload and delete during the gap through one manager, and right after it through the other."""
    a, kept, b = await prepare(served, label)
    later = f"demo/{label}-later"
    await begin()
    began_s = time.monotonic()
    during = [
        asyncio.create_task(until_acknowledged(lambda: served.journal.upload(a, V2), 90)),
        asyncio.create_task(until_acknowledged(lambda: served.journal.delete(b), 90)),
    ]
    while time.monotonic() - began_s < _AWAY_S:
        for node in served.nodes:
            assert await answered(node, kept) == KEPT
            assert await answered(node, a) == V1
        await asyncio.sleep(0.1)
    assert not any(task.done() for task in during)  # nothing is acknowledged while the store is away
    await end()
    await until_acknowledged(lambda: served.others.upload(later, LATER), 90)
    await asyncio.gather(*during)
    acknowledged_s = time.monotonic()
    await converged(served, [a, kept, b], acknowledged_s)
    assert await served.others.compare([later], served.nodes) == ([], [])
    await until_acknowledged(lambda: served.others.delete(later), 90)
    assert await served.others.compare([later], served.nodes) == ([], [])
    for node in served.nodes:
        assert (await answered(node, a), await answered(node, b), await answered(node, later)) == (
            V2,
            None,
            None,
        )


async def test_the_store_is_stopped(served: Served) -> None:
    """Stopped for five seconds, then started with its data."""
    server = served.store.server
    await drop(served, "stopped", server.stop, server.start)


@pytest.mark.long
async def test_the_network_swallows_everything(served: Served) -> None:
    """A half-open drop: connections stay, nothing comes through, neither side is told."""
    proxy = served.store.proxy

    async def begin() -> None:
        proxy.blackhole()

    async def end() -> None:
        proxy.clear()

    await drop(served, "swallowed", begin, end)


@pytest.mark.long
async def test_the_store_is_killed_with_both_managers(served: Served) -> None:
    """What was acknowledged last by either manager is served after all three were killed and are back."""
    a, kept, b = await prepare(served, "killed")
    await served.journal.upload(a, V2)
    await served.others.upload("demo/killed-later", LATER)
    await served.journal.delete(b)
    for stack in served.nodes:
        await asyncio.to_thread(stack.manager.kill)
    await served.store.server.kill()
    for node in served.nodes:
        assert await answered(node, kept) == KEPT
    await served.store.server.start()
    for stack in served.nodes:
        stack.manager.start()
    for stack in served.nodes:
        await stack.ready()
    await converged(served, [a, kept, b], time.monotonic())
    assert await served.others.compare(["demo/killed-later"], served.nodes) == ([], [])
