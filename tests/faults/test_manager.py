"""The manager is killed while changes stand at every stage, and started again over what it left.

Its repeat succeeds, nothing acknowledged is lost, nothing is left over: no staged bytes, no files that no
revision holds. The node goes on serving meanwhile.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_bench import rigs
from tests.support.fault_table import FaultTable
from tests.support.faulty_store import FaultyStore
from tests.support.journal import Journal
from tests.support.redis_server import BINARY
from tests.support.stack import Stack
from tests.support.staged_changes import Kind, Stage, StagedChanges
from tests.support.steady_clients import STEADY, SteadyStreams, upload_steady
from tests.support.tcp_proxy import Where

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(BINARY is None, reason="redis-server is not installed (Debian: redis-server)"),
]

STAGES = (
    Stage("upload: staging", Kind.UPLOAD),
    Stage("upload: before its first commit", Kind.UPLOAD, Where.BEFORE, (b'"state":"pending"',)),
    Stage("upload: begun, not stored", Kind.UPLOAD, Where.REPLY, (b'"state":"pending"',)),
    Stage("upload: stored, before its commit", Kind.UPLOAD, Where.BEFORE, (b'"state":"ready"',)),
    Stage("upload: during its commit", Kind.UPLOAD, Where.MIDDLE, (b'"state":"ready"',)),
    Stage("upload: committed, not answered", Kind.UPLOAD, Where.REPLY, (b'"state":"ready"',)),
    Stage("load: asked, not pushed", Kind.LOAD, Where.REPLY, (b'"wanted":"active"',)),
    Stage("generate", Kind.GENERATE),
    Stage("delete: before its commit", Kind.DELETE, Where.BEFORE, (b'"state":"deleting"',)),
    Stage("delete: marked, on the node", Kind.DELETE, Where.REPLY, (b'"state":"deleting"',)),
    Stage("delete: off the node, in the record", Kind.DELETE, Where.BEFORE, (b'"num_adapters"', b"delete")),
    Stage("alias update: not answered", Kind.ALIAS, Where.REPLY, (b'"aliases":[["prod"',)),
    Stage("token creation: not answered", Kind.TOKEN, Where.REPLY, (b"token:",)),
)
GENERATE = STAGES[7]


@dataclass
class World:
    """A stack whose manager is killed."""

    store: FaultyStore
    stack: Stack
    journal: Journal
    root: Path

    @property
    def staging(self) -> Path:
        """Where uploads wait."""
        return self.stack.root / "manager" / "staging"

    @property
    def stored(self) -> set[str]:
        """Digests in the artifact store."""
        return {p.name for p in (self.stack.root / "manager" / "artifacts" / "revisions").iterdir()}

    async def registered(self) -> set[str]:
        """Digests of all READY revisions."""
        reply = await self.stack.adapters().ListAdapters(
            pb.ListAdaptersRequest(parent="tenants/demo", page_size=1000),
            metadata=self.stack.auth(), timeout=20,
        )  # fmt: skip
        return {r.digest for a in reply.adapters for r in a.revisions}

    async def check_nothing_is_left(self) -> None:
        """No staged upload, and exactly the registered revisions' files, after the janitor's next rounds."""
        registered = await self.registered()
        end_s = time.monotonic() + 60
        while left := [*self.staging.iterdir(), *(self.stored ^ registered)]:
            assert time.monotonic() < end_s, f"left over, or missing: {left}"
            await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Both services over a Redis behind the proxy, with two resident adapters."""
    root = tmp_path_factory.mktemp("manager")
    base = rigs.write_copy_base(root / "base")
    async with (
        FaultyStore(root / "redis") as store,
        Stack(base, root / "stack", manager_flags=["--redis-url", store.url]) as stack,
    ):
        world = World(store, stack, Journal(stack, root), root)
        await upload_steady(stack, world.journal)
        yield world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def episode(world: World) -> AsyncIterator[StagedChanges]:
    """One kill with all changes at their stages; the tests look at what came of each."""
    for attempt in "abc":
        changes = StagedChanges(world.stack, world.store, world.journal, STAGES, attempt)
        await play(world, changes)
        if changes.failure or not changes.unstaged:
            break
    yield changes


async def play(world: World, changes: StagedChanges) -> None:
    """Hold every change at its stage, kill the manager, start it again, repeat what was refused, compare."""
    await changes.prepare()
    stack = world.stack
    streams = SteadyStreams(stack, {**STEADY, None: 5})
    async with changes.played(streams):
        await changes.hold()
        await asyncio.to_thread(stack.manager.kill)
        await changes.go_on(is_released=False)
        await streams.progress()
        stack.manager.start()
        began_s = time.monotonic()
        await stack.ready()
        await changes.finish(began_s, has_retry_info=False)
        await streams.progress()
        await changes.compare([stack])
        lost, wrong = await world.journal.compare(list(STEADY), [stack])
        changes.changes[GENERATE].lost += lost
        changes.changes[GENERATE].wrong += wrong
        await world.check_nothing_is_left()


@pytest.mark.parametrize("stage", STAGES, ids=str)
async def test_kill(episode: StagedChanges, stage: Stage, faults: FaultTable) -> None:
    """One row: nothing acknowledged is lost, no answer is another adapter's, and it recovers."""
    change = episode.changes[stage]
    with faults.case("manager killed", stage.name) as case:
        case.lost += change.lost
        case.wrong += change.wrong
        if episode.failure:
            raise episode.failure
        case.recovered(change.recover_s)
        assert not episode.unstaged
        assert (change.refusal is None) == (stage.kind is Kind.GENERATE)
