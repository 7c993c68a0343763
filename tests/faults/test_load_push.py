"""The manager's way to a node fails while it pushes an adapter: its process, or the network between the two.

The node has a mount namespace in which the artifact store is empty, so every payload is streamed to it.
"""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc.aio
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_bench import rigs
from lorikeet_rpc.errors import from_rpc_error
from tests.support.fault_table import FaultTable
from tests.support.journal import CONVERGENCE_S, DEADLINE_S, Journal, answered
from tests.support.stack import Stack, free_port
from tests.support.steady_clients import STEADY, SteadyStreams, upload_steady
from tests.support.tcp_proxy import TcpProxy, Where

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A dead connection shows within 15 s; a machine that is four times slower than it should be still passes.
_NOTICED_S = 4 * (15 + CONVERGENCE_S)
_IN_NAMESPACE = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]


@dataclass
class World:
    """A stack in which the manager speaks to the node through a proxy."""

    proxy: TcpProxy
    stack: Stack
    journal: Journal

    async def register(self, name: str, token: int) -> str:
        """Register an adapter that the node does not hold; returns its digest."""
        return (await self.journal.upload(name, token)).revision.digest

    def manifest_mark(self, digest: str) -> bytes:
        """What only this revision's manifest holds, and so only a push of it."""
        path = self.stack.root / "manager" / "artifacts" / "revisions" / digest / "manifest.json"
        return json.loads(path.read_bytes())["layers"][0]["sha256"].encode()

    def payload_mark(self, digest: str) -> bytes:
        """Bytes of the second half of this payload that no other stored one has."""
        folder = self.stack.root / "manager" / "artifacts" / "revisions"
        payload = (folder / digest / "payload").read_bytes()
        others = [p.read_bytes() for p in folder.glob("*/payload") if p.parent.name != digest]
        windows = (payload[i : i + 64] for i in range(len(payload) // 2, len(payload), 64))
        return next(w for w in windows if not any(w in other for other in others))

    async def load(self, name: str) -> None:
        """Ask for it on the device."""
        reply = await self.stack.adapters().LoadAdapter(
            pb.LoadAdapterRequest(name=name), metadata=self.stack.auth(), timeout=DEADLINE_S
        )
        assert [(p.state, p.failure) for p in reply.placements] == [(pb.RESIDENCY_STATE_ACTIVE, "")]


def _why_no_namespaces() -> str:
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    tried = subprocess.run(
        [*_IN_NAMESPACE, "mount -t tmpfs tmpfs /mnt"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two resident adapters, both streamed to the node."""
    if reason := await asyncio.to_thread(_why_no_namespaces):
        pytest.skip(f"needs a mount namespace: {reason}")
    root = tmp_path_factory.mktemp("push")
    base = rigs.write_copy_base(root / "base")
    stack = Stack(base, root / "stack")
    artifacts = stack.root / "manager" / "artifacts"
    artifacts.mkdir(parents=True)
    hide = f'mount -t tmpfs tmpfs "{artifacts}" && exec "$@"'
    stack.node.command = [*_IN_NAMESPACE, hide, "sh", *stack.node.command]
    proxy = TcpProxy(int(stack.node_address.rpartition(":")[2]))
    proxy.port = free_port()
    await proxy.start()
    nodes = stack.manager.command.index("--nodes") + 1
    stack.manager.command[nodes] = f"127.0.0.1:{proxy.port}"
    try:
        async with stack:
            world = World(proxy, stack, Journal(stack, root))
            await upload_steady(stack, world.journal)
            yield world
    finally:
        await proxy.close()


STAGES: dict[str, tuple[Where, Callable[[World, str], bytes]]] = {
    "load: the push is on its way": (Where.BEFORE, World.manifest_mark),
    "load: half of the payload sent": (Where.MIDDLE, World.payload_mark),
    "load: done, not answered": (Where.REPLY, World.payload_mark),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_the_manager_is_killed(world: World, stage: str, faults: FaultTable) -> None:
    """Half a payload is nothing; the wish is recorded, so the next process brings the adapter there."""
    index, stack = list(STAGES).index(stage), world.stack
    name, token = f"demo/pushed-{index}", 30 + index
    digest = await world.register(name, token)
    where, mark = STAGES[stage]
    with faults.case("manager killed", stage) as case:
        async with SteadyStreams(stack, {**STEADY, None: 5}) as streams:
            gate = world.proxy.hold(mark(world, digest), where=where)
            loading = asyncio.create_task(world.load(name))
            async with asyncio.timeout(60):
                await gate.reached.wait()
            await asyncio.to_thread(stack.manager.kill)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await loading
            assert from_rpc_error(caught.value).code == "UNAVAILABLE"
            gate.release()
            await streams.progress()
            stack.manager.start()
            began_s = time.monotonic()
            await stack.ready()
            assert await becomes_active(world, digest), stack.manager.tail(40)
            case.recovered(time.monotonic() - began_s)
            await streams.progress()
        lost, wrong = await world.journal.compare([*STEADY, name], [stack])
        case.lost += [*streams.unclear, *lost]
        case.wrong += [*streams.wrong, *wrong]


async def test_the_network_to_the_node_swallows_everything(world: World, faults: FaultTable) -> None:
    """The node serves its last catalog; acknowledged changes reach it when the network is back."""
    stack, journal = world.stack, world.journal
    changed, gone = "demo/changed", "demo/gone"
    await journal.upload(changed, 40)
    await journal.upload(gone, 41)
    assert await journal.compare([changed, gone], [stack]) == ([], [])
    with faults.case("network to the node in a blackhole", "upload and delete") as case:
        async with SteadyStreams(stack, {**STEADY, None: 5}) as streams:
            world.proxy.blackhole()
            # Acknowledged when they are durable, not when nodes have them.
            await journal.upload(changed, 42)
            await journal.delete(gone)
            await streams.progress()
            assert await answered(stack, changed) == 40
            world.proxy.clear()
            ended_s = time.monotonic()
            lost, wrong = await journal.compare([*STEADY, changed, gone], [stack], _NOTICED_S)
            case.recovered(time.monotonic() - ended_s)
            await world.load(changed)
            await streams.progress()
        case.lost += [*streams.unclear, *lost]
        case.wrong += [*streams.wrong, *wrong]


async def becomes_active(world: World, digest: str) -> bool:
    """Whether the node has the revision on its device within the interval."""
    end_s = time.monotonic() + 4 * CONVERGENCE_S
    while time.monotonic() < end_s:
        reply = await world.stack.adapters().GetPlacement(
            pb.GetPlacementRequest(), metadata=world.stack.auth(), timeout=DEADLINE_S
        )
        if any(
            p.revision.endswith(digest) and p.state == pb.RESIDENCY_STATE_ACTIVE for p in reply.placements
        ):
            return True
        await asyncio.sleep(0.1)
    return False
