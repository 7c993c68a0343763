"""Work that ends early for a reason from outside."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_POLL_S = 0.2
Done = TypeVar("Done")


class CutShortError(Exception):
    """The work was ended before its end; the message says why."""


async def until_cut_short(work: Coroutine[Any, Any, Done], reason: Callable[[], str]) -> Done:
    """Do the work, but cancel it as soon as there is a reason to end it.

    Raises:
        CutShortError: there was one. The work has ended.
    """
    working = asyncio.create_task(work)
    try:
        while not working.done():
            if why := reason():
                raise CutShortError(why)
            await asyncio.wait({working}, timeout=_POLL_S)
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
