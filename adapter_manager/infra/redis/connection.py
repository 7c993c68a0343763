"""One Redis or Valkey server: timeouts, scripts, durability and errors, so that nobody else has."""

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeVar

import redis.asyncio as redis_asyncio
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, stop_after_delay
from tenacity.wait import wait_random_exponential

from adapter_manager.domain.errors import RegistryUnavailableError
from adapter_manager.infra.redis.hang_probe import HangProbe
from adapter_manager.ports import StoreObserver

log = structlog.get_logger(__name__)

_MIN_MAJOR = 7
_RETRY_AFTER_S = 1.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """How to reach the server and how long to wait for it.

    A command that gets no answer within `timeout_s` fails: a half-open connection looks like this.
    `fsync_wait_s` is how long a write may wait for the server's disk, and so must be below `timeout_s`.
    """

    url: str
    connect_timeout_s: float = 1.0
    timeout_s: float = 3.0
    fsync_wait_s: float = 2.0
    max_connections: int = 32


class RedisConnection:
    """A pool of connections to one primary. Owned by the registry; closed by `close`."""

    def __init__(self, options: RedisOptions, observer: StoreObserver | None = None) -> None:
        self._options = options
        self._observer = observer
        self._client = redis_asyncio.Redis.from_pool(
            redis_asyncio.BlockingConnectionPool.from_url(
                options.url,
                max_connections=options.max_connections,
                timeout=options.connect_timeout_s + options.timeout_s,
                socket_connect_timeout=options.connect_timeout_s,
                socket_timeout=options.timeout_s,
                # An idle connection may be dead without knowing it; ask before using it again.
                health_check_interval=15,
                # redis-py would repeat writes whose reply was lost; only `read` repeats anything here.
                retry=Retry(NoBackoff(), 0),
            )
        )
        self._is_away = False
        # A call that got no answer in its time is the last one to wait for it.
        self._hang = HangProbe(self._client.ping, self._mark_recovered)
        # While the server is away one call at a time tries it; the others fail at once instead of hanging.
        self._is_probing = False
        self._is_checked = False
        self._waits_for_disk = False
        self._checking = asyncio.Lock()

    @property
    def client(self) -> redis_asyncio.Redis:
        """The raw client, for tests and for commands inside `read`."""
        return self._client

    async def read(self, operation: Callable[[], Awaitable[_T]]) -> _T:
        """Run an idempotent read, again after a short wait where the server does not answer."""
        retrying = AsyncRetrying(
            stop=stop_after_attempt(3) | stop_after_delay(self._options.timeout_s / 2),
            wait=wait_random_exponential(multiplier=0.05, max=0.5),
            retry=retry_if_exception_type(RegistryUnavailableError),
            reraise=True,
        )
        return await retrying(self._mapped, "read", operation)

    async def write(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run a script once; returns when what it did is on the server's disk, as far as that can be known.

        Raises:
            RegistryUnavailableError: no answer, or no confirmation from the disk: the outcome is unknown.
        """
        return await self._mapped("write", lambda: self._write(script, keys, args))

    async def close(self) -> None:
        """Close all connections."""
        await self._hang.close()
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def _write(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        for _ in range(2):
            # WAITAOF speaks of the writes of its own connection, which a pipeline keeps.
            pipeline = self._client.pipeline(transaction=False)
            pipeline.evalsha(sha, len(keys), *keys, *args)
            if self._waits_for_disk:
                pipeline.execute_command("WAITAOF", 1, 0, int(self._options.fsync_wait_s * 1000))
            replies = await pipeline.execute(raise_on_error=False)
            if isinstance(replies[0], NoScriptError):
                await self._client.script_load(script)
                continue
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            if self._waits_for_disk and replies[1][0] < 1:
                raise RegistryUnavailableError(
                    "the registry did not confirm in time that the write is on disk; it may have been done, "
                    "so read before you repeat it",
                    retry_after_s=_RETRY_AFTER_S,
                )
            return replies[0]
        raise RegistryUnavailableError("the registry forgets scripts at once", retry_after_s=_RETRY_AFTER_S)

    async def _mapped(self, command: str, operation: Callable[[], Awaitable[_T]]) -> _T:
        if not self._is_away:
            return await self._tried(command, operation)
        if self._is_probing or self._hang.is_on:
            raise _not_tried()
        self._is_probing = True
        try:
            return await self._tried(command, operation)
        finally:
            self._is_probing = False

    async def _tried(self, command: str, operation: Callable[[], Awaitable[_T]]) -> _T:
        begun_s = time.perf_counter()
        async with self._errors_mapped():
            if not self._is_checked:
                async with self._checking:
                    if self._hang.is_on:  # found out while this one queued
                        raise _not_tried()
                    if not self._is_checked:
                        await self._check_server()
                        self._is_checked = True
            result = await operation()
        if not self._hang.is_on:  # else this was a late answer, and the next may not come
            self._mark_recovered()
        if self._observer:
            self._observer.answered(command, time.perf_counter() - begun_s)
        return result

    def _mark_recovered(self) -> None:
        if self._is_away:
            self._is_away = False
            Context().run(_log_recovered)

    @asynccontextmanager
    async def _errors_mapped(self) -> AsyncGenerator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            # Another server may answer next time (failover, restart): look at it again.
            self._is_checked = False
            if isinstance(error, (RedisTimeoutError, TimeoutError)):
                self._hang.start()
            if self._observer:
                self._observer.failed(type(error).__name__)
            if not self._is_away:
                self._is_away = True
                log.warning("redis.unavailable", error=f"{type(error).__name__}: {error}")
            raise RegistryUnavailableError(
                f"the registry's store does not answer ({type(error).__name__}); reads may be served from "
                "memory, writes must wait: try again",
                retry_after_s=_RETRY_AFTER_S,
            ) from error
        except RegistryUnavailableError:
            if self._observer and not self._hang.is_on:
                self._observer.failed("NotConfirmed")
            raise

    async def _check_server(self) -> None:
        info: dict[str, Any] = await self._client.info("server")
        # Valkey reports the Redis version that it is compatible with (7.2.4), and its own beside it.
        version = str(info.get("redis_version", "0"))
        major = int(re.match(r"\d*", version)[0] or 0)  # pyright: ignore[reportOptionalSubscript]
        if major < _MIN_MAJOR:
            raise RegistryUnavailableError(
                f"the registry's server is Redis {version}; version {_MIN_MAJOR} or newer is needed",
                retry_after_s=60,
            )
        config = await self._config()
        append_only, fsync = config.get("appendonly"), config.get("appendfsync")
        is_durable = append_only == "yes" and fsync == "always"
        self._waits_for_disk = not is_durable and await self._can_wait_for_disk()
        if not is_durable and not self._waits_for_disk:
            log.warning("redis.not_durable", appendonly=append_only or "?", appendfsync=fsync or "?")
        if config.get("maxmemory-policy", "noeviction") != "noeviction":
            log.warning("redis.may_evict", policy=config["maxmemory-policy"])

    async def _config(self) -> dict[str, str]:
        try:
            found: dict[Any, Any] = await self._client.config_get("append*", "maxmemory-policy")
        except (NoPermissionError, ResponseError):  # managed services forbid CONFIG
            return {}
        return {_text(key): _text(value) for key, value in found.items()}

    async def _can_wait_for_disk(self) -> bool:
        try:
            await self._client.execute_command("WAITAOF", 1, 0, 1)
        except ResponseError:  # before 7.2, or without an append-only file, or on a replica
            return False
        return True


def _not_tried() -> RegistryUnavailableError:
    return RegistryUnavailableError(
        "the registry's store does not answer; reads may be served from memory, writes must wait: try again",
        retry_after_s=_RETRY_AFTER_S,
    )


def _log_recovered() -> None:
    """To be run in an empty context: the call that noticed it has no more to do with it than any other."""
    log.info("redis.recovered")


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
