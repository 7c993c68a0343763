"""Changes to the registry, each held at a stage of its own until a fault has begun, then repeated."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc
import grpc.aio

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.faulty_store import FaultyStore
from tests.support.journal import DEADLINE_S, Journal, answered, check_refusal, until_acknowledged
from tests.support.stack import Stack
from tests.support.steady_clients import SteadyStreams
from tests.support.tcp_proxy import Gate, Where
from tests.support.uploads import upload_parts

_CHUNK_BYTES = 5_000  # several of them to a watermark
_FIRST_TOKEN = 30


class Kind(Enum):
    """What is changed, or asked."""

    UPLOAD = "upload"
    LOAD = "load"
    GENERATE = "generate"
    DELETE = "delete"
    ALIAS = "alias"
    TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a change is held: its command that holds `marks` (and its adapter's name), or its client."""

    name: str
    kind: Kind
    where: Where | None = None
    marks: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass
class Change:
    """One change at its stage: how it was answered first, and how long after the fault it was done."""

    stage: Stage
    adapter: str
    watermark: int
    gate: Gate | None
    refusal: RpcFailure | None = None
    recover_s: float = 0.0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class StagedChanges:
    """One change for each stage. Call the methods in their order; `go_on` when the fault has begun."""

    def __init__(
        self, stack: Stack, store: FaultyStore, journal: Journal, stages: Sequence[Stage], label: str
    ) -> None:
        self.changes: dict[Stage, Change] = {}
        # What broke off the play; then no row of it is good.
        self.failure: BaseException | None = None
        self._stack = stack
        self._store = store
        self._journal = journal
        self._stages = stages
        self._label = label
        self._is_begun = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []

    @property
    def unstaged(self) -> list[str]:
        """Changes that were not held at their stage."""
        return [str(c.stage) for c in self.changes.values() if c.gate and not c.gate.reached.is_set()]

    async def prepare(self) -> None:
        """Register what the changes need to be there."""
        for index, stage in enumerate(self._stages):
            adapter, watermark = f"demo/{self._label}-{index}", _FIRST_TOKEN + index
            if stage.kind not in (Kind.UPLOAD, Kind.TOKEN):
                await self._journal.upload(adapter, watermark)
            self.changes[stage] = Change(stage, adapter, watermark, None)

    async def hold(self) -> None:
        """Begin all changes; returns when each stands at its stage, or one was given up by the manager."""
        for change in self.changes.values():
            if change.stage.where is not None:
                whose = _TENANT if change.stage.kind is Kind.TOKEN else _mark(change.adapter)
                marks = (b"EVALSHA", whose, *change.stage.marks)
                change.gate = self._store.proxy.hold(*marks, where=change.stage.where)
        self._running = [asyncio.create_task(self._try(c)) for c in self.changes.values()]
        end_s = time.monotonic() + DEADLINE_S
        while self.unstaged and not any(t.done() for t in self._running):
            assert time.monotonic() < end_s, self.unstaged
            await asyncio.sleep(0.01)

    async def go_on(self, *, is_released: bool = True) -> None:
        """The fault has begun: let the changes go on, and wait for their answers.

        `is_released` False: what is held never arrives, since its sender is dead.
        """
        self._is_begun.set()
        for change in self.changes.values():
            if change.gate and is_released:
                change.gate.release()
        await asyncio.gather(*self._running)

    async def finish(self, ended_s: float, *, has_retry_info: bool = True) -> None:
        """The fault ended at `ended_s`: repeat what was refused, as a client does, until it is done."""

        async def repeat(change: Change) -> None:
            if change.refusal is None:
                return
            if has_retry_info:
                check_refusal(change.refusal)
            else:
                assert change.refusal.code == "UNAVAILABLE", change.refusal
            await until_acknowledged(lambda: self._make(change))
            change.recover_s = time.monotonic() - ended_s

        await asyncio.gather(*(repeat(c) for c in self.changes.values()))

    async def compare(self, nodes: Sequence[Stack]) -> None:
        """Fill in what is lost and what is wrong."""
        for change in self.changes.values():
            if change.stage.kind is Kind.TOKEN:
                change.lost += await self._journal.missing_tokens(list(self._journal.tokens), nodes)
                continue
            names = [change.adapter]
            if change.stage.kind is Kind.ALIAS:
                names.append(f"{change.adapter}@prod")
            lost, wrong = await self._journal.compare(names, nodes)
            change.lost += lost
            change.wrong += wrong

    @asynccontextmanager
    async def played(self, streams: SteadyStreams) -> AsyncIterator[None]:
        """Around a play: what went wrong with the streams, and what broke it off, is kept for the rows."""
        try:
            async with streams:
                yield
        except (AssertionError, TimeoutError, grpc.RpcError) as error:
            self.failure = error
        finally:
            for change in self.changes.values():
                if change.stage.kind is Kind.GENERATE:
                    change.lost += streams.unclear
                    change.wrong += streams.wrong

    async def _try(self, change: Change) -> None:
        try:
            await self._make(change)
        except grpc.RpcError as error:
            change.refusal = from_rpc_error(error)

    async def _make(self, change: Change) -> None:
        match change.stage.kind:
            case Kind.UPLOAD:
                await self._upload(change)
            case Kind.LOAD:
                await self._load(change)
            case Kind.GENERATE:
                await self._is_begun.wait()
                assert await answered(self._stack, change.adapter) == change.watermark
            case Kind.DELETE:
                await self._journal.delete(change.adapter)
            case Kind.ALIAS:
                await self._journal.set_alias(change.adapter, "prod", change.watermark)
            case Kind.TOKEN:
                await self._journal.create_token("demo")

    async def _upload(self, change: Change) -> None:
        """From its beginning, or from where GetUpload says if it was refused before."""
        received = await self._received(change) if change.refusal else {}
        directory = self._journal.watermark(change.watermark)
        waits = change.stage.where is None and change.refusal is None

        async def parts() -> AsyncIterator[Any]:
            sent = upload_parts(
                directory, change.adapter,
                chunk_bytes=_CHUNK_BYTES, request_id=change.adapter, received=received,
            )  # fmt: skip
            for number, part in enumerate(sent):
                if waits and number == 2:
                    await self._is_begun.wait()
                yield part

        await self._journal.upload(change.adapter, change.watermark, parts)

    async def _received(self, change: Change) -> dict[str, int]:
        request = pb.GetUploadRequest(adapter=change.adapter, request_id=change.adapter)
        try:
            reply = await self._stack.adapters().GetUpload(
                request, metadata=self._stack.auth(), timeout=DEADLINE_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return {}
            raise
        return dict(reply.received_bytes)

    async def _load(self, change: Change) -> None:
        reply = await self._stack.adapters().LoadAdapter(
            pb.LoadAdapterRequest(name=change.adapter), metadata=self._stack.auth(), timeout=DEADLINE_S
        )
        assert [(p.state, p.failure) for p in reply.placements] == [(pb.RESIDENCY_STATE_ACTIVE, "")]


_TENANT = b"tenant:demo\r\n"


def _mark(adapter: str) -> bytes:
    """How a commit names an adapter's record."""
    return f"adapter:{adapter}\r\n".encode()
