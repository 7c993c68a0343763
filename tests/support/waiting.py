"""Waiting for what happens soon, without fixed sleeps."""

import asyncio
import time
from collections.abc import Callable


async def eventually(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Return when `condition()` is true; fail the test when it does not become so in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s} s"
        await asyncio.sleep(0.01)
