"""How a service's process comes to its end, whatever its tasks do about it."""

import asyncio
import os
import threading
from collections.abc import Collection
from typing import Any

import structlog

_AGAIN_S = 0.25

log = structlog.get_logger()


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel these until each of them has ended; their outcomes are taken as seen.

    Once is not enough: Python 3.11's `asyncio.wait_for`, and so every library that uses it, drops a
    cancellation that comes together with the result it waited for.
    """
    waiting = set(tasks)
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


def force_exit_after(limit_s: float) -> None:
    """End the process with code 1 if it still runs then: what hangs on its way out must hold up no restart.

    Call in the event loop. The log says which tasks were left.
    """
    loop = asyncio.get_running_loop()

    def end() -> None:
        try:
            tasks = sorted(task.get_name() for task in asyncio.all_tasks(loop))
            log.error("server.exit_forced", limit_s=limit_s, tasks=tasks)
        finally:
            os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
