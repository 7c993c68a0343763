"""A real server and real channels on loopback: every way to write a handler, and every way a call may end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest

from lorikeet_contract.status import ServiceError, StatusCode
from lorikeet_rpc.channel import open_channel
from lorikeet_rpc.errors import from_rpc_error
from lorikeet_rpc.interceptors import (
    Principal,
    RequestInterceptor,
    annotate_request,
    current_principal,
    current_request_id,
)
from lorikeet_rpc.metrics import RpcMetrics
from lorikeet_rpc.server import ListenError, RpcServer

_SERVICE = "test.Echo"


class _DeniedError(ServiceError):
    code = StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class _FullError(ServiceError):
    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class _Echo:
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
            raise _FullError("full", metadata={"limit": "3"}, retry_after_s=2)
        if value == "unknown":
            raise RuntimeError("secret text")
        annotate_request(output_tokens=5)
        return StringValue(value=f"{current_principal().tenant} {current_request_id()} {value}")


def _handlers(echo: _Echo) -> dict[str, Any]:
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
        raise _DeniedError("no")
    return Principal("acme", token_id="t1")


class _Rig:
    def __init__(self, server: RpcServer, echo: _Echo, port: int, interceptor: RequestInterceptor) -> None:
        self.server, self.echo, self.interceptor = server, echo, interceptor
        self.target = f"127.0.0.1:{port}"


@asynccontextmanager
async def _rig(**interceptor_options: Any) -> AsyncIterator[_Rig]:
    echo = _Echo()
    interceptor = RequestInterceptor(_authenticate, "test", **interceptor_options)
    server = RpcServer("127.0.0.1:0", tls=None, interceptors=[interceptor], service_names=[_SERVICE])
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, _handlers(echo)),))
    port = await server.start()
    try:
        yield _Rig(server, echo, port, interceptor)
    finally:
        await server.server.stop(None)


def _method(channel: Any, kind: str, name: str) -> Callable[..., Any]:
    return getattr(channel, kind)(
        f"/{_SERVICE}/{name}",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=StringValue.FromString,
    )


@pytest.mark.parametrize("name", ["unary", "sync_unary"])
async def test_unary_handlers(name: str) -> None:
    """The caller and the client's request id are known inside the handler, sync or async."""
    async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        reply = await _method(channel, "unary_unary", name)(
            StringValue(value="hi"), metadata=(("x-request-id", "r-7"),)
        )
    assert reply.value == "acme r-7 hi"


@pytest.mark.parametrize("name", ["generator", "writer", "sync_generator"])
async def test_stream_handlers(name: str) -> None:
    """Every way to write a streaming handler passes through, in order."""
    async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        replies = [r.value async for r in _method(channel, "unary_stream", name)(StringValue(value="hi"))]
    assert len(replies) == 3
    assert all(r.startswith("acme ") for r in replies)


async def test_client_streams() -> None:
    """Streams from the client, answered once or by a stream."""
    async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        parts = [StringValue(value=v) for v in "abc"]
        assert (await _method(channel, "stream_unary", "collect")(iter(parts))).value == "abc"
        assert [r.value async for r in _method(channel, "stream_stream", "chat")(iter(parts))] == [
            "a",
            "b",
            "c",
        ]


