"""Clients that ping often keep their connection, in a long silence and between calls."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from lorikeet_rpc.server import RpcServer

pytestmark = pytest.mark.long
# gRPC's default server forgives two pings without data in five minutes; the third ends the connection.
_PING_S, _SILENCE_S = 6, 27


async def _peer(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
    await asyncio.sleep(float(request.value))
    yield StringValue(value=context.peer())


@pytest.mark.parametrize("is_idle", [False, True])
async def test_pings_never_end_the_connection(is_idle: bool) -> None:
    """A call that is silent for long succeeds, and after a long pause the same connection is still there."""
    server = RpcServer("127.0.0.1:0", tls=None, interceptors=[], service_names=[])
    handler = grpc.unary_stream_rpc_method_handler(
        _peer,
        request_deserializer=StringValue.FromString,
        response_serializer=StringValue.SerializeToString,
    )
    server.server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Peer", {"Peer": handler}),)
    )
    target = f"127.0.0.1:{await server.start()}"
    options = [
        ("grpc.keepalive_time_ms", _PING_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    try:
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            method: Any = channel.unary_stream(
                "/test.Peer/Peer",
                request_serializer=StringValue.SerializeToString,
                response_deserializer=StringValue.FromString,
            )

            async def peer(silence_s: float) -> str:
                return (await method(StringValue(value=str(silence_s))).read()).value

            before = await peer(0)
            if is_idle:
                await asyncio.sleep(_SILENCE_S)
            assert await peer(0 if is_idle else _SILENCE_S) == before
    finally:
        await server.server.stop(None)
