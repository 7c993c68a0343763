"""Every way to write a handler, against a real server and real channels on loopback."""

import asyncio

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from lorikeet_rpc.channel import open_channel
from tests.support.echo_server import echo_rig, method


@pytest.mark.parametrize("name", ["unary", "sync_unary"])
async def test_unary_handlers(name: str) -> None:
    """The caller and the client's request id are known inside the handler, sync or async."""
    async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        reply = await method(channel, "unary_unary", name)(
            StringValue(value="hi"), metadata=(("x-request-id", "r-7"),)
        )
    assert reply.value == "acme r-7 hi"


@pytest.mark.parametrize("name", ["generator", "writer", "sync_generator"])
async def test_stream_handlers(name: str) -> None:
    """Every way to write a streaming handler passes through, in order."""
    async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        replies = [r.value async for r in method(channel, "unary_stream", name)(StringValue(value="hi"))]
    assert len(replies) == 3
    assert all(r.startswith("acme ") for r in replies)


async def test_client_streams() -> None:
    """Streams from the client, answered once or by a stream."""
    async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        parts = [StringValue(value=v) for v in "abc"]
        assert (await method(channel, "stream_unary", "collect")(iter(parts))).value == "abc"
        assert [r.value async for r in method(channel, "stream_stream", "chat")(iter(parts))] == [
            "a",
            "b",
            "c",
        ]


async def test_blocking_channel_sends_the_token() -> None:
    """The blocking client works against the same server, for unary and streams."""
    async with echo_rig() as rig:

        def call() -> tuple[str, int]:
            with open_channel(rig.target, token="good", aio=False) as channel:
                reply = method(channel, "unary_unary", "unary")(StringValue(value="hi"))
                return reply.value, len(
                    list(method(channel, "unary_stream", "generator")(StringValue(value="x")))
                )

        value, replies = await asyncio.to_thread(call)
    assert value.startswith("acme ")
    assert replies == 3


async def test_large_requests_within_the_documented_limit() -> None:
    """Requests far above gRPC's default arrive; beyond our limit: RESOURCE_EXHAUSTED."""
    async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        reply = await method(channel, "stream_unary", "collect")(iter([StringValue(value="x" * 3_000_000)]))
        assert len(reply.value) == 3_000_000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(channel, "unary_unary", "unary")(StringValue(value="x" * (33 * 1024 * 1024)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
