"""Loads and unloads on one node: each revision for itself, a few at a time, failures remembered."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import structlog

from adapter_manager.application.payloads import PayloadPusher
from adapter_manager.domain.errors import ArtifactMissingError, ArtifactStoreError, NodeCallError
from adapter_manager.domain.node import ResidencyTier, ResidentAdapter
from adapter_manager.domain.placement import LoadStep, UnloadStep, satisfies
from adapter_manager.domain.retries import Failure, failed_again
from adapter_manager.ports import Clock, NodeClient
from lorikeet_contract.status import StatusCode

log = structlog.get_logger(__name__)

# Codes that mean: the same call will be refused again.
_FINAL = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.DATA_LOSS,
    StatusCode.NOT_FOUND,
}
_UNLOAD_TIMEOUT_S = 60.0


class NodeWork:
    """Owns what is known to be on the node and what is being moved; calls `on_change` after each move."""

    def __init__(
        self,
        client: NodeClient,
        pusher: PayloadPusher,
        clock: Clock,
        on_change: Callable[[], None],
        *,
        load_timeout_s: float,
        concurrent_loads: int,
    ) -> None:
        self.held: dict[str, ResidentAdapter] = {}
        self.failures: dict[str, Failure] = {}
        self._client = client
        self._pusher = pusher
        self._clock = clock
        self._on_change = on_change
        self._load_timeout_s = load_timeout_s
        self._loading = asyncio.Semaphore(concurrent_loads)
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being moved."""
        return not self._running

    def begin(self, steps: Iterable[LoadStep | UnloadStep]) -> None:
        """Start what is neither running nor waiting for its next attempt.

        Loads are given up after some attempts; what is deleted must go, so unloads never are.
        """
        now_s = self._clock()
        for step in steps:
            failure = self.failures.get(step.digest)
            if step.digest in self._running:
                continue
            if isinstance(step, LoadStep):
                if failure is None or failure.may_retry(now_s):
                    self._start(step.digest, self._load(step, self._load_timeout_s))
            elif failure is None or failure.is_due(now_s):
                self._start(step.digest, self._drop(step))

    def forget_failures(self, relevant: Iterable[str]) -> None:
        """Drop the failures of all other revisions that are not on the node either."""
        for digest in self.failures.keys() - set(relevant) - self.held.keys():
            del self.failures[digest]

    async def load(self, step: LoadStep, timeout_s: float) -> None:
        """Load, unless it is there or a failure of it is remembered; waits for a load that runs already."""
        running = self._running.get(step.digest)
        if running:
            await asyncio.wait((running,), timeout=timeout_s)
        now = self.held.get(step.digest)
        if step.digest in self.failures or (now and now.tier.rank >= step.tier.rank):
            return
        await asyncio.wait((self._start(step.digest, self._load(step, timeout_s)),), timeout=timeout_s)

    async def retry(self, step: LoadStep, timeout_s: float) -> None:
        """Load, whatever failed before; a load that runs already may have read what was damaged."""
        if running := self._running.get(step.digest):
            await asyncio.wait((running,), timeout=timeout_s)
        self.failures.pop(step.digest, None)
        await self.load(step, timeout_s)

    def stream(self, digest: str) -> None:
        """Send a revision that requests on the node wait for and that the node cannot read by itself."""
        if digest not in self._running:
            step = LoadStep(digest, ResidencyTier.HOST, is_pinned=False)
            self._start(digest, self._load(step, self._load_timeout_s, is_streamed=True))

    async def unload(self, digest: str, *, keep_on_disk: bool, timeout_s: float) -> None:
        """Take a revision off once no request holds it; stops a load of it. Raises NodeCallError."""
        self.failures.pop(digest, None)
        running = self._running.get(digest)
        if running:
            running.cancel()
            await asyncio.wait((running,))
        await self._client.unload(digest, keep_on_disk=keep_on_disk, timeout_s=timeout_s)
        self._set_absent(digest, keep_on_disk=keep_on_disk)

    def failed(self, digest: str, message: str, *, is_final: bool) -> None:
        """Remember one more failure."""
        failure = failed_again(self.failures.get(digest), message, self._clock(), is_final=is_final)
        self.failures[digest] = failure
        log.warning(
            "residency.push_failed",
            node=self._client.address,
            digest=digest,
            error=message,
            attempts=failure.attempts,
            final=is_final,
        )

    async def disconnect(self) -> None:
        """The node is away: stop everything, and know nothing of what it holds."""
        self.held.clear()
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _start(self, digest: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{self._client.address} {digest[:12]}")
        self._running[digest] = task

        def done(_: asyncio.Task[None]) -> None:
            if self._running.get(digest) is task:
                del self._running[digest]
            self._on_change()

        task.add_done_callback(done)
        return task

    async def _load(self, step: LoadStep, timeout_s: float, *, is_streamed: bool = False) -> None:
        digest = step.digest
        push = self._pusher.stream if is_streamed else self._pusher.load
        try:
            async with self._loading:
                adapter = await push(digest, step.tier, is_pinned=step.is_pinned, timeout_s=timeout_s)
        except ArtifactStoreError as error:
            # Also where the files are missing: a volume may come back, and the names stay with this revision.
            # Taking it out of the registry would let a name answer with an older one.
            self.failed(digest, error.message, is_final=False)
            if isinstance(error, ArtifactMissingError):
                await self._refuse(digest, error.message)
        except NodeCallError as error:
            is_final = error.node_code in _FINAL
            self.failed(digest, error.message, is_final=is_final)
            if is_final:
                await self._refuse(digest, error.node_message)
        else:
            self.held[digest] = adapter
            if not satisfies(adapter, step.tier, is_pinned=step.is_pinned):
                # Counted as a failure, so that asking again has an end.
                self.failed(digest, f"the node answers that it is {adapter.tier.value}", is_final=False)
                return
            self.failures.pop(digest, None)
            log.info("residency.loaded", node=self._client.address, digest=digest, tier=adapter.tier.value)

    async def _refuse(self, digest: str, reason: str) -> None:
        """Requests that wait on the node for what cannot come are to end now, and not when they time out."""
        with contextlib.suppress(NodeCallError):  # a node of an earlier release, or one that just went away
            if await self._client.refuse_demand(digest, reason):
                log.warning("residency.demand_refused", node=self._client.address, digest=digest)

    async def _drop(self, step: UnloadStep) -> None:
        try:
            await self._client.unload(step.digest, keep_on_disk=False, timeout_s=_UNLOAD_TIMEOUT_S)
        except NodeCallError as error:
            self.failed(step.digest, error.message, is_final=False)
        else:
            self.failures.pop(step.digest, None)
            self._set_absent(step.digest, keep_on_disk=False)

    def _set_absent(self, digest: str, *, keep_on_disk: bool) -> None:
        if not keep_on_disk:
            self.held.pop(digest, None)
        elif digest in self.held:
            self.held[digest] = ResidentAdapter(digest, ResidencyTier.DISK)
