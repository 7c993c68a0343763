"""The registry's store fails in twelve ways, each while nine changes stand at a stage of their own.

All nine are held where their stage says, the fault begins, they are let go: what is refused says UNAVAILABLE
and when to try again, what is repeated after the fault succeeds, what was acknowledged is there. Streams on
resident adapters and reads of the manager go on throughout.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from lorikeet_bench import rigs
from tests.support.fault_table import FaultTable
from tests.support.faulty_store import STORE_FAULTS, FaultyStore, StoreFault
from tests.support.journal import Journal
from tests.support.redis_server import BINARY
from tests.support.stack import Stack
from tests.support.staged_changes import Kind, Stage, StagedChanges
from tests.support.steady_clients import STEADY, SteadyReads, SteadyStreams, upload_steady
from tests.support.tcp_proxy import Where

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(BINARY is None, reason="redis-server is not installed (Debian: redis-server)"),
]

STAGES = (
    Stage("upload: staging", Kind.UPLOAD),
    Stage("upload: before its commit", Kind.UPLOAD, Where.BEFORE, (b'"state":"pending"',)),
    Stage("upload: during its commit", Kind.UPLOAD, Where.MIDDLE, (b'"state":"ready"',)),
    Stage("upload: committed, not answered", Kind.UPLOAD, Where.REPLY, (b'"state":"ready"',)),
    Stage("load push", Kind.LOAD, Where.BEFORE, (b'"wanted":"active"',)),
    Stage("generate", Kind.GENERATE),
    Stage("delete", Kind.DELETE, Where.BEFORE, (b'"state":"deleting"',)),
    Stage("alias update", Kind.ALIAS, Where.BEFORE, (b'"aliases":[["prod"',)),
    Stage("token creation", Kind.TOKEN, Where.BEFORE, (b"token:",)),
)
GENERATE = STAGES[5]


@dataclass
class World:
    """The stack that all episodes share, and its journal."""

    store: FaultyStore
    stack: Stack
    journal: Journal
    steady: dict[str, str]


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
        yield World(store, stack, journal, await upload_steady(stack, journal))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=STORE_FAULTS, ids=str)
async def episode(world: World, request: pytest.FixtureRequest) -> AsyncIterator[StagedChanges]:
    """One fault, played through with all stages at once; the tests look at what came of each."""
    fault: StoreFault = request.param
    for attempt in "abc":
        label = f"{attempt}{STORE_FAULTS.index(fault)}"
        changes = StagedChanges(world.stack, world.store, world.journal, STAGES, label)
        await play(world, fault, changes)
        if (
            changes.failure or not changes.unstaged
        ):  # else the machine was too slow to have all of them held at once
            break
    yield changes


async def play(world: World, fault: StoreFault, changes: StagedChanges) -> None:
    """Hold every change at its stage, let the fault happen, repeat what was refused, compare."""
    await changes.prepare()
    streams = SteadyStreams(world.stack, {**STEADY, None: 5})
    async with changes.played(streams):
        async with SteadyReads(world.stack, world.steady) as reads:
            await changes.hold()
            await fault.begin(world.store)
            try:
                await changes.go_on()
                await streams.progress()
                await reads.progress()
            finally:
                await fault.end(world.store)
            await changes.finish(time.monotonic())
            await streams.progress()
            await reads.progress()
        assert not reads.broken, reads.broken[:5]
        await changes.compare([world.stack])
        lost, wrong = await world.journal.compare(list(STEADY), [world.stack])
        changes.changes[GENERATE].lost += lost
        changes.changes[GENERATE].wrong += wrong


@pytest.mark.parametrize("stage", STAGES, ids=str)
async def test_store(
    episode: StagedChanges, stage: Stage, faults: FaultTable, request: pytest.FixtureRequest
) -> None:
    """One row: nothing acknowledged is lost, no answer is another adapter's, and it recovers."""
    change = episode.changes[stage]
    fault: StoreFault = request.node.callspec.params["episode"]
    with faults.case(fault.name, stage.name) as case:
        case.lost += change.lost
        case.wrong += change.wrong
        if episode.failure:
            raise episode.failure
        case.recovered(change.recover_s)
        assert not episode.unstaged
        if stage.kind is Kind.GENERATE:
            assert change.refusal is None
        elif not fault.is_passing and stage.where is not Where.REPLY:
            assert change.refusal is not None, "the fault was not felt"
