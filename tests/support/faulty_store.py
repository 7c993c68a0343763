"""A real Redis behind a proxy, and every way in which it may fail its manager."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.support.redis_server import RedisServer
from tests.support.tcp_proxy import TcpProxy

_REPLICA_OF_NOBODY = ("127.0.0.1", "1")


class FaultyStore(AbstractAsyncContextManager["FaultyStore"]):
    """Use as a context manager; `url` is the manager's."""

    def __init__(self, directory: Path) -> None:
        self.server = RedisServer(directory)
        self.proxy = TcpProxy(self.server.port)

    @property
    def url(self) -> str:
        """Through the proxy."""
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    async def __aenter__(self) -> Self:
        await self.server.start()
        await self.proxy.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.proxy.close()
        self.server.resume()
        await self.server.kill()

    async def command(self, *words: str) -> Any:
        """What an operator types."""

        def run() -> Any:
            with self.server.client() as client:
                return client.execute_command(*words)

        return await asyncio.to_thread(run)


@dataclass(frozen=True, slots=True)
class StoreFault:
    """How a fault begins and ends. `is_passing`: it is over by itself, so that writes may succeed in it."""

    name: str
    begin: Callable[[FaultyStore], Awaitable[object]]
    end: Callable[[FaultyStore], Awaitable[object]]
    is_passing: bool = False

    def __str__(self) -> str:
        return self.name


async def _nothing(store: FaultyStore) -> None:
    """A fault that is over as soon as it began."""


async def _suspend(store: FaultyStore) -> None:
    store.server.suspend()


async def _resume(store: FaultyStore) -> None:
    store.server.resume()


async def _blackhole(store: FaultyStore) -> None:
    store.proxy.blackhole()


async def _refuse(store: FaultyStore) -> None:
    await store.proxy.refuse()


async def _accept(store: FaultyStore) -> None:
    await store.proxy.accept()


def _slow(delay_s: float) -> Callable[[FaultyStore], Awaitable[None]]:
    async def begin(store: FaultyStore) -> None:
        store.proxy.delay_s = delay_s

    return begin


async def _clear(store: FaultyStore) -> None:
    store.proxy.clear()


async def _cut(store: FaultyStore) -> None:
    store.proxy.cut_after_bytes = 3


async def _restart(store: FaultyStore) -> None:
    await store.server.kill()
    await store.server.start()


async def _restart_empty(store: FaultyStore) -> None:
    await store.server.kill()
    store.server.wipe()
    await store.server.start()


STORE_FAULTS = (
    StoreFault("store stopped", lambda s: s.server.stop(), lambda s: s.server.start()),
    StoreFault("store killed", lambda s: s.server.kill(), lambda s: s.server.start()),
    StoreFault("store refuses", _refuse, _accept),
    StoreFault("store hangs", _suspend, _resume),
    StoreFault("store in a blackhole", _blackhole, _clear),
    StoreFault("store slow, 0.5 s a reply", _slow(0.5), _clear, is_passing=True),
    StoreFault("store slow, 5 s a reply", _slow(5.0), _clear),
    StoreFault(
        "store read-only",
        lambda s: s.command("REPLICAOF", *_REPLICA_OF_NOBODY),
        lambda s: s.command("REPLICAOF", "NO", "ONE"),
    ),
    StoreFault(
        "store out of memory",
        lambda s: s.command("CONFIG", "SET", "maxmemory", "1"),
        lambda s: s.command("CONFIG", "SET", "maxmemory", "0"),
    ),
    StoreFault("store cuts replies", _cut, _clear),
    StoreFault("store restarted with its data", _restart, _nothing, is_passing=True),
    StoreFault("store restarted empty", _restart_empty, _nothing, is_passing=True),
)
