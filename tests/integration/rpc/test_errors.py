"""How a call fails: refused tokens, known and unknown errors, methods that nobody serves."""

from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from google.protobuf.wrappers_pb2 import StringValue

from lorikeet_contract.status import StatusCode
from lorikeet_rpc.channel import open_channel
from lorikeet_rpc.errors import from_rpc_error
from lorikeet_rpc.wire_count import WireBounds
from tests.support.echo_server import SERVICE, echo_rig, method


def raw_method(channel: Any, kind: str, name: str) -> Any:
    """A caller of one method that sends and gets bytes as they are."""
    return getattr(channel, kind)(f"/{SERVICE}/{name}")


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
@pytest.mark.parametrize("token", [None, "bad"])
async def test_refused_tokens(kind: str, token: str | None) -> None:
    """No token and a wrong one are UNAUTHENTICATED, for streams too."""
    async with echo_rig() as rig, open_channel(rig.target, token=token, aio=True) as channel:
        call = method(channel, kind, "unary" if kind == "unary_unary" else "generator")(
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
    async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        call = method(channel, kind, name)(StringValue(value="known"))
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
    async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        call = method(channel, "unary_stream", "half")(StringValue(value="known"))
        assert (await call.read()).value == "first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert from_rpc_error(caught.value).reason == "QUEUE_FULL"


async def test_unknown_error_is_logged_once_and_hidden() -> None:
    """INTERNAL with an id that the log has, with the traceback there and the text not on the wire."""
    with structlog.testing.capture_logs() as events:
        async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(channel, "unary_unary", "unary")(StringValue(value="unknown"))
    failure = from_rpc_error(caught.value)
    assert failure.code is StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    failed = [e for e in events if e["event"] == "request.failed"]
    assert [e["error_id"] for e in failed] == [failure.metadata["error_id"]]
    assert isinstance(failed[0]["exc_info"], RuntimeError)


async def test_unknown_method_is_unimplemented() -> None:
    """The interceptor leaves what nobody serves to gRPC."""
    async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(channel, "unary_unary", "nothing")(StringValue())
    assert from_rpc_error(caught.value).code is StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("unary_unary", "unary"),
        ("unary_stream", "generator"),
        ("stream_unary", "collect"),
        ("stream_stream", "chat"),
    ],
)
async def test_undecodable_requests(kind: str, name: str) -> None:
    """INVALID_ARGUMENT with reason and request id, one log line, and no class of ours in the words."""
    with structlog.testing.capture_logs() as events:
        async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
            bad: Any = b"\x0a\x02\xff\xfe"  # a string that is no UTF-8
            call = raw_method(channel, kind, name)(iter([bad]) if kind.startswith("stream") else bad)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if kind.endswith("unary") else call.read())
    failure = from_rpc_error(caught.value)
    assert (failure.code, failure.reason) == (StatusCode.INVALID_ARGUMENT, "UNDECODABLE_REQUEST")
    assert "class" not in failure.message
    assert "google.protobuf.StringValue" in failure.message
    request_id = dict(caught.value.trailing_metadata())["x-request-id"]
    lines = [e for e in events if e["event"].startswith("request.")]
    assert [(e["event"], e["request_id"], e["reason"]) for e in lines] == [
        ("request.finished", request_id, "UNDECODABLE_REQUEST")
    ]


async def test_undecodable_requests_of_nobody_are_unauthenticated() -> None:
    """Who has no token learns nothing about the message."""
    async with echo_rig() as rig, open_channel(rig.target, aio=True) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_method(channel, "unary_unary", "unary")(b"\xff")
    assert from_rpc_error(caught.value).reason == "UNAUTHENTICATED"


async def test_a_bad_message_in_mid_stream() -> None:
    """What came before was served; the stream ends with the error."""
    async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        messages = [StringValue(value="ok").SerializeToString(), b"\xff"]
        call = raw_method(channel, "stream_stream", "chat")(iter(messages))
        assert StringValue.FromString(await call.read()).value == "ok"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert from_rpc_error(caught.value).reason == "UNDECODABLE_REQUEST"


async def test_messages_of_too_many_parts_are_refused_unparsed() -> None:
    """The bounds hold for the service they name; the error says limit, value and maximum."""
    raw = b"\x0a\x00" * 30_000
    bounds = {f"/{SERVICE}/": WireBounds(max_fields=100)}
    async with echo_rig(bounds=bounds) as rig, open_channel(rig.target, token="good", aio=True) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_method(channel, "unary_unary", "unary")(raw)
    failure = from_rpc_error(caught.value)
    assert (failure.code, failure.reason) == (StatusCode.INVALID_ARGUMENT, "LIMIT_EXCEEDED")
    assert failure.metadata == {
        "field": "request", "limit": "max_message_fields", "value": "101", "maximum": "100"
    }  # fmt: skip
    async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
        await raw_method(channel, "unary_unary", "unary")(raw)
