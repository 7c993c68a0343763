"""The registry's store fails in twelve ways, each while nine changes stand at a stage of their own.

All nine are held where their stage says, the fault begins, they are let go: what is refused says UNAVAILABLE
and when to try again, what is repeated after the fault succeeds, what was acknowledged is there. Streams on
resident adapters and reads of the manager go on throughout.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_bench import rigs
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.fault_table import FaultTable
from tests.support.faulty_store import STORE_FAULTS, FaultyStore, StoreFault
from tests.support.journal import DEADLINE_S, Journal, answered, check_refusal, until_acknowledged
from tests.support.redis_server import BINARY
from tests.support.stack import Stack
from tests.support.steady_clients import SteadyReads, SteadyStreams
from tests.support.tcp_proxy import Gate, Where
from tests.support.uploads import upload_parts

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(BINARY is None, reason="redis-server is not installed (Debian: redis-server)"),
]

STEADY = {"demo/one": 11, "demo/two": 22}
STAGES = (
    "upload: staging",
    "upload: before its commit",
    "upload: during its commit",
    "upload: committed, not answered",
    "load",
    "generate",
    "delete",
    "alias",
    "token",
)
# The marks of a change on its way to the store: the commit script's record of that adapter in that state.
_PENDING, _READY, _DELETING = b'"state":"pending"', b'"state":"ready"', b'"state":"deleting"'


@dataclass
class World:
    """The stack that all episodes share, and its journal."""

    store: FaultyStore
    stack: Stack
    journal: Journal
    steady: dict[str, str] = field(default_factory=dict)


@dataclass
class Operation:
    """One change at its stage: how it was first answered, and when it was acknowledged."""

    name: str
    change: Callable[[], Awaitable[Any]]
    gate: Gate | None = None
    refusal: RpcFailure | None = None
    recover_s: float = 0.0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def begin(self) -> None:
        """Try once; a refusal must be a proper one."""
        try:
            await self.change()
        except grpc.RpcError as error:
            self.refusal = from_rpc_error(error)
            check_refusal(self.refusal)

    async def finish(self, ended_s: float) -> None:
        """Repeat what was refused until it is acknowledged."""
        if self.refusal is not None:
            await until_acknowledged(self.change)
            self.recover_s = time.monotonic() - ended_s


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Both services over a Redis behind the proxy, with two resident adapters."""
    root = tmp_path_factory.mktemp("store")
    base = rigs.write_copy_base(root / "base")
    async with (
        FaultyStore(root / "redis") as store,
        Stack(base, root / "stack", manager_flags=["--redis-url", store.url]) as stack,
    ):
        journal = Journal(stack, root)
        world = World(store, stack, journal)
        for name, token in STEADY.items():
            world.steady[name] = (await journal.upload(name, token)).revision.digest
            assert await answered(stack, name) == token
        yield world


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=STORE_FAULTS, ids=str)
async def episode(world: World, request: pytest.FixtureRequest) -> AsyncIterator["Episode"]:
    """One fault, played through with all stages at once; the tests look at what came of each."""
    fault: StoreFault = request.param
    for attempt in "abc":
        episode = Episode(world, fault, f"{attempt}{STORE_FAULTS.index(fault)}")
        await episode.play()
        if episode.is_staged:  # else the machine was too slow to have all of them held at once
            break
    yield episode


