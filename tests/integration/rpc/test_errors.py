"""How a call fails: refused tokens, known and unknown errors, methods that nobody serves."""

import grpc
import grpc.aio
import pytest
import structlog
from google.protobuf.wrappers_pb2 import StringValue

from lorikeet_contract.status import StatusCode
from lorikeet_rpc.channel import open_channel
from lorikeet_rpc.errors import from_rpc_error
from tests.support.echo_server import echo_rig, method


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
