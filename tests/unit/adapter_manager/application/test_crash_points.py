"""A kill between any two commits of an upload or deletion, then a restart: nothing lost, nothing left."""

import time
from pathlib import Path

import pytest

from adapter_manager.application.ingest import UploadStaging
from adapter_manager.application.janitor import Janitor
from adapter_manager.domain.adapter import Adapter, DigestUse, RevisionState
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.errors import (
    AdapterNotFoundError,
    ArtifactStoreError,
    ConcurrentChangeError,
    PurgeInProgressError,
    RevisionInUseError,
)
from adapter_manager.domain.revision_report import RevisionReport
from adapter_manager.domain.tenant import TenantUsage
from adapter_manager.ports import create, forget
from lorikeet_contract.names import AdapterName
from tests.support.built_revisions import MemoryArtifacts, make_built
from tests.support.manager_parts import Parts, make_parts
from tests.support.memory_registry import MemoryRegistry

DEMO, OTHER = Caller("demo", is_admin=False), Caller("other", is_admin=False)


class Killed(BaseException):
    """The process ends here."""


class World:
    """What outlives a manager: the registry and the store."""

    def __init__(self, directory: Path) -> None:
        self.registry = MemoryRegistry()
        self.store = MemoryArtifacts()
        self.directory = directory

    def start(self, manager_id: str = "m1") -> Parts:
        """A manager process over what is there."""
        self.registry.before_commit = lambda _: None
        self.registry.num_commits = 0
        return make_parts(self.registry, self.store, self.directory, manager_id=manager_id)

    def kill_before(self, commit: int) -> None:
        """End the process when it is about to make its `commit`th commit from now, and at each one after."""
        self.registry.num_commits = 0

        def kill(number: int) -> None:
            if number >= commit:
                raise Killed

        self.registry.before_commit = kill

    async def restart(self) -> Parts:
        """A new process of the same manager, after its first sweeps."""
        parts = self.start()
        await parts.mirror.refresh()
        janitor = self.janitor(parts)
        await janitor.sweep(is_first=True)
        await janitor.sweep(is_first=False)
        return parts

    def janitor(self, parts: Parts, manager_id: str = "m1") -> Janitor:
        """The manager's janitor."""
        staging = UploadStaging(self.directory / "staging")
        return Janitor(parts.mirror, parts.registration, parts.deletion, staging, _long_after, manager_id)

    def check(self) -> None:
        """Every book agrees with every other."""
        records = [stored.value for stored in self.registry.records.values()]
        adapters = [r for r in records if isinstance(r, Adapter)]
        held = {(r.digest, a.name.short) for a in adapters for r in a.revisions}
        uses = {(u.digest, h) for u in records if isinstance(u, DigestUse) for h in u.holders}
        assert held == uses
        assert {d for d, _ in held} == set(self.store.stored)
        assert all(r.state is RevisionState.READY for a in adapters for r in a.revisions)
        assert all(a.revisions for a in adapters)
        reports = {(r.tenant, r.adapter, r.digest) for r in records if isinstance(r, RevisionReport)}
        assert reports == {(a.tenant, a.adapter, r.digest) for a in adapters for r in a.revisions}
        for usage in (r for r in records if isinstance(r, TenantUsage)):
            assert usage.num_adapters == sum(a.tenant == usage.tenant_id for a in adapters)


@pytest.fixture
async def world(tmp_path: Path) -> World:
    """Two tenants; demo/kept is registered."""
    made = World(tmp_path)
    parts = made.start()
    await parts.tenant("demo")
    await parts.tenant("other")
    await parts.push("demo/kept", "kept", aliases=["prod"])
    made.check()
    return made


@pytest.mark.parametrize("commit", [0, 1])
async def test_a_kill_during_an_upload_leaves_nothing_of_it(world: World, commit: int) -> None:
    """It was not acknowledged; the repeat succeeds."""
    parts = world.start()
    world.kill_before(commit)
    with pytest.raises(Killed):
        await parts.push("demo/new", "new")
    parts = await world.restart()
    world.check()
    assert {a.name.short for a in parts.mirror.view.adapters.values()} == {"demo/kept"}
    assert (await parts.push("demo/new", "new"))[1]
    world.check()


@pytest.mark.parametrize("commit", range(5))
async def test_a_kill_during_a_deletion_never_brings_the_adapter_back(world: World, commit: int) -> None:
    """Either the call never began and all is as before, or the deletion is carried through."""
    parts = world.start()
    world.kill_before(commit)
    try:
        await parts.deletion.delete(DEMO, "kept", "")
        was_killed = False
    except Killed:
        was_killed = True
    assert was_killed is (commit < 4)
    await world.restart()
    world.check()
    assert ((await world.registry.adapter(AdapterName("demo", "kept"))) is None) is (commit > 0)


