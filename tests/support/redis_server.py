"""A Redis server that is not ours: the distribution's redis-server, durable, on a loopback port."""

import asyncio
import shutil
import signal
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
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._popen: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it and wait until it answers."""
        assert BINARY is not None
        options = {
            "--bind": "127.0.0.1", "--port": str(self.port), "--dir": str(self._directory),
            "--appendonly": "yes", "--appendfsync": "always", "--save": "",
        }  # fmt: skip
        self._popen = subprocess.Popen(  # noqa: ASYNC220 (it returns at once)
            [BINARY, *(part for pair in options.items() for part in pair)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await eventually(self._answers, 30)

    async def kill(self) -> None:
        """SIGKILL."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM."""
        await self._end(signal.SIGTERM)

    def suspend(self) -> None:
        """SIGSTOP: connections stay and nothing answers."""
        assert self._popen is not None
        self._popen.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._popen is not None
        self._popen.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Remove its data, while it is not running."""
        shutil.rmtree(self._directory)
        self._directory.mkdir()

    def client(self) -> redis.Redis:
        """A connection past any proxy, for what an operator would do."""
        return redis.Redis.from_url(self.url, socket_timeout=10)

    async def _end(self, number: int) -> None:
        assert self._popen is not None
        if self._popen.poll() is None:
            self._popen.send_signal(number)
        await asyncio.to_thread(self._popen.wait, 20)

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=1) as client:
                return bool(client.ping())
        except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError):
            return False
