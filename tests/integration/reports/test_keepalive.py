"""Clients that ping every ten seconds keep their one connection, while a request waits and while none runs.

By default gRPC's servers take such pings for abuse and close the connection with `too_many_pings`: every
request on it is lost. Sources: sgl-project/sglang#19986, llm-d/llm-d-kv-cache#359, grpc/grpc#9902.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from lorikeet.inference.v1 import generation_pb2, inference_service_pb2_grpc
from lorikeet_bench import rigs
from tests.support.stack import Stack, free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[3]
CLIENTS = {
    "python": [sys.executable, "tests/support/pinging_client.py"],
    "node": ["node", "tests/support/pinging_client.mjs"],
}
# Past the patience of a default server, which the control shows.
WAIT_S = 66.0
REFUSED_PINGS = re.compile(r"too_many_pings|goaway received|got goaway|by GOAWAY", re.IGNORECASE)


class PingingClient:
    """One client process and every connection it has had to the server."""

    def __init__(
        self, kind: str, address: str, token: str, method: str, wait_s: float = 0, *more: str
    ) -> None:
        self.name = f"{kind} {method}"
        self.connections: set[int] = set()
        self.has_answer = asyncio.Event()
        self._command = [*CLIENTS[kind], address, token, method, str(wait_s), *more]
        self._port = int(address.rpartition(":")[2])

    async def run(self) -> tuple[list[Any], str]:
        """Results of its calls, and its log."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")]),
                "GRPC_VERBOSITY": "DEBUG",
                "GRPC_TRACE": "http" if "python" in self.name else "transport,keepalive,subchannel",
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout
        assert process.stderr
        watching = asyncio.create_task(self._watch(process.pid))
        logging = asyncio.create_task(process.stderr.read())
        results: list[Any] = []
        try:
            async for line in process.stdout:
                results.append(json.loads(line))
                self.has_answer.set()
            await process.wait()
        finally:
            self.has_answer.set()  # or never will have
            watching.cancel()
        return results, (await logging).decode(errors="replace")

    async def _watch(self, pid: int) -> None:
        client = psutil.Process(pid)
        while True:
            try:
                found = await asyncio.to_thread(client.net_connections, "tcp")
            except psutil.Error:
                return
            self.connections |= {
                c.laddr.port
                for c in found
                if c.raddr and c.raddr.port == self._port and c.status == "ESTABLISHED"
            }
            await asyncio.sleep(0.25)


@asynccontextmanager
async def default_server() -> AsyncIterator[str]:
    """A gRPC server with its own ideas of pings, whose only request waits long."""

    class Slow(inference_service_pb2_grpc.InferenceServiceServicer):
        async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            await asyncio.sleep(WAIT_S)
            yield generation_pb2.GenerateResponse(tokens=[generation_pb2.TokenInfo(id=5)] * 2)

        Complete = Abort = Tokenize = GetModel = None  # type: ignore[assignment]

    server = grpc.aio.server()
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(Slow(), server)
    address = f"127.0.0.1:{free_port()}"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def engine_of(stack: Stack) -> psutil.Process:
    """The node's engine process."""
    assert stack.node.popen
    children = psutil.Process(stack.node.popen.pid).children(recursive=True)
    (engine,) = [c for c in children if "inference_service.engine.engine_process" in c.cmdline()]
    return engine


async def held_back(stack: Stack, clients: list[PingingClient]) -> list[tuple[list[Any], str]]:
    """Run the clients while the engine does nothing for a long time, as in a long prefill."""
    engine = engine_of(stack)
    engine.send_signal(signal.SIGSTOP)
    try:
        running = [asyncio.create_task(client.run()) for client in clients]
        await asyncio.sleep(WAIT_S)
        assert not [task.result() for task in running if task.done()], "somebody did not wait"
    finally:
        engine.send_signal(signal.SIGCONT)
    return await asyncio.gather(*running)


async def test_pings_are_welcome_on_both_services(tmp_path: Path) -> None:
    """A first token after a minute, an upload as slow, calls after a minute's silence: no GOAWAY."""
    has_node = shutil.which("node") is not None and (ROOT / "clients/node/node_modules/@grpc").exists()
    kinds = ["python", *(["node"] if has_node else [])]
    base = rigs.write_copy_base(tmp_path / "base")
    async with Stack(base, tmp_path / "stack") as stack, default_server() as other:
        await stack.upload(rigs.write_moe_watermark(tmp_path / "w20", 20), "demo/w20")
        await stack.wait_known("demo/w20")
        node, manager, token = stack.node_address, stack.manager_address, stack.token
        directory = str(rigs.write_moe_watermark(tmp_path / "slow", 30))
        idle = [PingingClient(k, node, token, "generate", WAIT_S + 10) for k in kinds]
        idle += [PingingClient(k, manager, token, "list", WAIT_S + 10) for k in kinds]
        waiting = [PingingClient(k, node, token, "generate") for k in kinds]
        waiting += [PingingClient(k, manager, token, "upload", WAIT_S + 5, directory) for k in kinds]
        controls = [PingingClient(k, other, token, "generate") for k in kinds]
        begun = [asyncio.create_task(client.run()) for client in (*controls, *idle)]
        for client in idle:
            await client.has_answer.wait()
        answers = await held_back(stack, waiting)
        done = await asyncio.gather(*begun)
        refused, answered = done[: len(controls)], done[len(controls) :]
    expected = {"generate": [5, 5], "list": ["tenants/demo/adapters/w20"], "upload": 8}
    for client, (results, log) in zip((*waiting, *idle), (*answers, *answered), strict=True):
        _, method = client.name.split()
        times = 2 if client in idle else 1
        assert results == [expected[method]] * times, f"{client.name}: {log[-2000:]}"
        assert not REFUSED_PINGS.findall(log), client.name
        assert len(client.connections) == 1, f"{client.name}: {client.connections}"
    # Where pings are not welcome the same clients say so, or the above would prove nothing.
    for client, (_, log) in zip(controls, refused, strict=True):
        assert REFUSED_PINGS.findall(log), f"{client.name}: {log[-2000:]}"
    if not has_node:
        pytest.skip("python clients only: node or its packages are not installed (make test installs them)")
