"""However a request ends, its hold on its adapter ends exactly once.

Sources: sgl-project/sglang#34205, #31808, #29179.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet_bench import rigs
from tests.support.stack import Stack, make_request

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = [7] * 1500


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One slot, few places, small steps: adapters A (token 10) and B (token 20)."""
    root = tmp_path_factory.mktemp("leases")
    flags = ["--max-active-adapters", "1", "--max-running-requests", "4", "--max-step-tokens", "64"]
    async with Stack(rigs.write_copy_base(root / "base"), root / "stack", node_flags=flags) as running:
        for name, token in (("a", 10), ("b", 20)):
            await running.upload(rigs.write_moe_watermark(root / name, token), f"demo/{name}")
        for name in "ab":
            await running.wait_known(f"demo/{name}")
        yield running


async def settled(stack: Stack, timeout_s: float = 5.0) -> None:
    """Wait until no request is left and the counters are at rest."""
    end = time.monotonic() + timeout_s
    while True:
        status = await stack.status()
        at_rest = (status.running_requests, status.waiting_requests, status.adapter_leases) == (0, 0, 0)
        if at_rest and status.kv_blocks_available == status.kv_blocks_total:
            return
        assert time.monotonic() < end, f"not at rest after {timeout_s} s: {status}"
        await asyncio.sleep(0.02)


async def test_cancels_everywhere_then_unload_then_the_other(stack: Stack) -> None:
    """Cancels while queued, in prefill, in decode, five refusals; then A unloads at once, B answers."""
    await settled(stack)
    stub = stack.inference()
    queued = [
        stub.Generate(make_request(LONG, adapter="demo/a", max_tokens=50), metadata=stack.auth(), timeout=120)
        for _ in range(20)
    ]
    await asyncio.sleep(0.15)
    for call in queued[10:]:
        call.cancel()
    await asyncio.sleep(0.1)
    for call in queued[:10]:
        call.cancel()
    decoding = [
        stub.Generate(
            make_request([1], adapter="demo/a", max_tokens=4000), metadata=stack.auth(), timeout=120
        )
        for _ in range(10)
    ]
    started = await asyncio.wait_for(decoding[0].read(), 30)
    assert {t.id for t in started.tokens} <= {10}
    for call in decoding:
        call.cancel()
    for bad in (
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"max_tokens": 10**6},
        {"stop_strings": [""]},
        {"logprobs": 999},
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stack.generate([1], adapter="demo/a", **bad)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await settled(stack)
    begin = time.monotonic()
    await stack.adapters().UnloadAdapter(
        adapter_pb2.UnloadAdapterRequest(name="demo/a"), metadata=stack.auth(), timeout=10
    )
    assert time.monotonic() - begin < 1.0
    assert (await stack.generate([1], adapter="demo/b", max_tokens=4)).token_ids == [20] * 4
    await settled(stack)


async def test_one_slot_is_shared_in_turn(stack: Stack) -> None:
    """Requests for two adapters over one slot all end, each with its own token, base ones beside them."""
    names = ["demo/a", "demo/b", None] * 6
    done = await asyncio.gather(*(stack.generate([3], adapter=n, max_tokens=8) for n in names))
    want = {"demo/a": [10] * 8, "demo/b": [20] * 8, None: [3] * 8}
    assert [d.token_ids for d in done] == [want[n] for n in names]
    await settled(stack)
