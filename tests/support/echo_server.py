"""A server with one handler of each kind, behind the real interceptor, on loopback."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.wrappers_pb2 import StringValue

from lorikeet_contract.status import ServiceError, StatusCode
from lorikeet_rpc.interceptors import (
    Principal,
    RequestInterceptor,
    annotate_request,
    current_principal,
    current_request_id,
)
from lorikeet_rpc.server import RpcServer

SERVICE = "test.Echo"


class DeniedError(ServiceError):
    """What a wrong token gets."""

    code = StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class FullError(ServiceError):
    """An error with everything that a client may be told."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class Echo:
    """One handler of each kind; `ended` records how streams were left."""

    def __init__(self) -> None:
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def unary(self, request: StringValue, context: Any) -> StringValue:
        return self._reply(request.value)

    def sync_unary(self, request: StringValue, context: Any) -> StringValue:
        return self._reply(request.value)

    async def generator(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        for _ in range(3):
            yield self._reply(request.value)

    async def writer(self, request: StringValue, context: Any) -> None:
        for _ in range(3):
            await context.write(self._reply(request.value))

    def sync_generator(self, request: StringValue, context: Any) -> Iterator[StringValue]:
        yield from (self._reply(request.value) for _ in range(3))

    async def endless(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        try:
            while True:
                yield StringValue(value="x")
                await asyncio.sleep(0.01)
        finally:
            self.ended.put_nowait("closed")

    async def silent(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        try:
            await asyncio.sleep(3600)
            yield StringValue()
        finally:
            self.ended.put_nowait("closed")

    async def half(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        yield StringValue(value="first")
        self._reply(request.value)

    async def collect(self, requests: AsyncIterator[StringValue], context: Any) -> StringValue:
        return StringValue(value="".join([r.value async for r in requests]))

    async def chat(self, requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
        async for request in requests:
            yield request

    async def aborts(self, request: StringValue, context: Any) -> StringValue:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "by hand")

    @staticmethod
    def _reply(value: str) -> StringValue:
        if value == "known":
            raise FullError("full", metadata={"limit": "3"}, retry_after_s=2)
        if value == "unknown":
            raise RuntimeError("secret text")
        annotate_request(output_tokens=5)
        return StringValue(value=f"{current_principal().tenant} {current_request_id()} {value}")


def echo_handlers(echo: Echo) -> dict[str, Any]:
    """The methods by name, each of its own kind."""
    codec = {
        "request_deserializer": StringValue.FromString,
        "response_serializer": StringValue.SerializeToString,
    }
    unary = {"unary": echo.unary, "sync_unary": echo.sync_unary, "aborts": echo.aborts}
    streams = {
        name: getattr(echo, name)
        for name in ("generator", "writer", "sync_generator", "endless", "silent", "half")
    }
    return {
        **{n: grpc.unary_unary_rpc_method_handler(b, **codec) for n, b in unary.items()},
        **{n: grpc.unary_stream_rpc_method_handler(b, **codec) for n, b in streams.items()},
        "collect": grpc.stream_unary_rpc_method_handler(echo.collect, **codec),
        "chat": grpc.stream_stream_rpc_method_handler(echo.chat, **codec),
    }


def _authenticate(token: str | None, method: str) -> Principal:
    if token != "good":
        raise DeniedError("no")
    return Principal("acme", token_id="t1")


class Rig:
    """The running server, its handlers and its address."""

    def __init__(self, server: RpcServer, echo: Echo, port: int, interceptor: RequestInterceptor) -> None:
        self.server, self.echo, self.interceptor = server, echo, interceptor
        self.target = f"127.0.0.1:{port}"


@asynccontextmanager
async def echo_rig(**interceptor_options: Any) -> AsyncIterator[Rig]:
    """Serve on a free port while the block lasts; the token is "good"."""
    echo = Echo()
    interceptor = RequestInterceptor(_authenticate, "test", **interceptor_options)
    server = RpcServer("127.0.0.1:0", tls=None, interceptors=[interceptor], service_names=[SERVICE])
    server.server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, echo_handlers(echo)),)
    )
    port = await server.start()
    try:
        yield Rig(server, echo, port, interceptor)
    finally:
        await server.server.stop(None)


def method(channel: Any, kind: str, name: str) -> Callable[..., Any]:
    """A caller of one method, without generated code."""
    return getattr(channel, kind)(
        f"/{SERVICE}/{name}",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=StringValue.FromString,
    )