async def test_blocking_channel_sends_the_token() -> None:
    """The blocking client works against the same server, for unary and streams."""
    async with _rig() as rig:

        def call() -> tuple[str, int]:
            with open_channel(rig.target, token="good", aio=False) as channel:
                reply = _method(channel, "unary_unary", "unary")(StringValue(value="hi"))
                return reply.value, len(
                    list(_method(channel, "unary_stream", "generator")(StringValue(value="x")))
                )

        value, replies = await asyncio.to_thread(call)
    assert value.startswith("acme ")
    assert replies == 3


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
@pytest.mark.parametrize("token", [None, "bad"])
async def test_refused_tokens(kind: str, token: str | None) -> None:
    """No token and a wrong one are UNAUTHENTICATED, for streams too."""
    async with _rig() as rig, open_channel(rig.target, token=token, aio=True) as channel:
        call = _method(channel, kind, "unary" if kind == "unary_unary" else "generator")(
            StringValue(value="hi")
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call if kind == "unary_unary" else call.read())
    assert from_rpc_error(caught.value).reason == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("kind", "name"), [("unary_unary", "unary"), ("unary_unary", "sync_unary"), ("unary_stream", "writer")]
)
async def test_known_errors_arrive_whole(kind: str, name: str) -> None:
    """Reason, metadata and retry delay of a ServiceError reach the client."""
    async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        call = _method(channel, kind, name)(StringValue(value="known"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call if kind == "unary_unary" else call.read())
    failure = from_rpc_error(caught.value)
    assert (failure.code, failure.metadata, failure.retry_after_s) == (
        StatusCode.RESOURCE_EXHAUSTED,
        {"limit": "3"},
        2,
    )


async def test_error_after_the_first_message_keeps_what_was_sent() -> None:
    """An error in mid-stream ends it with a status; the message before it is valid."""
    async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        call = _method(channel, "unary_stream", "half")(StringValue(value="known"))
        assert (await call.read()).value == "first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert from_rpc_error(caught.value).reason == "QUEUE_FULL"


async def test_unknown_error_is_logged_once_and_hidden() -> None:
    """INTERNAL with an id that the log has, with the traceback there and the text not on the wire."""
    with structlog.testing.capture_logs() as events:
        async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _method(channel, "unary_unary", "unary")(StringValue(value="unknown"))
    failure = from_rpc_error(caught.value)
    assert failure.code is StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    failed = [e for e in events if e["event"] == "request.failed"]
    assert [e["error_id"] for e in failed] == [failure.metadata["error_id"]]
    assert isinstance(failed[0]["exc_info"], RuntimeError)


async def test_canonical_line() -> None:
    """One request.finished a call, with code, time, caller and the handler's own facts."""
    with structlog.testing.capture_logs() as events:
        async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
            await _method(channel, "unary_unary", "unary")(StringValue(value="a prompt"))
            with pytest.raises(grpc.aio.AioRpcError):
                await _method(channel, "unary_unary", "aborts")(StringValue())
    ok, aborted = [e for e in events if e["event"] == "request.finished"]
    assert (ok["code"], ok["tenant"], ok["token_id"], ok["output_tokens"]) == ("OK", "acme", "t1", 5)
    assert ok["ms"] > 0
    assert aborted["code"] == "OUT_OF_RANGE"
    assert "a prompt" not in str(events)


@pytest.mark.parametrize("name", ["endless", "silent"])
async def test_cancel_reaches_the_handler_at_once(name: str) -> None:
    """A cancelled stream runs the servicer's finally, whether it was sending or waiting."""
    with structlog.testing.capture_logs() as events:
        async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
            call = _method(channel, "unary_stream", name)(StringValue())
            if name == "endless":
                await call.read()
            else:
                await asyncio.sleep(0.2)
            call.cancel()
            assert await asyncio.wait_for(rig.echo.ended.get(), 1) == "closed"
            await asyncio.wait_for(rig.interceptor.idle(), 1)
    assert [e["code"] for e in events if e["event"] == "request.finished"] == ["CANCELLED"]


async def test_deadline_reaches_the_handler() -> None:
    """An expired deadline ends the handler and is called by its name in the log."""
    with structlog.testing.capture_logs() as events:
        async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
            call = _method(channel, "unary_stream", "silent")(StringValue(), timeout=0.2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert await asyncio.wait_for(rig.echo.ended.get(), 1) == "closed"
            await asyncio.wait_for(rig.interceptor.idle(), 1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert [e["code"] for e in events if e["event"] == "request.finished"] == ["DEADLINE_EXCEEDED"]


async def test_health_and_reflection_need_no_token() -> None:
    """Health of the whole, of the service and of nothing; reflection lists the service."""
    async with _rig() as rig, open_channel(rig.target, aio=True) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", _SERVICE):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await health.Check(health_pb2.HealthCheckRequest(service="no.Such"))
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {s.name async for reply in listing for s in reply.list_services_response.service}
    assert _SERVICE in names


async def test_every_health_watcher_hears_of_a_change() -> None:
    """Also those that stay after another has left; a service that is not here is unknown."""
    async with _rig() as rig, open_channel(rig.target, aio=True) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        gone, stays = (stub.Watch(health_pb2.HealthCheckRequest(service=_SERVICE)) for _ in range(2))
        other = stub.Watch(health_pb2.HealthCheckRequest(service="no.Such"))
        status = health_pb2.HealthCheckResponse
        assert {(await w.read()).status for w in (gone, stays)} == {status.SERVING}
        assert (await other.read()).status == status.SERVICE_UNKNOWN
        gone.cancel()
        await asyncio.sleep(0.1)
        await rig.server.set_serving(serving=False)
        assert (await stays.read()).status == status.NOT_SERVING


async def test_unknown_method_is_unimplemented() -> None:
    """The interceptor leaves what nobody serves to gRPC."""
    async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _method(channel, "unary_unary", "nothing")(StringValue())
    assert from_rpc_error(caught.value).code is StatusCode.UNIMPLEMENTED


async def test_metrics_count_by_method_and_code() -> None:
    """Each finished call is one sample."""
    registry = CollectorRegistry()
    async with (
        _rig(metrics=RpcMetrics(registry)) as rig,
        open_channel(rig.target, token="good", aio=True) as channel,
    ):
        await _method(channel, "unary_unary", "unary")(StringValue(value="x"))
    text = generate_latest(registry).decode()
    assert f'rpc_server_calls_total{{code="OK",method="/{_SERVICE}/unary"}} 1.0' in text


async def test_shutdown_waits_for_work_but_not_for_watches() -> None:
    """A draining server says NOT_SERVING, lets running calls end, and cuts watches off at once."""
    async with (
        _rig(endless=frozenset({"silent"})) as rig,
        open_channel(rig.target, token="good", aio=True) as channel,
    ):
        watch = _method(channel, "unary_stream", "silent")(StringValue())
        health_watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health_watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        parts: asyncio.Queue[StringValue | None] = asyncio.Queue()

        async def requests() -> AsyncIterator[StringValue]:
            while part := await parts.get():
                yield part

        working = _method(channel, "stream_unary", "collect")(requests())
        parts.put_nowait(StringValue(value="a"))
        await asyncio.sleep(0.2)
        stopping = asyncio.create_task(rig.server.shut_down(rig.interceptor.idle, grace_s=30))
        assert (await health_watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        parts.put_nowait(StringValue(value="b"))
        parts.put_nowait(None)
        assert (await working).value == "ab"
        await asyncio.wait_for(stopping, 5)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await watch.read()


async def test_shutdown_ends_after_the_grace_time() -> None:
    """A call that never ends costs the grace time, not more."""
    async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        call = _method(channel, "unary_stream", "endless")(StringValue())
        await call.read()
        await asyncio.wait_for(rig.server.shut_down(rig.interceptor.idle, grace_s=0.5), 3)
        assert await asyncio.wait_for(rig.echo.ended.get(), 1) == "closed"


async def test_plain_text_beyond_loopback_needs_a_flag() -> None:
    """The refusal names both ways out."""
    with pytest.raises(ListenError, match=r"--tls-cert.*--insecure-listen"):
        RpcServer("0.0.0.0:0", tls=None, interceptors=[], service_names=[])
    server = RpcServer("0.0.0.0:0", tls=None, interceptors=[], service_names=[], insecure_listen=True)
    assert await server.start() > 0
    await server.server.stop(None)


async def test_taken_port_is_refused() -> None:
    """Two servers never share a port's calls."""
    async with _rig() as rig:
        second = RpcServer(rig.target, tls=None, interceptors=[], service_names=[])
        with pytest.raises(ListenError, match="cannot listen"):
            await second.start()
        await second.server.stop(None)


async def test_large_requests_within_the_documented_limit() -> None:
    """Requests far above gRPC's default arrive; beyond our limit: RESOURCE_EXHAUSTED."""
    async with _rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        reply = await _method(channel, "stream_unary", "collect")(iter([StringValue(value="x" * 3_000_000)]))
        assert len(reply.value) == 3_000_000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _method(channel, "unary_unary", "unary")(StringValue(value="x" * (33 * 1024 * 1024)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
