"""The store comes back empty, or as somebody else's, while its manager is down: nobody remembers it.

The manager must not take that for the truth: nodes keep what they serve, files stay, calls are refused with a
reason, until the data is back or an operator says that it is lost.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_bench import rigs
from lorikeet_rpc.errors import from_rpc_error
from tests.support.fault_table import FaultTable
from tests.support.journal import Journal, until_acknowledged
from tests.support.redis_server import BINARY, RedisServer
from tests.support.stack import Stack
from tests.support.steady_clients import STEADY, SteadyStreams, upload_steady

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(BINARY is None, reason="redis-server is not installed (Debian: redis-server)"),
]

FAULT = "store lost while the manager was down"
# Longer than an agent takes to compare its node with the registry (3 s): a wrong push would have come.
_LOOK_S = 5.0


class World:
    """A stack on a Redis whose files are at hand."""

    def __init__(self, root: Path, base: Path) -> None:
        self.redis_dir = root / "redis"
        self.server = RedisServer(self.redis_dir)
        self.stack = Stack(base, root / "stack", manager_flags=["--redis-url", self.server.url])
        self.journal = Journal(self.stack, root)

    @property
    def stored(self) -> set[str]:
        """Digests in the artifact store."""
        return {p.name for p in (self.stack.root / "manager" / "artifacts" / "revisions").iterdir()}

    async def check_refusing(self, stored: set[str]) -> None:
        """Reads are refused, the log says why, and after a while no file is gone."""
        await asyncio.sleep(_LOOK_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.stack.adapters().ListAdapters(
                pb.ListAdaptersRequest(), metadata=self.stack.auth(), timeout=20
            )
        failure = from_rpc_error(caught.value)
        assert failure.code == "UNAVAILABLE", failure
        assert failure.retry_after_s
        assert "redis.other_registry" in self.stack.manager.tail(400)
        assert self.stored == stored


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two resident adapters."""
    root = tmp_path_factory.mktemp("lost")
    world = World(root, rigs.write_copy_base(root / "base"))
    await world.server.start()
    try:
        async with world.stack:
            await upload_steady(world.stack, world.journal)
            yield world
    finally:
        await world.server.kill()


async def another_registry(world: World, root: Path) -> None:
    """A manager with a data directory of its own begins a registry in the empty store."""
    other = Stack(root, root / "other", manager_flags=["--redis-url", world.server.url])
    other.manager.start()
    try:
        # It serves only after it has registered its bootstrap tenant: that tenant is there now.
        await other._serving(other.manager, other.manager_address, 60)
    finally:
        await asyncio.to_thread(other.manager.stop)


async def test_a_manager_starts_on_a_store_that_lost_everything(
    world: World, faults: FaultTable, tmp_path: Path
) -> None:
    """Nothing is taken from nodes or disk, also when another registry appears; with the data all is back."""
    stack, kept = world.stack, tmp_path / "kept"
    stored = world.stored
    with faults.case(FAULT, "start on nothing") as empty, faults.case(FAULT, "another's registry") as others:
        async with SteadyStreams(stack, {**STEADY, None: 5}) as streams:
            await asyncio.to_thread(stack.manager.kill)
            await world.server.stop()
            shutil.copytree(world.redis_dir, kept)
            world.server.wipe()
            await world.server.start()
            stack.manager.start()
            await stack.ready()
            await world.check_refusing(stored)
            await another_registry(world, tmp_path)
            await world.check_refusing(stored)
            await streams.progress()
            await world.server.kill()
            shutil.rmtree(world.redis_dir)
            shutil.copytree(kept, world.redis_dir)
            await world.server.start()
            ended_s = time.monotonic()
            await until_acknowledged(lambda: world.journal.set_alias("demo/one", "prod", 11))
            for case in (empty, others):
                case.recovered(time.monotonic() - ended_s)
            await streams.progress()
        lost, wrong = await world.journal.compare([*STEADY, "demo/one@prod"], [stack])
        for case in (empty, others):
            case.lost += [*streams.unclear, *lost]
            case.wrong += [*streams.wrong, *wrong]


async def is_pushed(journal: Journal) -> bool:
    """Whether an upload is taken; not before a node has told the new registry its model."""
    try:
        await journal.upload("demo/new", 33)
    except grpc.aio.AioRpcError as error:
        failure = from_rpc_error(error)
        assert failure.code == "UNAVAILABLE" or failure.reason == "BASE_MODEL_UNKNOWN", failure
        return False
    return True


async def test_an_operator_gives_a_lost_registry_up(world: World, faults: FaultTable) -> None:
    """With --adopt-registry, once: a new registry begins, and what is pushed to it serves at once."""
    stack = world.stack
    with faults.case(FAULT, "given up by the operator") as case:
        await asyncio.to_thread(stack.manager.kill)
        await world.server.stop()
        world.server.wipe()
        await world.server.start()
        stack.manager.command.append("--adopt-registry")
        stack.manager.start()
        began_s = time.monotonic()
        try:
            await stack.ready()
            journal = Journal(stack, stack.root.parent)
            end_s = time.monotonic() + 60
            while not await is_pushed(journal):
                assert time.monotonic() < end_s
                await asyncio.sleep(0.1)
            case.recovered(time.monotonic() - began_s)
            lost, wrong = await journal.compare(["demo/new"], [stack])
            case.lost += lost
            case.wrong += wrong
        finally:
            stack.manager.command.remove("--adopt-registry")
        await asyncio.to_thread(stack.manager.kill)
        stack.manager.start()
        await stack.ready()
        lost, wrong = await journal.compare(["demo/new"], [stack])
        case.lost += lost
        case.wrong += wrong
