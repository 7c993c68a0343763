"""The mirror has own commits at once, whatever becomes of the store, and never undoes them."""

import asyncio

import pytest

from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.transactions import Transactions
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.errors import RegistryUnavailableError
from adapter_manager.domain.tenant import Tenant, TenantUsage, TokenOwner
from adapter_manager.ports import Change, create, delete
from tests.support.memory_registry import MemoryRegistry
from tests.support.waiting import eventually


async def commit(registry: MemoryRegistry, mirror: RegistryMirror, *changes: Change) -> None:
    """Through a transaction, as everybody does."""

    async def attempt() -> tuple[list[Change], None]:
        return list(changes), None

    await Transactions(registry, mirror).run(attempt)


@pytest.fixture
async def registry() -> MemoryRegistry:
    """One tenant."""
    registry = MemoryRegistry()
    await registry.commit([create(Tenant("first", 1.0))])
    return registry


async def test_a_commit_is_in_the_view_although_the_store_goes_away_with_its_answer(
    registry: MemoryRegistry,
) -> None:
    """Puts and deletions of every kind that views hold; the generation is the commit's."""
    mirror = RegistryMirror(registry)
    before = await mirror.refresh()
    stored = await registry.tenant("first")
    assert stored
    committed = registry.commit

    async def commit_and_go(changes: list[Change]) -> int:
        generation = await committed(changes)
        registry.is_away = True
        return generation

    registry.commit = commit_and_go  # type: ignore[method-assign]
    token = TokenOwner("5" * 64, "second", "id", is_admin=False)
    new = [create(Tenant("second", 2.0)), create(TenantUsage("second")), create(token)]
    await commit(registry, mirror, delete(stored), *new)
    assert set(mirror.view.tenants) == {"second"}
    assert mirror.view.tokens == {"5" * 64: token}
    assert mirror.view.generation == registry.generation
    assert set(before.tenants) == {"first"}  # who held the older view still has it
    with pytest.raises(RegistryUnavailableError):
        await mirror.refresh()
    assert set(mirror.view.tenants) == {"second"}


async def test_a_lost_store_is_restored_with_what_was_committed_last(registry: MemoryRegistry) -> None:
    """It lost everything between the commit's answer and the next read."""
    mirror = RegistryMirror(registry)
    await mirror.refresh()
    await commit(registry, mirror, create(Tenant("second", 2.0)))
    registry.empty()
    await mirror.refresh()
    assert await registry.tenant("second")
    assert set(mirror.view.tenants) == {"first", "second"}


async def test_a_read_that_began_before_a_commit_does_not_undo_it(registry: MemoryRegistry) -> None:
    """The poll was on its way; what it brings is older, and is read again."""
    mirror = RegistryMirror(registry)
    await mirror.refresh()
    await registry.commit([create(Tenant("others", 1.0))])
    read, may_return = registry.refresh, asyncio.Event()

    async def slow(view: RegistryView) -> RegistryView:
        found = await read(view)
        await may_return.wait()
        return found

    registry.refresh = slow  # type: ignore[method-assign]
    polling = asyncio.create_task(mirror.refresh())
    await asyncio.sleep(0)
    committing = asyncio.create_task(commit(registry, mirror, create(Tenant("own", 2.0))))
    await eventually(lambda: "own" in mirror.view.tenants)
    may_return.set()
    await asyncio.gather(polling, committing)
    assert set(mirror.view.tenants) == {"first", "others", "own"}
    assert mirror.view.generation == registry.generation


async def test_a_commit_alone_makes_no_view(registry: MemoryRegistry) -> None:
    """A view that was never read would look as if the registry held nothing else."""
    mirror = RegistryMirror(registry)
    committed = registry.commit

    async def commit_and_go(changes: list[Change]) -> int:
        generation = await committed(changes)
        registry.is_away = True
        return generation

    registry.commit = commit_and_go  # type: ignore[method-assign]
    await commit(registry, mirror, create(Tenant("own", 1.0)))
    assert mirror.view.epoch == ""
    assert not mirror.view.tenants
