"""The health check's command: exit code 0 for SERVING and for nothing else."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from lorikeet_rpc.server import RpcServer

SERVICE = "test.Service"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[RpcServer, str]]:
    """A serving one, and its address."""
    running = RpcServer("127.0.0.1:0", tls=None, interceptors=[], service_names=[SERVICE])
    port = await running.start()
    yield running, f"127.0.0.1:{port}"
    await running.server.stop(None)


async def check(*arguments: str) -> tuple[int | None, str]:
    """Run it; exit code and what it says."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lorikeet_rpc.health_check", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_serving_and_not(server: tuple[RpcServer, str]) -> None:
    """0 and silent while it serves, the whole or one service; 1 with the status when it drains."""
    running, address = server
    assert await check(address) == (0, "")
    assert await check(address, "--service", SERVICE) == (0, "")
    code, said = await check(address, "--service", "test.Other")
    assert (code, "NOT_FOUND" in said) == (1, True)
    await running.set_serving(serving=False)
    assert await check(address) == (1, f"{address}: NOT_SERVING\n")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["127.0.0.1:1"], 1, "UNAVAILABLE"),
        (["127.0.0.1:1", "--tls-ca", "missing.pem"], 1, "missing.pem"),
        ([], 2, "address"),
        (["127.0.0.1:1", "--nonsense"], 2, "--nonsense"),
    ],
)
async def test_nobody_there_and_wrong_usage(arguments: list[str], code: int, words: str) -> None:
    """1 with the reason; 2 for a wrong command line."""
    found, said = await check(*arguments)
    assert found == code
    assert words in said


async def test_a_server_that_does_not_answer() -> None:
    """A port that accepts and is silent is given up after the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody reads
        port = silent.getsockname()[1]
        code, said = await check(f"127.0.0.1:{port}", "--timeout-s", "0.5")
        assert (code, "DEADLINE_EXCEEDED" in said or "UNAVAILABLE" in said) == (1, True)
