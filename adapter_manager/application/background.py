"""Blocking work on threads, never leaving one behind that still uses what the caller cleans up."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def on_thread(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run `work` on a thread. A cancelled caller still waits for the thread, then is cancelled."""
    future = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(future)
    finally:
        if not future.done():
            await asyncio.wait((future,))
