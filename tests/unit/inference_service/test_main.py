"""The program's own process: children of it begin whatever gRPC's threads do."""

import asyncio
import os
import subprocess
import sys
from typing import Any

import uvloop

_NUM_CHILDREN = 40


async def _statuses() -> list[int]:
    """Of children that are started while gRPC is busy."""
    import grpc.aio

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server()
    handlers = {"y": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/x/y")
        is_over = asyncio.Event()

        async def load() -> None:
            while not is_over.is_set():
                await call(b"x" * 1000)

        loads = [asyncio.create_task(load()) for _ in range(20)]
        statuses: list[int] = []
        for _ in range(_NUM_CHILDREN):
            child = await asyncio.create_subprocess_exec("/bin/true")
            statuses.append(await child.wait())
        is_over.set()
        await asyncio.gather(*loads)
    await server.stop(0)
    return statuses


def test_children_begin_beside_calls() -> None:
    """Some crashed before their program began, in gRPC's handlers of forks."""
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_ENABLE_FORK_SUPPORT"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == str([0] * _NUM_CHILDREN), done.stderr
    assert "fork" not in done.stderr


if __name__ == "__main__":
    import inference_service.__main__

    assert inference_service.__main__.main
    sys.stdout.write(str(uvloop.run(_statuses())))
