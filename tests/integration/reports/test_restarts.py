"""What was acknowledged is there after any process was killed; replies name the adapter that answered.

Sources: vllm-project/aibrix#236, sgl-project/sglang#12229, vllm-project/vllm#11090, #12174.
"""

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from lorikeet.adapters.v1 import adapter_pb2
from tests.support import rigs
from tests.support.stack import Process, Stack

TOKENS = {"demo/one": 11, "demo/two": 22, "demo/three": 33}


async def upload_all(stack: Stack, root: Path) -> dict[str, str]:
    """Upload the three watermarks; returns the journal of acknowledged digests."""
    journal: dict[str, str] = {}
    for name, token in TOKENS.items():
        reply = await stack.upload(rigs.write_moe_watermark(root / name, token), name)
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


async def test_each_side_is_killed_and_comes_back(tmp_path: Path) -> None:
    """A kill -9 of the node, of the manager, of both; with requests served while the manager is away."""
    base = rigs.write_copy_base(tmp_path / "base")
    async with Stack(base, tmp_path / "stack") as stack:
        journal = await upload_all(stack, tmp_path)
        await check(stack, journal)
        before = (await stack.model()).instance_id

        stack.node.kill()
        stack.node.start()
        await stack.ready()
        await check(stack, journal)
        assert (await stack.model()).instance_id != before

        stack.manager.kill()
        for name, token in TOKENS.items():
            assert (await stack.generate([5], adapter=name, max_tokens=4)).token_ids == [token] * 4
        stack.manager.start()
        await stack.ready()
        await check(stack, journal)

        stack.manager.kill()
        stack.node.kill()
        stack.node.start()
        stack.manager.start()
        await stack.ready()
        await check(stack, journal)


async def test_a_second_replica_follows(tmp_path: Path) -> None:
    """Two nodes serve the same adapters; what is deleted is gone from both."""
    base = rigs.write_copy_base(tmp_path / "base")
    first = Stack(base, tmp_path / "first")
    second = Stack(base, tmp_path / "second")
    first.manager.command[first.manager.command.index("--nodes") + 1] = (
        f"{first.node_address},{second.node_address}"
    )
    second.node.start()
    try:
        async with first:
            second.token = first.token
            journal = await upload_all(first, tmp_path)
            await check(first, journal)
            second.adapters = first.adapters  # type: ignore[method-assign]
            await check(second, journal)
            await first.adapters().DeleteAdapter(
                adapter_pb2.DeleteAdapterRequest(name="tenants/demo/adapters/one"),
                metadata=first.auth(),
                timeout=20,
            )
            del journal["demo/one"]
            for stack in (first, second):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stack.generate([5], adapter="demo/one", max_tokens=1)
                assert error.value.code() is grpc.StatusCode.NOT_FOUND
                await check(stack, journal)
    finally:
        second.node.stop()


async def test_the_stack_stops_cleanly_and_keeps_its_data(tmp_path: Path) -> None:
    """SIGTERM ends both with exit code 0, leaving no server behind; the next start has everything."""
    base = rigs.write_copy_base(tmp_path / "base")
    async with Stack(base, tmp_path / "stack") as stack:
        journal = await upload_all(stack, tmp_path)
        processes: list[Process] = [stack.manager, stack.node]
        for process in processes:
            assert await asyncio.to_thread(process.stop) == 0, process.tail()
        for process in processes:
            process.start()
        await stack.ready()
        await check(stack, journal)
