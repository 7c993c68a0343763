"""Where a server may listen, and how it stops."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet_rpc.channel import open_channel
from lorikeet_rpc.server import ListenError, RpcServer
from tests.support.echo_server import echo_rig, method
from tests.support.waiting import eventually


async def test_plain_text_beyond_loopback_needs_a_flag() -> None:
    """The refusal names both ways out."""
    with pytest.raises(ListenError, match=r"--tls-cert.*--insecure-listen"):
        RpcServer("0.0.0.0:0", tls=None, interceptors=[], service_names=[])
    server = RpcServer("0.0.0.0:0", tls=None, interceptors=[], service_names=[], insecure_listen=True)
    assert await server.start() > 0
    await server.server.stop(None)


async def test_taken_port_is_refused() -> None:
    """Two servers never share a port's calls."""
    async with echo_rig() as rig:
        second = RpcServer(rig.target, tls=None, interceptors=[], service_names=[])
        with pytest.raises(ListenError, match="cannot listen"):
            await second.start()
        await second.server.stop(None)


async def test_shutdown_waits_for_work_but_not_for_watches() -> None:
    """A draining server says NOT_SERVING, lets running calls end, and cuts watches off at once."""
    async with (
        echo_rig(endless=frozenset({"silent"})) as rig,
        open_channel(rig.target, token="good", aio=True) as channel,
    ):
        watch = method(channel, "unary_stream", "silent")(StringValue())
        health_watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health_watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        parts: asyncio.Queue[StringValue | None] = asyncio.Queue()

        async def requests() -> AsyncIterator[StringValue]:
            while part := await parts.get():
                yield part

        working = method(channel, "stream_unary", "collect")(requests())
        parts.put_nowait(StringValue(value="a"))
        await eventually(lambda: not rig.interceptor._became_idle.is_set(), 30)  # the call has arrived
        stopping = asyncio.create_task(rig.server.shut_down(rig.interceptor.idle, grace_s=30))
        assert (await health_watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        parts.put_nowait(StringValue(value="b"))
        parts.put_nowait(None)
        assert (await working).value == "ab"
        await asyncio.wait_for(stopping, 30)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await watch.read()


async def test_shutdown_ends_after_the_grace_time() -> None:
    """A call that never ends costs the grace time, not more."""
    async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        call = method(channel, "unary_stream", "endless")(StringValue())
        await call.read()
        await asyncio.wait_for(rig.server.shut_down(rig.interceptor.idle, grace_s=0.5), 3)
        assert await asyncio.wait_for(rig.echo.ended.get(), 1) == "closed"
