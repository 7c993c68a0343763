"""Every way a generation may be ended from outside: the engine stops at once, nothing is left behind."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog

from inference_service.domain.errors import EngineDeadError
from lorikeet.inference.v1 import generation_pb2
from lorikeet.residency.v1 import residency_pb2
from lorikeet_rpc.channel import open_channel
from lorikeet_rpc.errors import from_rpc_error
from tests.support.fake_engine import FakeEngine, make_info
from tests.support.node import (
    ACME,
    NODE_TOKEN,
    OTHER,
    RunningNode,
    auth,
    code_of,
    finished,
    make_request,
    run_node,
)
from tests.support.waiting import eventually


def slow_engine(step_s: float = 0.01) -> FakeEngine:
    """Never finishes by itself within a test."""
    engine = FakeEngine(make_info(max_context_tokens=1_000_000))
    engine.step_s = step_s
    return engine


def endless(**changes: Any) -> generation_pb2.GenerateRequest:
    """A request for more tokens than a test has time for."""
    return make_request(**{"max_tokens": 900_000, "request_id": "left", **changes})


async def _cancel_while_streaming(node: RunningNode) -> None:
    call = node.inference.Generate(endless(), metadata=auth(ACME))
    for _ in range(3):
        await call.read()
    call.cancel()


async def _cancel_while_waiting(node: RunningNode) -> None:
    node.engine.held = asyncio.Event()
    call = node.inference.Generate(endless(), metadata=auth(ACME))
    reading = asyncio.ensure_future(call.read())
    await eventually(lambda: node.engine.running)
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def _cancel_without_reading(node: RunningNode) -> None:
    call = node.inference.Generate(endless(), metadata=auth(ACME))
    await eventually(lambda: node.engine.running)
    await asyncio.sleep(0.1)
    call.cancel()


async def _deadline(node: RunningNode) -> None:
    assert (
        await code_of(node.inference.Generate(endless(), metadata=auth(ACME), timeout=0.2))
        is grpc.StatusCode.DEADLINE_EXCEEDED
    )


async def _unary_cancel(node: RunningNode) -> None:
    request = generation_pb2.CompleteRequest(request=endless(max_tokens=90_000))
    call = node.inference.Complete(request, metadata=auth(ACME))
    waiting = asyncio.ensure_future(call)
    await eventually(lambda: node.engine.running)
    call.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def _unary_deadline(node: RunningNode) -> None:
    request = generation_pb2.CompleteRequest(request=endless(max_tokens=90_000))
    code = await code_of(node.inference.Complete(request, metadata=auth(ACME), timeout=0.2))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def _closed_channel(node: RunningNode) -> None:
    channel = open_channel(node.target, token=ACME, aio=True)
    call: Any = channel.unary_stream(
        "/lorikeet.inference.v1.InferenceService/Generate",
        request_serializer=generation_pb2.GenerateRequest.SerializeToString,
        response_deserializer=generation_pb2.GenerateResponse.FromString,
    )(endless())
    await call.read()
    await channel.close()


@pytest.mark.parametrize(
    "leave",
    [
        _cancel_while_streaming,
        _cancel_while_waiting,
        _cancel_without_reading,
        _deadline,
        _unary_cancel,
        _unary_deadline,
        _closed_channel,
    ],
)
async def test_leaving_stops_the_engine(
    tmp_path: Path, leave: Callable[[RunningNode], Awaitable[None]]
) -> None:
    """However the client leaves: the request is aborted and gone, and its id is free again."""
    with structlog.testing.capture_logs() as events:
        async with run_node(tmp_path, slow_engine()) as node:
            await leave(node)
            await eventually(lambda: not node.engine.running, timeout_s=1)
            emitted = sum(node.engine.emitted.values())
            await asyncio.sleep(0.1)
            assert sum(node.engine.emitted.values()) == emitted
            # Nothing stays registered under the tenant.
            abort = generation_pb2.AbortRequest(request_id="left")
            assert not (await node.inference.Abort(abort, metadata=auth(ACME))).aborted
    lines = [e for e in events if e["event"] == "request.finished" and "prompt_tokens" in e]
    assert [line["code"] for line in lines] in (["CANCELLED"], ["DEADLINE_EXCEEDED"])
    assert lines[0]["output_tokens"] <= emitted


_CLIENT = """
import sys
from lorikeet.inference.v1 import generation_pb2, inference_service_pb2_grpc
from lorikeet_rpc.channel import open_channel
channel = open_channel(sys.argv[1], token=sys.argv[2], aio=False)
sampling = generation_pb2.SamplingParams(max_tokens=900000)
request = generation_pb2.GenerateRequest(prompt="ab", sampling=sampling)
for _ in inference_service_pb2_grpc.InferenceServiceStub(channel).Generate(request):
    print("token", flush=True)
