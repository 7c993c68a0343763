"""Clients that ping every ten seconds keep their connection, while a request waits and while none runs.

By default gRPC's servers take such pings for abuse after two and close the connection with `too_many_pings`:
every request on it is lost. Sources: sgl-project/sglang#19986, llm-d/llm-d-kv-cache#359, grpc/grpc#9902.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet.inference.v1 import inference_service_pb2_grpc
from lorikeet_rpc.server import RpcServer

NODE = Path(__file__).resolve().parents[3] / "clients" / "node"
PING_S = 10
# The default server forgives two pings and gives up before a minute is over.
WAIT_S = 6.5 * PING_S
OPTIONS = [
    ("grpc.keepalive_time_ms", PING_S * 1000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class _Slow(inference_service_pb2_grpc.InferenceServiceServicer):
    """Streams one word, after a wait as long as a prefill or an adapter's load may take, if so asked."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        if request.prompt == "slow":
            await asyncio.sleep(WAIT_S)
        finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(), timings=pb.Timings())
        yield pb.GenerateResponse(text_delta="word", finish=finish)

    Complete = Abort = Tokenize = GetModel = None  # type: ignore[assignment]


@asynccontextmanager
async def _server() -> AsyncIterator[str]:
    server = RpcServer("127.0.0.1:0", tls=None, interceptors=[], service_names=[])
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(_Slow(), server.server)
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.server.stop(None)


async def _waiting_request(address: str) -> None:
    """A request whose first token takes long."""
    async with grpc.aio.insecure_channel(address, OPTIONS) as channel:
        stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        assert [piece.text_delta async for piece in stub.Generate(pb.GenerateRequest(prompt="slow"))] == [
            "word"
        ]


async def _idle_connection(address: str) -> None:
    """A connection without calls stays the same one: its state never leaves READY."""
    async with grpc.aio.insecure_channel(address, OPTIONS) as channel:
        stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        assert [piece.text_delta async for piece in stub.Generate(pb.GenerateRequest(prompt="x"))] == ["word"]
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), WAIT_S)
        assert [piece.text_delta async for piece in stub.Generate(pb.GenerateRequest(prompt="x"))] == ["word"]


async def _node_request(address: str) -> None:
    """The same wait in a Node client."""
    if shutil.which("node") is None or not (NODE / "node_modules" / "@grpc").exists():
        return  # test_node_client.py says why; the other two clients are judged all the same
    process = await asyncio.create_subprocess_exec(
        *("node", "client.mjs", "--prompt", "slow", "--keepalive-s", str(PING_S)),
        cwd=NODE,
        env={**os.environ, "LORIKEET_INFERENCE": address},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, out) == (0, b"word\n"), err


@pytest.mark.long
async def test_pings_every_ten_seconds_are_welcome() -> None:
    """Three clients side by side, each longer than the default server's patience."""
    async with _server() as address:
        await asyncio.gather(_waiting_request(address), _idle_connection(address), _node_request(address))
