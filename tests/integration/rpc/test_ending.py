"""What is left of a call when it ends: the handler's `finally`, one log line, one sample."""

import asyncio

import grpc
import grpc.aio
import pytest
import structlog
from google.protobuf.wrappers_pb2 import StringValue
from prometheus_client import CollectorRegistry, generate_latest

from lorikeet_rpc.channel import open_channel
from lorikeet_rpc.metrics import RpcMetrics
from tests.support.echo_server import SERVICE, echo_rig, method


async def test_canonical_line() -> None:
    """One request.finished a call, with code, time, caller and the handler's own facts."""
    with structlog.testing.capture_logs() as events:
        async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
            await method(channel, "unary_unary", "unary")(StringValue(value="a prompt"))
            with pytest.raises(grpc.aio.AioRpcError):
                await method(channel, "unary_unary", "aborts")(StringValue())
            # The caller has its status before the handler has ended.
            await asyncio.wait_for(rig.interceptor.idle(), 10)
    ok, aborted = [e for e in events if e["event"] == "request.finished"]
    assert (ok["code"], ok["tenant"], ok["token_id"], ok["output_tokens"]) == ("OK", "acme", "t1", 5)
    assert ok["ms"] > 0
    assert aborted["code"] == "OUT_OF_RANGE"
    assert "a prompt" not in str(events)


@pytest.mark.parametrize("name", ["endless", "silent"])
async def test_cancel_reaches_the_handler_at_once(name: str) -> None:
    """A cancelled stream runs the servicer's finally, whether it was sending or waiting."""
    with structlog.testing.capture_logs() as events:
        async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
            call = method(channel, "unary_stream", name)(StringValue())
            if name == "endless":
                await call.read()
            else:
                await asyncio.sleep(0.2)
            call.cancel()
            assert await asyncio.wait_for(rig.echo.ended.get(), 10) == "closed"
            await asyncio.wait_for(rig.interceptor.idle(), 10)
    assert [e["code"] for e in events if e["event"] == "request.finished"] == ["CANCELLED"]


async def test_deadline_reaches_the_handler() -> None:
    """An expired deadline ends the handler and is called by its name in the log."""
    with structlog.testing.capture_logs() as events:
        async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
            call = method(channel, "unary_stream", "silent")(StringValue(), timeout=0.2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert await asyncio.wait_for(rig.echo.ended.get(), 10) == "closed"
            await asyncio.wait_for(rig.interceptor.idle(), 10)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert [e["code"] for e in events if e["event"] == "request.finished"] == ["DEADLINE_EXCEEDED"]


@pytest.mark.parametrize(("timeout_s", "code"), [(0.25, "DEADLINE_EXCEEDED"), (60.0, "CANCELLED")])
async def test_a_client_whose_clock_is_ahead(timeout_s: float, code: str) -> None:
    """It cancels by its own clock, and one in transit is behind: near the deadline that is the reason."""
    with structlog.testing.capture_logs() as events:
        async with echo_rig() as rig, open_channel(rig.target, token="good", aio=True) as channel:
            call = method(channel, "unary_stream", "silent")(StringValue(), timeout=timeout_s)
            await asyncio.sleep(0.2)
            call.cancel()
            assert await asyncio.wait_for(rig.echo.ended.get(), 10) == "closed"
            await asyncio.wait_for(rig.interceptor.idle(), 10)
    assert [e["code"] for e in events if e["event"] == "request.finished"] == [code]


async def test_metrics_count_by_method_and_code() -> None:
    """Each finished call is one sample."""
    registry = CollectorRegistry()
    async with (
        echo_rig(metrics=RpcMetrics(registry)) as rig,
        open_channel(rig.target, token="good", aio=True) as channel,
    ):
        await method(channel, "unary_unary", "unary")(StringValue(value="x"))
    text = generate_latest(registry).decode()
    assert f'lorikeet_rpc_server_calls_total{{code="OK",method="/{SERVICE}/unary"}} 1.0' in text