"""


async def test_a_killed_client_stops_the_engine(tmp_path: Path) -> None:
    """Kill -9: the kernel closes the connection, the request is gone at once."""
    async with run_node(tmp_path, slow_engine()) as node:
        with subprocess.Popen(  # noqa: ASYNC220 (starting it is quick; reading is on a thread)
            [sys.executable, "-c", _CLIENT, node.target, ACME], stdout=subprocess.PIPE, cwd=tmp_path
        ) as client:
            assert client.stdout is not None
            for _ in range(3):
                assert await asyncio.to_thread(client.stdout.readline)
            client.send_signal(signal.SIGKILL)
        await eventually(lambda: not node.engine.running, timeout_s=1)


async def test_a_slow_reader_holds_only_itself_up(tmp_path: Path) -> None:
    """An unread stream stops being made after what the transport buffers; others run on."""
    engine = FakeEngine(make_info(max_context_tokens=10_000_000))
    async with run_node(tmp_path, engine) as node:
        lazy = node.inference.Generate(endless(max_tokens=5_000_000, logprobs=20), metadata=auth(ACME))
        await lazy.read()
        (lazy_id,) = engine.running
        counts: list[int] = []
        while len(counts) < 3 or counts[-1] != counts[-3]:
            await asyncio.sleep(0.2)
            counts.append(engine.emitted[lazy_id])
        assert len(await node.generate(make_request(max_tokens=100))) == 100
        assert engine.emitted[lazy_id] == counts[-1]
        lazy.cancel()
        await eventually(lambda: not engine.running, timeout_s=1)


async def test_deadline_in_the_engine_ends_with_reason_and_status(tmp_path: Path) -> None:
    """Where the engine sees the deadline first, the last message says DEADLINE and the status says it too."""
    engine = slow_engine()
    async with run_node(tmp_path, engine) as node:
        call = node.inference.Generate(endless(), metadata=auth(ACME), timeout=60)
        await call.read()
        (engine_id,) = engine.running
        object.__setattr__(engine.requests[engine_id], "deadline_s", time.monotonic())
        last = await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while (message := await call.read()) is not grpc.aio.EOF:
                last = message
    assert last.finish.reason == generation_pb2.FINISH_REASON_DEADLINE
    assert from_rpc_error(caught.value).reason == "DEADLINE_EXCEEDED"


async def test_a_deadline_ends_each_sample_and_then_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sample has its finish; the status comes after the last, and counts all samples' tokens."""
    # The client's own clock would end the call before the last word comes.
    monkeypatch.setattr("inference_service.api.inference_servicer._time_remaining_s", lambda _: 1.0)
    async with run_node(tmp_path, slow_engine()) as node:
        call = node.inference.Generate(endless(n=3), metadata=auth(ACME), timeout=60)
        messages: list[generation_pb2.GenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while (message := await call.read()) is not grpc.aio.EOF:
                messages.append(message)
    ends = {m.index: m.finish.reason for m in messages if m.HasField("finish")}
    assert ends == dict.fromkeys(range(3), generation_pb2.FINISH_REASON_DEADLINE)
    failure = from_rpc_error(caught.value)
    assert failure.reason == "DEADLINE_EXCEEDED"
    assert f"after {sum(len(m.tokens) for m in messages)} output tokens" in failure.message


async def test_an_expired_request_never_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline that is over when the request is taken costs no prefill."""
    # The client's own clock ends a call that is over before it is sent; what is left is set on the server.
    monkeypatch.setattr("inference_service.api.inference_servicer._time_remaining_s", lambda _: 0.0)
    async with run_node(tmp_path) as node:
        call = node.inference.Generate(make_request(), metadata=auth(ACME))
        assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not node.engine.requests


async def test_abort(tmp_path: Path) -> None:
    """The stream ends with ABORTED and what was made so far; other tenants cannot; ids are checked."""
    async with run_node(tmp_path, slow_engine()) as node:
        call = node.inference.Generate(endless(request_id="long-one"), metadata=auth(ACME))
        await call.read()
        request = generation_pb2.AbortRequest(request_id="long-one")
        assert not (await node.inference.Abort(request, metadata=auth(OTHER))).aborted
        assert (await node.inference.Abort(request, metadata=auth(ACME))).aborted
        last = (await finished(call))[-1]
        assert last.finish.reason == generation_pb2.FINISH_REASON_ABORTED
        assert not (await node.inference.Abort(request, metadata=auth(ACME))).aborted
        bad = generation_pb2.AbortRequest(request_id="a b")
        assert (
            await code_of(node.inference.Abort(bad, metadata=auth(ACME))) is grpc.StatusCode.INVALID_ARGUMENT
        )


async def test_a_dying_engine_fails_its_requests_and_shows_in_health(tmp_path: Path) -> None:
    """UNAVAILABLE with a retry time after what was streamed; NOT_SERVING until it is back."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with run_node(tmp_path, slow_engine()) as node, open_channel(node.target, aio=True) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def serving() -> bool:
            reply = await health.Check(health_pb2.HealthCheckRequest())
            return reply.status == health_pb2.HealthCheckResponse.SERVING

        assert await serving()
        call = node.inference.Generate(endless(), metadata=auth(ACME))
        assert (await call.read()).tokens
        node.engine.die()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finished(call)
        failure = from_rpc_error(caught.value)
        assert (failure.reason, failure.retry_after_s) == (EngineDeadError.reason, 5)
        for alive in (False, True):
            if alive:
                node.engine.revive()
            async with asyncio.timeout(3):
                while await serving() is not alive:  # noqa: ASYNC110 (only a poll shows a server's health)
                    await asyncio.sleep(0.05)


async def test_drain_lets_running_requests_end(tmp_path: Path) -> None:
    """Drain refuses new requests, waits for running ones and reports those it had to abort."""
    async with run_node(tmp_path, slow_engine()) as node:
        short = asyncio.create_task(node.generate(make_request(max_tokens=30)))
        await eventually(lambda: node.engine.running)
        draining = node.residency.Drain(residency_pb2.DrainRequest(grace_s=10), metadata=auth(NODE_TOKEN))
        waiting = asyncio.ensure_future(draining)
        await asyncio.sleep(0.05)
        assert (
            await code_of(node.inference.Generate(make_request(), metadata=auth(ACME)))
            is grpc.StatusCode.UNAVAILABLE
        )
        assert (await short)[-1].finish.reason == generation_pb2.FINISH_REASON_LENGTH
        assert (await waiting).aborted_requests == 0


async def test_drain_aborts_what_outlasts_the_grace(tmp_path: Path) -> None:
    """The stream ends with ABORTED, the count is told."""
    async with run_node(tmp_path, slow_engine()) as node:
        long = asyncio.create_task(node.generate(endless()))
        await eventually(lambda: node.engine.running)
        reply = await node.residency.Drain(residency_pb2.DrainRequest(grace_s=0.1), metadata=auth(NODE_TOKEN))
        assert reply.aborted_requests == 1
        assert (await long)[-1].finish.reason == generation_pb2.FINISH_REASON_ABORTED


async def test_shutdown_with_open_streams_ends_within_the_grace(tmp_path: Path) -> None:
    """An endless stream and a watch do not hold the process up; the stream ends, the engine is free."""
    async with run_node(tmp_path, slow_engine(), drain_grace_s=0.3) as node:
        call = node.inference.Generate(endless(), metadata=auth(ACME))
        await call.read()
        watch = node.residency.WatchResidency(
            residency_pb2.WatchResidencyRequest(), metadata=auth(NODE_TOKEN)
        )
        await watch.read()
        began = time.monotonic()
        await node.node.stop(0.5)
        assert time.monotonic() - began < 3
        assert not node.engine.running
        assert (await finished(call))[-1].finish.reason == generation_pb2.FINISH_REASON_ABORTED
