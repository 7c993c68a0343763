"""What was acknowledged is there after any process was killed; replies name the adapter that answered.

Sources: vllm-project/aibrix#236, sgl-project/sglang#12229, vllm-project/vllm#11090, #12174.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet_bench import rigs
from tests.support.stack import Stack, make_request, rest_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = {"demo/one": 11, "demo/two": 22, "demo/three": 33, "demo/gone": 44}


@dataclass(frozen=True, slots=True)
class Served:
    """A manager over two nodes: `stack` has the manager and one node, `replica` the other node."""

    stack: Stack
    replica: Stack
    journal: dict[str, str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """One for all tests: each leaves every process running and the journal true."""
    root = tmp_path_factory.mktemp("restarts")
    base = rigs.write_copy_base(root / "base")
    stack = Stack(base, root / "stack", node_flags=["--drain-grace-s", "1"])
    replica = Stack(base, root / "replica")
    nodes = stack.manager.command.index("--nodes") + 1
    stack.manager.command[nodes] = f"{stack.node_address},{replica.node_address}"
    replica.node.start()
    try:
        async with stack:
            replica.token = stack.token
            replica.adapters = stack.adapters  # type: ignore[method-assign]
            yield Served(stack, replica, await upload_all(stack, root))
    finally:
        await replica.__aexit__()


async def upload_all(stack: Stack, root: Path) -> dict[str, str]:
    """Upload the three watermarks; returns the journal of acknowledged digests."""
    journal: dict[str, str] = {}
    for name in ("demo/one", "demo/two", "demo/three"):
        reply = await stack.upload(rigs.write_moe_watermark(root / name, TOKENS[name]), name)
        journal[name] = reply.revision.digest
    return journal


async def listed(stack: Stack) -> dict[str, str]:
    """Name and current digest of every adapter the manager lists, over pages of two."""
    found: dict[str, str] = {}
    token = ""
    while True:
        reply = await stack.adapters().ListAdapters(
            adapter_pb2.ListAdaptersRequest(parent="tenants/demo", page_size=2, page_token=token),
            metadata=stack.auth(),
            timeout=10,
        )
        assert len(reply.adapters) <= 2
        for adapter in reply.adapters:
            _, tenant, _, name = adapter.name.split("/")
            found[f"{tenant}/{name}"] = adapter.current_digest
        token = reply.next_page_token
        if not token:
            return found


async def check(stack: Stack, journal: dict[str, str], within_s: float = 15.0) -> None:
    """Each adapter answers with its own watermark and names its revision; the list equals the journal."""
    end = time.monotonic() + within_s
    for name, digest in journal.items():
        while True:
            try:
                done = await stack.generate([5], adapter=name, max_tokens=4)
                break
            except grpc.aio.AioRpcError as error:
                waiting = {
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.NOT_FOUND,
                    grpc.StatusCode.UNAUTHENTICATED,
                }
                if error.code() not in waiting or time.monotonic() > end:
                    raise
                await asyncio.sleep(0.1)
        assert done.token_ids == [TOKENS[name]] * 4
        assert done.finish is not None
        assert done.finish.adapter.digest == digest
    assert await listed(stack) == journal


async def test_a_second_replica_follows(served: Served, tmp_path: Path) -> None:
    """Two nodes serve the same adapters; what is deleted is gone from both."""
    first, second = served.stack, served.replica
    reply = await first.upload(rigs.write_moe_watermark(tmp_path / "gone", 44), "demo/gone")
    for stack in (first, second):
        await check(stack, served.journal | {"demo/gone": reply.revision.digest})
    request = adapter_pb2.DeleteAdapterRequest(name="tenants/demo/adapters/gone")
    await first.adapters().DeleteAdapter(request, metadata=first.auth(), timeout=20)
    for stack in (first, second):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stack.generate([5], adapter="demo/gone", max_tokens=1)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        await check(stack, served.journal)


async def test_a_killed_node_comes_back(served: Served) -> None:
    """A kill -9 of the node: it is another instance that serves the same."""
    stack = served.stack
    before = (await stack.model()).instance_id
    stack.node.kill()
    stack.node.start()
    await stack.ready()
    await check(stack, served.journal)
    assert (await stack.model()).instance_id != before


async def test_a_killed_manager_comes_back(served: Served) -> None:
    """A kill -9 of the manager, with requests served while it is away."""
    stack = served.stack
    stack.manager.kill()
    for name in served.journal:
        assert (await stack.generate([5], adapter=name, max_tokens=4)).token_ids == [TOKENS[name]] * 4
    stack.manager.start()
    await stack.ready()
    await check(stack, served.journal)


async def test_both_are_killed_and_come_back(served: Served) -> None:
    """A kill -9 of both."""
    stack = served.stack
    stack.manager.kill()
    stack.node.kill()
    stack.node.start()
    stack.manager.start()
    await stack.ready()
    await check(stack, served.journal)


async def test_the_stack_stops_cleanly_and_keeps_its_data(served: Served) -> None:
    """SIGTERM ends both with exit code 0, in time though a stream is open; the next start has everything."""
    stack = served.stack
    assert await asyncio.to_thread(stack.manager.stop) == 0, stack.manager.tail()
    call = stack.inference().Generate(make_request([5], max_tokens=8000), metadata=stack.auth())
    await call.read()
    begin = time.monotonic()
    assert stack.node.popen is not None
    stack.node.popen.terminate()
    try:
        async for _ in rest_of(call):
            pass
    except grpc.aio.AioRpcError:
        pass
    code = await asyncio.to_thread(stack.node.popen.wait, 15)
    assert time.monotonic() - begin < 8
    assert code == 0, stack.node.tail()
    for process in (stack.manager, stack.node):
        process.start()
    await stack.ready()
    await check(stack, served.journal)
