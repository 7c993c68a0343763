"""A Redis server that is not ours: the distribution's redis-server, durable, on a loopback port."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import redis

from tests.support.stack import free_port
from tests.support.waiting import eventually

BINARY = shutil.which("redis-server")


class RedisServer:
    """Start, kill, start again: the data directory stays."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._popen: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it and wait until it answers."""
        assert BINARY is not None
        options = {
            "--bind": "127.0.0.1", "--port": str(self._port), "--dir": str(self._directory),
            "--appendonly": "yes", "--appendfsync": "always", "--save": "",
        }  # fmt: skip
        self._popen = subprocess.Popen(  # noqa: ASYNC220 (it returns at once)
            [BINARY, *(part for pair in options.items() for part in pair)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await eventually(self._answers, 10)

    async def kill(self) -> None:
        """SIGKILL."""
        assert self._popen is not None
        self._popen.kill()
        await asyncio.to_thread(self._popen.wait, 10)

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=1) as client:
                return bool(client.ping())
        except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError):
            return False
