"""Asks a server that hung until it answers again, so that no call has to spend its time on finding out."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from lorikeet_rpc.ending import end_tasks

_PAUSE_S = 0.25


class HangProbe:
    """Off until `start`; off again once the server answered anything, an error of its own included.

    Args:
        ping: one question, with a time limit of its own.
        answered: called once for each `start`, when it is off again.
    """

    def __init__(self, ping: Callable[[], Awaitable[object]], answered: Callable[[], None]) -> None:
        self._ping = ping
        self._answered = answered
        self._asking: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the server is thought to hang."""
        return self._asking is not None

    def start(self) -> None:
        """Ask from now on; without effect where it is on already."""
        if self._asking is None:
            # In an empty context: the call that met the hang has no more to do with its end than any other.
            self._asking = asyncio.get_running_loop().create_task(
                self._ask(), name="redis-hang-probe", context=Context()
            )

    async def close(self) -> None:
        """Ask no more."""
        if self._asking:
            await end_tasks((self._asking,))

    async def _ask(self) -> None:
        while not await self._is_answered():  # noqa: ASYNC110 (another process says when)
            await asyncio.sleep(_PAUSE_S)
        self._asking = None
        self._answered()

    async def _is_answered(self) -> bool:
        try:
            await self._ping()
        except (RedisConnectionError, RedisTimeoutError, OSError):
            return False
        except RedisError:
            return True
        return True
