"""What a node tells its manager: changes of residency, demand, usage. Watchers have bounded mailboxes."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from inference_service.domain.adapter import AdapterDemand, ResidentAdapter
from inference_service.domain.errors import EngineDeadError
from inference_service.ports import Engine

# Usage alone waits this long, so that a busy node sends a message a second and not one a request.
_USAGE_INTERVAL_S = 1.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AdapterUsage:
    """What requests used of a revision since the last such event."""

    digest: str
    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """A watcher's view begins, or begins anew because the engine did: time for a snapshot."""


NodeEvent = EngineStarted | ResidentAdapter | AdapterDemand | AdapterUsage


class NodeEvents:
    """Fans events out. A slow watcher sees the latest state of each revision, not each step to it."""

    def __init__(self) -> None:
        self._mailboxes: set[_Mailbox] = set()

    def used(self, digest: str, prompt_tokens: int, output_tokens: int) -> None:
        """A request ended. Never blocks."""
        for mailbox in self._mailboxes:
            mailbox.add_usage(AdapterUsage(digest, 1, prompt_tokens, output_tokens))

    async def follow(self, engine: Engine) -> None:
        """Pass the engine's own events on, for ever; outlives the engine's restarts."""
        while True:
            # Listens from this call on, also while the engine is being restarted.
            news = engine.watch_residency()
            for mailbox in self._mailboxes:
                mailbox.start_anew()
            try:
                async for event in news:
                    for mailbox in self._mailboxes:
                        mailbox.add(event)
            except EngineDeadError:
                log.warning("residency.watch_restarted")

    async def watch(self) -> AsyncGenerator[NodeEvent]:
        """EngineStarted, then events as they come. Closing the iterator ends the watch."""
        mailbox = _Mailbox()
        self._mailboxes.add(mailbox)
        try:
            while True:
                for event in await mailbox.take():
                    yield event
        finally:
            self._mailboxes.discard(mailbox)


class _Mailbox:
    """Latest state by digest, so its size is bounded by the number of revisions."""

    def __init__(self) -> None:
        self._changed: dict[str, ResidentAdapter] = {}
        self._demanded: dict[str, AdapterDemand] = {}
        self._used: dict[str, AdapterUsage] = {}
        self._is_new = True
        self._any = asyncio.Event()
        self._urgent = asyncio.Event()
        self.start_anew()

    def start_anew(self) -> None:
        self._is_new = True
        self._changed.clear()
        self._demanded.clear()
        self._wake(is_urgent=True)

    def add(self, event: ResidentAdapter | AdapterDemand) -> None:
        if isinstance(event, ResidentAdapter):
            self._changed[event.digest] = event
        else:
            self._demanded[event.digest] = event
        self._wake(is_urgent=True)

    def add_usage(self, usage: AdapterUsage) -> None:
        before = self._used.get(usage.digest, AdapterUsage(usage.digest, 0, 0, 0))
        self._used[usage.digest] = AdapterUsage(
            usage.digest,
            before.requests + usage.requests,
            before.prompt_tokens + usage.prompt_tokens,
            before.output_tokens + usage.output_tokens,
        )
        self._wake(is_urgent=False)

    async def take(self) -> Sequence[NodeEvent]:
        """All that is there, as soon as something is."""
        await self._any.wait()
        if not self._urgent.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_USAGE_INTERVAL_S):
                    await self._urgent.wait()
        started = [EngineStarted()] if self._is_new else []
        events = [*started, *self._changed.values(), *self._demanded.values(), *self._used.values()]
        self._is_new = False
        for held in (self._changed, self._demanded, self._used):
            held.clear()
        self._any.clear()
        self._urgent.clear()
        return events

    def _wake(self, *, is_urgent: bool) -> None:
        self._any.set()
        if is_urgent:
            self._urgent.set()
