"""A connection whose other end is gone without a word: both sides notice, long before a minute is over."""

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from lorikeet.residency.v1 import residency_pb2, residency_service_pb2_grpc
from lorikeet_rpc.channel import Ping, open_channel
from lorikeet_rpc.server import RpcServer
from tests.support.fake_node import TOKEN, FakeNode
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import eventually

# Far above the pings' own times and below gRPC's default of a minute for a ping's answer.
_NOTICED_S = 55.0


async def test_a_client_notices_that_its_server_is_gone() -> None:
    """A stream that waits ends with UNAVAILABLE instead of waiting for ever."""
    node = FakeNode()
    await node.start()
    proxy = TcpProxy(int(node.address.rpartition(":")[2]))
    await proxy.start()
    ping = Ping(every_s=6.0, timeout_s=3.0)
    channel = open_channel(f"127.0.0.1:{proxy.port}", token=TOKEN, ping=ping, aio=True)
    try:
        call = residency_service_pb2_grpc.ResidencyServiceStub(channel).WatchResidency(
            residency_pb2.WatchResidencyRequest()
        )
        await call.read()
        proxy.blackhole()
        began_s = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began_s < _NOTICED_S
    finally:
        await channel.close()
        await proxy.close()
        await node.stop()


class Waiting(grpc.GenericRpcHandler):
    """Any stream: one message, then silence."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Answer every method."""

        async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
            yield b"first"
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()

        return grpc.unary_stream_rpc_method_handler(stream)


@pytest.mark.long
async def test_a_server_notices_that_its_client_is_gone() -> None:
    """The call is cancelled, so that what it holds is freed."""
    handler = Waiting()
    server = RpcServer("127.0.0.1:0", tls=None, interceptors=[], service_names=[])
    server.server.add_generic_rpc_handlers((handler,))
    proxy = TcpProxy(await server.start())
    await proxy.start()
    never = [("grpc.keepalive_time_ms", 3_600_000)]
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}", options=never)
    try:
        call = channel.unary_stream("/any/Stream")(b"")
        assert await call.read() == b"first"
        proxy.blackhole()
        await eventually(handler.ended.is_set, _NOTICED_S)
    finally:
        await channel.close()
        await proxy.close()
        await server.server.stop(0)
