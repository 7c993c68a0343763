"""A value that an event loop makes and other threads read, without either waiting long for the other."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class LoopSnapshot(Generic[T]):
    """Build inside the running event loop; `get` from any other thread.

    Args:
        make: runs on the loop, once at a time.
        first: the value until `make` returned for the first time.
        patience_s: how long `get` waits for a fresh value.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], first: T, patience_s: float = 1.0) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._patience_s = patience_s
        self._value = (first, time.monotonic())
        self._lock = threading.Lock()
        self._pending: Future[None] | None = None

    def get(self) -> tuple[T, float]:
        """The value, fresh where the loop answers in time, else the last one; and its age in seconds."""
        with self._lock:
            if (self._pending is None or self._pending.done()) and not self._loop.is_closed():
                self._pending = asyncio.run_coroutine_threadsafe(self._refresh(), self._loop)
            pending = self._pending
        if pending is not None:
            with suppress(TimeoutError):
                pending.result(self._patience_s)
        value, made_s = self._value
        return value, max(0.0, time.monotonic() - made_s)

    async def _refresh(self) -> None:
        self._value = (await self._make(), time.monotonic())