async def test_a_failing_store_fails_the_upload_and_leaves_nothing(world: World) -> None:
    """Also where the cleaning up fails too: the janitor does it."""
    parts = world.start()
    world.store.is_away = True
    with pytest.raises(ArtifactStoreError):
        await parts.push("demo/new", "new")
    world.store.is_away = False
    await world.janitor(parts).sweep(is_first=False)
    world.check()
    assert await world.registry.adapter(AdapterName("demo", "new")) is None


async def test_a_deletion_is_acknowledged_although_the_store_is_away(world: World) -> None:
    """The adapter is gone from every list; its files follow when the store is back."""
    parts = world.start()
    world.store.is_away = True
    await parts.deletion.delete(DEMO, "kept", "")
    with pytest.raises(AdapterNotFoundError):
        await parts.adapters.get(DEMO, "kept")
    assert world.store.stored
    world.store.is_away = False
    await world.janitor(parts).sweep(is_first=False)
    assert not world.store.stored
    world.check()


async def test_content_that_two_tenants_hold_is_stored_once_and_until_the_last_lets_go(world: World) -> None:
    """Each sees its own adapter only."""
    parts = world.start()
    _, is_new = await parts.push("other/mine", "kept")
    assert is_new  # new for this tenant: it must not learn that others hold the same content
    assert len(world.store.stored) == 1
    await parts.deletion.delete(DEMO, "kept", "")
    world.check()
    assert len(world.store.stored) == 1
    assert (await parts.adapters.get(OTHER, "mine")).adapter.current_digest in world.store.stored
    await parts.deletion.delete(OTHER, "mine", "")
    world.check()
    assert not world.store.stored


async def test_one_revision_is_deleted_and_the_next_newest_answers(world: World) -> None:
    """A revision that an alias points at is kept until the alias moves."""
    parts = world.start()
    first = (await parts.adapters.get(DEMO, "kept")).adapter.current_digest
    second, _ = await parts.push("demo/kept", "second")
    with pytest.raises(RevisionInUseError, match="prod"):
        await parts.deletion.delete(DEMO, f"tenants/demo/adapters/kept/revisions/{first}", "")
    await parts.deletion.delete(DEMO, f"tenants/demo/adapters/kept/revisions/{second.digest}", "")
    adapter = (await parts.adapters.get(DEMO, "kept")).adapter
    assert adapter.current_digest == first
    assert len(adapter.revisions) == 1
    world.check()


async def test_an_adapter_deleted_while_its_upload_is_stored_stays_deleted(world: World) -> None:
    """The upload fails, and its files do not stay behind."""
    parts = world.start()
    put = world.store.put

    async def put_while_deleting(built: object) -> bool:
        await parts.deletion.delete(DEMO, "new", "")
        return await put(built)  # pyright: ignore[reportArgumentType]

    world.store.put = put_while_deleting  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConcurrentChangeError, match="deleted while"):
        await parts.push("demo/new", "new")
    world.check()


async def test_an_upload_waits_for_the_removal_of_the_same_content(world: World) -> None:
    """Otherwise the removal would take the files that the upload just stored."""
    parts = world.start()
    digest = make_built(world.directory, "new").digest
    await world.registry.commit([create(DigestUse(digest, (), "another-manager", 1e12))])
    registration = parts.registration
    pending = registration._pending(make_built(world.directory, "new"))
    with pytest.raises(PurgeInProgressError):
        await registration._begin_changes(AdapterName("demo", "new"), pending)
    await world.registry.commit([forget(DigestUse(digest))])
    assert (await parts.push("demo/new", "new"))[1]
    world.check()


async def test_another_managers_pending_upload_is_left_alone_while_it_is_young(world: World) -> None:
    """Only its owner, or an hour, may call it dead."""
    parts = world.start()
    world.kill_before(1)
    with pytest.raises(Killed):
        await parts.push("demo/new", "new")
    other = world.start("m2")
    await other.mirror.refresh()
    janitor = Janitor(
        other.mirror,
        other.registration,
        other.deletion,
        UploadStaging(world.directory / "s2"),
        time.time,
        "m2",
    )
    await janitor.sweep(is_first=True)
    assert await world.registry.adapter(AdapterName("demo", "new")) is not None
    await world.janitor(other, "m2").sweep(is_first=False)
    world.check()


async def test_a_push_heals_files_that_got_lost(world: World) -> None:
    """The same content again: not created, but stored again."""
    parts = world.start()
    world.store.stored.clear()
    _, is_new = await parts.push("demo/kept", "kept")
    assert not is_new
    world.check()


def _long_after() -> float:
    return 1e12
