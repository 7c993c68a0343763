"""A store that lost its data or holds somebody else's: what is given back, and what is refused."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.transactions import Transactions
from adapter_manager.domain.adapter import Adapter, Revision, RevisionState
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.errors import (
    RegistryBehindError,
    RegistryReplacedError,
    RegistryUnavailableError,
)
from adapter_manager.domain.tenant import Tenant, TenantUsage
from adapter_manager.infra.redis.connection import RedisConnection, RedisOptions
from adapter_manager.infra.redis.embedded import EmbeddedValkey
from adapter_manager.infra.redis.identity import RegistryIdentity
from adapter_manager.infra.redis.registry import RedisRegistry
from adapter_manager.ports import Change, create, delete
from lorikeet_contract.names import AdapterName


def make_adapter(tenant: str, adapter: str) -> Adapter:
    """An adapter with one READY revision."""
    revision = Revision("d" * 64, RevisionState.READY, 1.5, 10, "float32", 8, "b" * 64)
    return Adapter(tenant, adapter, 1.0, 2.25, (revision,))


async def test_an_emptied_store_is_filled_again_from_the_view(registry: RedisRegistry) -> None:
    """No write gets in before, so no new registry begins beside what was acknowledged."""
    await registry.commit(
        [create(Tenant("t", 1.0)), create(TenantUsage("t", 1)), create(make_adapter("t", "a"))]
    )
    view = await registry.refresh(RegistryView())
    await registry._connection.client.flushall()
    with pytest.raises(RegistryUnavailableError):
        await registry.commit([create(Tenant("u", 1.0))])
    with pytest.raises(RegistryBehindError):
        await registry.refresh(view)
    restored = await registry.restore(view)
    assert (restored.adapters, restored.tenants) == (view.adapters, view.tenants)
    assert restored.generation > view.generation
    usage = await registry.usage("t")
    assert usage
    assert usage.value.num_adapters == 1
    assert len((await registry.adapters("t", "", 10)).items) == 1


async def test_an_emptied_store_does_not_look_as_if_nothing_had_been_there(registry: RedisRegistry) -> None:
    """Reads say that the registry is away, never that a tenant or adapter is not there."""
    await registry.commit([create(Tenant("t", 1.0)), create(make_adapter("t", "a"))])
    await registry._connection.client.flushall()
    for read in (
        registry.tenant("t"),
        registry.adapter(AdapterName("t", "a")),
        registry.adapters("t", "", 10),
    ):
        with pytest.raises(RegistryUnavailableError):
            await read
    await registry.raise_generation(7)
    assert await registry._connection.client.dbsize() == 0


async def test_what_was_committed_last_is_restored_too(registry: RedisRegistry) -> None:
    """The store is lost right after a commit was answered, before anybody could read it again."""
    mirror = RegistryMirror(registry)
    await mirror.refresh()

    async def attempt() -> tuple[list[Change], None]:
        return [create(Tenant("t", 1.0)), create(make_adapter("t", "a"))], None

    commit = registry.commit

    async def commit_and_lose(changes: Sequence[Change]) -> int:
        generation = await commit(changes)
        await registry._connection.client.flushall()
        return generation

    registry.commit = commit_and_lose  # type: ignore[method-assign]
    await Transactions(registry, mirror).run(attempt)
    await mirror.refresh()
    assert await registry.tenant("t")
    assert set(mirror.view.adapters) == {"t/a"}


async def test_a_store_that_came_back_older_gets_back_what_it_lost(registry: RedisRegistry) -> None:
    """As after a crash of a server that does not sync its log: a deletion too is not undone."""
    client = registry._connection.client
    await registry.commit([create(Tenant("t", 1.0)), create(make_adapter("t", "gone"))])
    older = await _dump(registry)
    stored = await registry.adapter(AdapterName("t", "gone"))
    assert stored
    await registry.commit([delete(stored), create(make_adapter("t", "a"))])
    mirror = RegistryMirror(registry)
    view = await mirror.refresh()
    await client.flushall()
    for key, value in older.items():
        await client.restore(key, 0, value)
    with pytest.raises(
        RegistryUnavailableError
    ):  # a commit on the older state would be lost with the restore
        await registry.commit([create(Tenant("u", 1.0))])
    fresh = await mirror.refresh()
    assert fresh.generation > view.generation
    assert set(fresh.adapters) == {"t/a"}
    assert await registry.adapter(AdapterName("t", "gone")) is None
    assert await registry.adapter(AdapterName("t", "a"))


async def test_the_manager_that_knows_most_completes_the_restore_of_another(server: EmbeddedValkey) -> None:
    """It restored the emptied store without the other's last commits, and went on committing."""
    ahead, behind = (RedisRegistry(RedisConnection(RedisOptions(server.url))) for _ in range(2))
    await ahead.commit(
        [create(Tenant("t", 1.0)), create(make_adapter("t", "gone")), create(make_adapter("t", "b"))]
    )
    mirrors = [RegistryMirror(r) for r in (ahead, behind)]
    for mirror in mirrors:
        await mirror.refresh()
    stored = await ahead.adapter(AdapterName("t", "gone"))
    assert stored
    await ahead.commit([delete(stored), create(make_adapter("t", "a"))])
    await mirrors[0].refresh()
    await ahead._connection.client.flushall()
    assert set((await mirrors[1].refresh()).adapters) == {"t/gone", "t/b"}
    await behind.commit([create(make_adapter("t", "c"))])
    stored = await behind.adapter(AdapterName("t", "b"))
    assert stored
    await behind.commit([delete(stored)])
    for mirror in mirrors:
        await mirror.refresh()
    for mirror in reversed(mirrors):
        assert set((await mirror.refresh()).adapters) == {"t/a", "t/c"}
    for registry in (ahead, behind):
        await registry.close()


async def test_a_manager_follows_one_registry_also_after_a_restart(
    tmp_path: Path, server: EmbeddedValkey
) -> None:
    """Neither an empty store nor another's registry passes for it, until an operator says so."""
    async with AsyncExitStack() as exits:

        def registry(identity: RegistryIdentity | None) -> RedisRegistry:
            made = RedisRegistry(RedisConnection(RedisOptions(server.url)), identity)
            exits.push_async_callback(made.close)
            return made

        def restarted(*, is_adopting: bool = False) -> RedisRegistry:
            return registry(RegistryIdentity(tmp_path / "epoch", is_adopting=is_adopting))

        first = restarted()
        await first.commit([create(Tenant("t", 1.0))])
        await first._connection.client.flushall()
        for _ in range(2):
            again = restarted()
            for call in (
                again.refresh(RegistryView()),
                again.tenant("t"),
                again.tenants("", 10),
                again.commit([create(Tenant("u", 1.0))]),
            ):
                with pytest.raises(RegistryReplacedError, match="--adopt-registry") as caught:
                    await call
                assert caught.value.retry_after_s
            if not await first._connection.client.dbsize():
                await registry(None).commit([create(Tenant("other", 1.0))])
        adopted = restarted(is_adopting=True)
        assert set((await adopted.refresh(RegistryView())).tenants) == {"other"}
        assert set((await restarted().refresh(RegistryView())).tenants) == {"other"}


async def _dump(registry: RedisRegistry) -> dict[bytes, bytes]:
    client = registry._connection.client
    return {key: await client.dump(key) for key in await client.keys("*")}