class Episode:
    """One fault over all stages."""

    def __init__(self, world: World, fault: StoreFault, label: str) -> None:
        self.fault = fault
        self.operations: dict[str, Operation] = {}
        self._world = world
        self._label = label
        self._staged = asyncio.Event()

    @property
    def is_staged(self) -> bool:
        """Whether every change was held at its stage when the fault began."""
        return all(o.gate.reached.is_set() for o in self.operations.values() if o.gate)

    async def play(self) -> None:
        """Prepare, hold every change at its stage, let the fault happen, repeat what was refused, compare."""
        world = self._world
        await self._prepare()
        async with (
            SteadyStreams(world.stack, {**STEADY, None: 5}) as streams,
            SteadyReads(world.stack, world.steady) as reads,
        ):
            self._arrange()
            running = [asyncio.create_task(o.begin()) for o in self.operations.values()]
            await self._all_held(running)
            await self.fault.begin(world.store)
            try:
                self._staged.set()
                for operation in self.operations.values():
                    if operation.gate:
                        operation.gate.release()
                await asyncio.gather(*running)
                await streams.progress()
                await reads.progress()
            finally:
                await self.fault.end(world.store)
            ended_s = time.monotonic()
            await asyncio.gather(*(o.finish(ended_s) for o in self.operations.values()))
            await streams.progress()
            await reads.progress()
        await self._compare(streams, reads)

    def _name(self, stage: str) -> str:
        return f"demo/{self._label}-{STAGES.index(stage)}"

    def _token(self, stage: str) -> int:
        return 30 + STAGES.index(stage)

    async def _prepare(self) -> None:
        for stage in ("load", "generate", "delete", "alias"):
            await self._world.journal.upload(self._name(stage), self._token(stage))

    def _arrange(self) -> None:
        hold = self._world.store.proxy.hold
        self._upload("upload: staging", None)
        for stage, state, where in (
            ("upload: before its commit", _PENDING, Where.BEFORE),
            ("upload: during its commit", _READY, Where.MIDDLE),
            ("upload: committed, not answered", _READY, Where.REPLY),
        ):
            self._upload(stage, hold(b"EVALSHA", self._mark(stage), state, where=where))
        journal, name = self._world.journal, self._name
        self._add(
            "load",
            lambda: self._load(name("load")),
            hold(b"EVALSHA", self._mark("load"), b'"wanted":"active"'),
        )
        self._add("generate", self._generate, None)
        self._add(
            "delete",
            lambda: journal.delete(name("delete")),
            hold(b"EVALSHA", self._mark("delete"), _DELETING),
        )
        alias = hold(b"EVALSHA", self._mark("alias"), b'"aliases":[["prod"')
        self._add("alias", lambda: journal.set_alias(name("alias"), "prod", self._token("alias")), alias)
        self._add(
            "token", lambda: journal.create_token("demo"), hold(b"EVALSHA", b'"tenant_id":"demo"', b"token:")
        )

    def _mark(self, stage: str) -> bytes:
        return f'"adapter":"{self._name(stage).partition("/")[2]}"'.encode()

    def _add(self, stage: str, change: Callable[[], Awaitable[Any]], gate: Gate | None) -> None:
        self.operations[stage] = Operation(stage, change, gate)

    def _upload(self, stage: str, gate: Gate | None) -> None:
        journal, name, token = self._world.journal, self._name(stage), self._token(stage)
        directory, staged = journal.watermark(token), self._staged

        async def parts() -> AsyncIterator[Any]:
            for number, part in enumerate(upload_parts(directory, name, chunk_bytes=20_000, request_id=name)):
                if number == 2 and stage == "upload: staging":
                    await staged.wait()
                yield part

        async def change() -> None:
            received = await self._received(name)
            if received is None:
                await journal.upload(name, token, parts)
            else:
                rest = upload_parts(directory, name, chunk_bytes=20_000, request_id=name, received=received)
                await journal.upload(name, token, lambda: rest)

        self._add(stage, change, gate)

    async def _received(self, name: str) -> dict[str, int] | None:
        """Where a broken upload goes on, as a client asks; None for a first try."""
        operation = self.operations.get(next(s for s in STAGES if self._name(s) == name))
        if operation is None or operation.refusal is None:
            return None
        stack = self._world.stack
        try:
            reply = await stack.adapters().GetUpload(
                pb.GetUploadRequest(adapter=name, request_id=name), metadata=stack.auth(), timeout=DEADLINE_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return {}
            raise
        return dict(reply.received_bytes)

    async def _load(self, name: str) -> None:
        stack = self._world.stack
        reply = await stack.adapters().LoadAdapter(
            pb.LoadAdapterRequest(name=name), metadata=stack.auth(), timeout=DEADLINE_S
        )
        assert [(p.state, p.failure) for p in reply.placements] == [(pb.RESIDENCY_STATE_ACTIVE, "")]

    async def _generate(self) -> None:
        """A registered adapter that the node does not hold: it fetches it without the manager's store."""
        await self._staged.wait()
        assert await answered(self._world.stack, self._name("generate")) == self._token("generate")

    async def _all_held(self, running: list["asyncio.Task[None]"]) -> None:
        """Until every gate has its change, or one of them was held for so long that it was given up."""
        gates = [o.gate.reached for o in self.operations.values() if o.gate]
        end_s = time.monotonic() + DEADLINE_S
        while not all(g.is_set() for g in gates) and not any(t.done() for t in running):
            assert time.monotonic() < end_s, [o.name for o in self.operations.values()]
            await asyncio.sleep(0.01)

    async def _compare(self, streams: SteadyStreams, reads: SteadyReads) -> None:
        journal, stack = self._world.journal, self._world.stack
        assert not reads.broken, reads.broken[:5]
        for stage, operation in self.operations.items():
            if stage == "token":
                operation.lost += await journal.missing_tokens(list(journal.tokens), [stack])
                continue
            names = [self._name(stage)] + ([f"{self._name(stage)}@prod"] if stage == "alias" else [])
            operation.lost, operation.wrong = await journal.compare(names, [stack])
        steady_lost, steady_wrong = await journal.compare(list(STEADY), [stack])
        self.operations["generate"].lost += [*streams.unclear, *steady_lost]
        self.operations["generate"].wrong += [*streams.wrong, *steady_wrong]


@pytest.mark.parametrize("stage", STAGES)
async def test_store(episode: Episode, stage: str, faults: FaultTable) -> None:
    """One row: nothing acknowledged is lost, no answer is another adapter's, and it recovers."""
    operation = episode.operations[stage]
    with faults.case(str(episode.fault), stage) as case:
        assert episode.is_staged, "some changes did not reach their stage"
        case.lost += operation.lost
        case.wrong += operation.wrong
        case.recovered(operation.recover_s)
        if stage == "generate":
            assert operation.refusal is None
