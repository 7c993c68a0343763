"""A client that cancels, dies or runs out of time stops the work at once, also in the queue.

Sources: grpc/grpc#22874, #28999, mudler/LocalAI#11822.
"""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from lorikeet.inference.v1 import generation_pb2
from lorikeet_bench import rigs
from tests.support.stack import Stack, make_request, rest_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOOMED_CLIENT = """
import sys, grpc
from lorikeet.inference.v1 import generation_pb2 as g, inference_service_pb2_grpc as s
sampling = g.SamplingParams(temperature=0, max_tokens=4000)
request = g.GenerateRequest(token_ids=g.TokenIds(ids=[5]), sampling=sampling)
stub = s.InferenceServiceStub(grpc.insecure_channel(sys.argv[1]))
for n, _ in enumerate(stub.Generate(request, metadata=(("authorization", "Bearer " + sys.argv[2]),))):
    if n == 3:
        print("streaming", flush=True)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two places only."""
    root = tmp_path_factory.mktemp("cancel")
    base = rigs.write_copy_base(root / "base")
    async with Stack(base, root / "stack", node_flags=["--max-running-requests", "2"]) as running:
        yield running


async def at_rest(stack: Stack, timeout_s: float = 2.0) -> None:
    """Wait until nothing runs or waits and every block is available again."""
    end = time.monotonic() + timeout_s
    while True:
        status = await stack.status()
        if (status.running_requests, status.waiting_requests) == (0, 0):
            assert status.kv_blocks_available == status.kv_blocks_total
            return
        assert time.monotonic() < end, f"still at work after {timeout_s} s: {status}"
        await asyncio.sleep(0.02)


async def test_client_cancels_after_three_messages(stack: Stack) -> None:
    """The request leaves the running set."""
    call = stack.inference().Generate(make_request([5], max_tokens=4000), metadata=stack.auth())
    for _ in range(3):
        await call.read()
    assert (await stack.status()).running_requests == 1
    call.cancel()
    await at_rest(stack)


async def test_client_process_is_killed(stack: Stack) -> None:
    """A kill -9 of the client ends its request."""
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DOOMED_CLIENT, stack.node_address, stack.token, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    assert await asyncio.wait_for(client.stdout.readline(), 30) == b"streaming\n"
    assert (await stack.status()).running_requests == 1
    client.send_signal(signal.SIGKILL)
    await client.wait()
    await at_rest(stack)


async def test_deadline_ends_a_running_request(stack: Stack) -> None:
    """The client sees DEADLINE_EXCEEDED and what was streamed before is valid."""
    seen: list[int] = []
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for piece in stack.inference().Generate(
            make_request([5], max_tokens=8000), metadata=stack.auth(), timeout=0.3
        ):
            seen += [t.id for t in piece.tokens]
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert set(seen) <= {5}
    await at_rest(stack)


async def test_deadline_in_the_queue_is_never_prefilled(stack: Stack) -> None:
    """Both places taken: a third request with a short deadline computes nothing."""
    stub = stack.inference()
    holders = [stub.Generate(make_request([5], max_tokens=8000), metadata=stack.auth()) for _ in range(2)]
    for call in holders:
        await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stack.generate([9] * 200, max_tokens=5, timeout_s=0.15)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for call in holders:
        call.cancel()
    await at_rest(stack)
    late = await stack.generate([9] * 200, max_tokens=1)
    assert late.finish is not None
    assert late.finish.usage.cached_tokens == 0, "the expired request was prefilled"


async def test_abort_by_id(stack: Stack) -> None:
    """Abort ends the stream with its reason; a second abort finds nothing; another tenant finds nothing."""
    other = await stack.set_tenant("stranger")
    request = make_request([5], max_tokens=8000, request_id="to-abort")
    call = stack.inference().Generate(request, metadata=stack.auth())
    await call.read()
    stub = stack.inference()
    ask = generation_pb2.AbortRequest(request_id="to-abort")
    end = time.monotonic() + 5
    while True:  # the new tenant's token reaches the node with the next catalog
        try:
            stolen = await stub.Abort(ask, metadata=stack.auth(other), timeout=5)
            break
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
    assert not stolen.aborted
    assert (await stub.Abort(ask, metadata=stack.auth(), timeout=5)).aborted
    finish = None
    async for piece in rest_of(call):
        if piece.HasField("finish"):
            finish = piece.finish
    assert finish is not None
    assert finish.reason == generation_pb2.FINISH_REASON_ABORTED
    assert not (await stub.Abort(ask, metadata=stack.auth(), timeout=5)).aborted
    await at_rest(stack)
