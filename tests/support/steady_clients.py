"""Clients that never stop asking while faults happen: streams on known adapters, and reads of the manager."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Self

import grpc.aio

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet_rpc.errors import from_rpc_error
from tests.support.journal import DEADLINE_S, PROMPT, Journal, answered
from tests.support.stack import Stack, make_request

STEADY = {"demo/one": 11, "demo/two": 22}
"""Adapters that stay what they are while faults happen, and their watermarks."""

_TOKENS = 16
_PAUSE_S = 0.05  # so that what is tested gets its share of two cores


async def upload_steady(stack: Stack, journal: Journal) -> dict[str, str]:
    """Upload STEADY's adapters and see each one answer; their digests by name."""
    digests: dict[str, str] = {}
    for name, token in STEADY.items():
        digests[name] = (await journal.upload(name, token)).revision.digest
        assert await answered(stack, name) == token
    return digests


class SteadyStreams:
    """Streams on adapters whose watermarks are known (None: the base, which repeats the prompt), for ever.

    `wrong` is any token of somebody else; `unclear` any stream that neither finished whole nor ended with a
    status in `may_fail`; `failed` counts those that ended with one of these. Use as a context manager.
    """

    def __init__(
        self,
        node: Stack,
        watermarks: Mapping[str | None, int],
        *,
        num_each: int = 1,
        max_tokens: int = _TOKENS,
        may_fail: Iterable[str] = (),
    ) -> None:
        self.wrong = list[str]()
        self.unclear = list[str]()
        self.failed = Counter[str]()
        self.num_whole = 0
        self._node = node
        self._watermarks = dict(watermarks)
        self._num_each = num_each
        self._max_tokens = max_tokens
        self._may_fail = frozenset(may_fail)
        self._whole = Counter[str | None]()
        self._tasks = list[asyncio.Task[None]]()

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._ask(adapter, token), name=f"steady {adapter}")
            for adapter, token in self._watermarks.items()
            for _ in range(self._num_each)
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def progress(self, timeout_s: float = 60.0) -> None:
        """Return when each adapter has given one more whole answer that was begun after this call."""
        goal = {adapter: self._whole[adapter] + 1 + self._num_each for adapter in self._watermarks}
        async with asyncio.timeout(timeout_s):
            while any(self._whole[adapter] < count for adapter, count in goal.items()):
                for task in self._tasks:
                    assert not task.done(), task
                await asyncio.sleep(0.01)

    async def _ask(self, adapter: str | None, token: int) -> None:
        stub = self._node.inference()
        while True:
            request = make_request([PROMPT], adapter=adapter, max_tokens=self._max_tokens)
            tokens, is_finished = list[int](), False
            try:
                call = stub.Generate(request, metadata=self._node.auth(), timeout=DEADLINE_S)
                async for piece in call:
                    tokens += [t.id for t in piece.tokens]
                    is_finished = is_finished or piece.HasField("finish")
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                self.failed[failure.code.value] += 1
                if failure.code.value not in self._may_fail:
                    self.unclear.append(f"{adapter}: {failure} {failure.reason}")
            else:
                if not is_finished or len(tokens) != self._max_tokens:
                    self.unclear.append(f"{adapter}: ended after {len(tokens)} tokens, finish {is_finished}")
                self.num_whole += 1
                self._whole[adapter] += 1
            if any(t != token for t in tokens):
                self.wrong.append(f"{adapter}: {tokens}, not {token}")
            await asyncio.sleep(_PAUSE_S)


class SteadyReads:
    """GetAdapter and ListAdapters on the manager, for ever: each must answer, and name these digests."""

    def __init__(self, stack: Stack, digests: Mapping[str, str]) -> None:
        self.broken = list[str]()
        self.num_done = 0
        self._stack = stack
        self._digests = dict(digests)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._read(), name="steady reads")
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def progress(self, timeout_s: float = 60.0) -> None:
        """Return when a whole round of reads was begun and done after this call."""
        goal = self.num_done + 2
        async with asyncio.timeout(timeout_s):
            while self.num_done < goal:
                assert self._task is not None
                assert not self._task.done(), self._task
                await asyncio.sleep(0.01)

    async def _read(self) -> None:
        stub = self._stack.adapters()
        options: Any = {"metadata": self._stack.auth(), "timeout": DEADLINE_S}
        while True:
            try:
                for name, digest in self._digests.items():
                    reply = await stub.GetAdapter(
                        adapter_pb2.GetAdapterRequest(name=name.partition("/")[2]), **options
                    )
                    if reply.adapter.current_digest != digest:
                        self.broken.append(f"GetAdapter {name}: {reply.adapter.current_digest}")
                listed = await stub.ListAdapters(
                    adapter_pb2.ListAdaptersRequest(parent="tenants/demo", page_size=1000), **options
                )
                found = {a.name.rpartition("/")[2]: a.current_digest for a in listed.adapters}
                for name, digest in self._digests.items():
                    if found.get(name.partition("/")[2]) != digest:
                        self.broken.append(f"ListAdapters lacks {name}")
            except grpc.aio.AioRpcError as error:
                self.broken.append(f"read: {from_rpc_error(error)}")
            self.num_done += 1
            await asyncio.sleep(_PAUSE_S)
