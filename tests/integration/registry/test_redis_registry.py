"""The registry on a real server: atomic commits, pages, views, and what happens when the server goes away."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.testing import capture_logs

from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.transactions import Transactions
from adapter_manager.domain.adapter import (
    Adapter,
    DigestUse,
    Revision,
    RevisionState,
    UploadReceipt,
    WantedTier,
)
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.errors import (
    ConcurrentChangeError,
    RegistrySchemaError,
    RegistryUnavailableError,
)
from adapter_manager.domain.node import BaseModel
from adapter_manager.domain.report import MatchedSite, UploadReport
from adapter_manager.domain.revision_report import RevisionReport
from adapter_manager.domain.tenant import Tenant, TenantLimits, TenantUsage, TokenOwner, TokenRecord
from adapter_manager.infra.redis import keys, scripts
from adapter_manager.infra.redis.connection import RedisConnection, RedisOptions
from adapter_manager.infra.redis.embedded import EmbeddedValkey
from adapter_manager.infra.redis.registry import RedisRegistry
from adapter_manager.ports import Change, create, delete, forget, overwrite, update
from lorikeet_contract.names import AdapterName
from lorikeet_contract.schema import LoraSchema
from tests.support.lora_schemas import linear
from tests.support.waiting import eventually

DIGEST = "d" * 64


def make_adapter(tenant: str, adapter: str) -> Adapter:
    """An adapter with a revision in each state's fields."""
    revision = Revision(DIGEST, RevisionState.READY, 1.5, 10, "float32", 8, "b" * 64, wanted=WantedTier.HOST)
    return Adapter(tenant, adapter, 1.0, 2.25, (revision,), (("prod", DIGEST),), is_pinned=True)


async def test_every_record_comes_back_as_it_was(registry: RedisRegistry) -> None:
    """All kinds, all fields."""
    token = TokenRecord("id", "5" * 64, is_admin=True, create_time_s=3.0)
    tenant = Tenant("t", 1.0, TenantLimits(2.5, 1, None, 7), (token,), "r")
    site = MatchedSite("q", None, 4, (1.0, 0.5), "linear", 2, 99)
    report = RevisionReport("t", "a", DIGEST, UploadReport(2, 1, 1, (site,), ("careful",)))
    receipt = UploadReceipt("t", "r\u00e9", "a", "f", (("x", 5),), DIGEST, create_time_s=4.0)
    use = DigestUse(DIGEST, ("t/a", "u/b"), "m", 5.0)
    model = BaseModel("m", "M", "b" * 64, "bfloat16", 64, LoraSchema(1, (linear("q", 0, 4, 8, "x.q"),)), 6.0)
    owner = TokenOwner("5" * 64, "t", "id", is_admin=True)
    usage, adapter = TenantUsage("t", 3), make_adapter("t", "a")
    await registry.commit(
        [create(r) for r in (tenant, usage, owner, adapter, use, model, report)] + [overwrite(receipt, 60)]
    )
    name = AdapterName("t", "a")
    read = [
        await registry.tenant("t"),
        await registry.usage("t"),
        await registry.token("5" * 64),
        await registry.adapter(name),
        await registry.use(DIGEST),
        await registry.report(name, DIGEST),
        await registry.receipt("t", "r\u00e9"),
    ]
    assert [r.value for r in read if r] == [tenant, usage, owner, adapter, use, report, receipt]
    view = await registry.refresh(RegistryView())
    assert view.tenants == {"t": tenant}
    assert view.tokens == {"5" * 64: owner}
    assert view.adapters == {"t/a": adapter}
    assert view.uses == {DIGEST: use}
    assert view.models == {"b" * 64: model}


async def test_a_commit_is_all_or_nothing(registry: RedisRegistry) -> None:
    """One expectation that fails keeps everything as it was, the generation too."""
    await registry.commit([create(Tenant("t", 1.0))])
    before = await registry.refresh(RegistryView())
    with pytest.raises(ConcurrentChangeError):
        await registry.commit(
            [create(TenantUsage("t")), overwrite(Tenant("u", 1.0)), create(Tenant("t", 2.0))]
        )
    assert await registry.refresh(before) is before
    assert await registry.usage("t") is None


async def test_etags_change_with_every_write_and_stale_ones_fail(registry: RedisRegistry) -> None:
    """Also when the content is written unchanged, and after delete and create."""
    await registry.commit([create(Tenant("t", 1.0))])
    first = await registry.tenant("t")
    assert first
    await registry.commit([update(first, first.value)])
    second = await registry.tenant("t")
    assert second
    assert second.etag != first.etag
    for stale in (update(first, first.value), delete(first)):
        with pytest.raises(ConcurrentChangeError):
            await registry.commit([stale])
    await registry.commit([delete(second)])
    await registry.commit([create(Tenant("t", 1.0))])
    with pytest.raises(ConcurrentChangeError):
        await registry.commit([delete(second)])


async def test_concurrent_transactions_lose_no_update(server: EmbeddedValkey) -> None:
    """Forty increments over two connections count to forty."""
    registries = [RedisRegistry(RedisConnection(RedisOptions(server.url))) for _ in range(2)]
    await registries[0].commit([create(TenantUsage("t"))])

    async def increment(registry: RedisRegistry) -> None:
        async def attempt() -> tuple[list[Change], None]:
            stored = await registry.usage("t")
            assert stored
            return [update(stored, TenantUsage("t", stored.value.num_adapters + 1))], None

        transactions = Transactions(registry, RegistryMirror(registry))
        for _ in range(4):
            try:
                await transactions.run(attempt)
            except ConcurrentChangeError:
                continue
            return
        raise AssertionError("never got through")

    await asyncio.gather(*(increment(registries[i % 2]) for i in range(40)))
    stored = await registries[0].usage("t")
    assert stored
    assert stored.value.num_adapters == 40
    for registry in registries:
        await registry.close()


async def test_pages_cover_one_tenant_exactly(registry: RedisRegistry) -> None:
    """Neighbours whose names begin alike are not in the way, and every adapter comes once."""
    names = [("a", f"x{i}") for i in range(5)] + [("a-b", "x"), ("a.b", "x"), ("ab", "x"), ("a0", "x")]
    await registry.commit([create(make_adapter(*n)) for n in names])

    async def walk(tenant: str | None) -> list[str]:
        found: list[str] = []
        after = ""
        while True:
            page = await registry.adapters(tenant, after, 2)
            found += [item.value.name.short for item in page.items]
            if not page.next_after:
                return found
            after = page.next_after

    assert await walk("a") == [f"a/x{i}" for i in range(5)]
    assert sorted(await walk(None)) == sorted(f"{t}/{a}" for t, a in names)
    assert await walk("nobody") == []


async def test_a_view_follows_changes_without_reading_all(registry: RedisRegistry) -> None:
    """Put, change and delete; an unchanged registry gives the same view."""
    await registry.commit([create(make_adapter("t", str(i))) for i in range(1200)])
    view = await registry.refresh(RegistryView())
    assert len(view.adapters) == 1200
    stored = await registry.adapter(AdapterName("t", "7"))
    assert stored
    await registry.commit([delete(stored), create(Tenant("t", 1.0))])
    commands_before = await _num_commands(registry)
    fresh = await registry.refresh(view)
    assert (await _num_commands(registry)) - commands_before < 12
    assert (len(fresh.adapters), list(fresh.tenants)) == (1199, ["t"])
    assert await registry.refresh(fresh) is fresh
    assert "t/7" in view.adapters  # who held the old view still has it


async def test_a_reader_that_is_far_behind_reads_everything(
    registry: RedisRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change log is cut; the generation tells that it does not reach back far enough."""
    await registry.commit([create(Tenant("old", 1.0))])
    view = await registry.refresh(RegistryView())
    monkeypatch.setattr(scripts, "CHANGES_KEPT", 1)
    await registry.commit([forget(Tenant("old", 1.0))])
    await registry.commit([create(Tenant("new", 1.0))])
    client = registry._connection.client
    await client.delete(keys.CHANGES)
    assert list((await registry.refresh(view)).tenants) == ["new"]


async def test_records_of_a_newer_version_and_edited_ones_are_refused(registry: RedisRegistry) -> None:
    """Never guessed at."""
    await registry.commit([create(Tenant("t", 1.0))])
    client = registry._connection.client
    key = keys.record_key(keys.tenant_id("t"))
    raw = await client.get(key)
    assert isinstance(raw, bytes)
    for changed in (raw.replace(b'"schema":1', b'"schema":2'), b"edited by hand"):
        await client.set(key, changed)
        with pytest.raises(RegistrySchemaError):
            await registry.tenant("t")


async def test_acknowledged_writes_survive_kill_9(server: EmbeddedValkey, registry: RedisRegistry) -> None:
    """Killed in the middle of writes, the server comes back with every acknowledged one."""
    acknowledged: list[str] = []

    async def write() -> None:
        for number in range(10_000):
            try:
                await registry.commit([create(Tenant(f"t{number}", 1.0))])
            except RegistryUnavailableError:
                return
            acknowledged.append(f"t{number}")

    writing = asyncio.create_task(write())
    await eventually(lambda: len(acknowledged) >= 50)
    assert server.pid
    os.kill(server.pid, signal.SIGKILL)
    await writing
    view = await _refreshed(registry)
    assert set(acknowledged) <= set(view.tenants)
    assert len(view.tenants) <= len(acknowledged) + 1  # the one whose answer was lost may be there


async def test_the_generation_can_be_raised_but_not_lowered(registry: RedisRegistry) -> None:
    """A node that has a later catalog than a restored registry accepts the next one."""
    await registry.commit([create(Tenant("t", 1.0))])
    await registry.raise_generation(500)
    assert (await registry.refresh(RegistryView())).generation == 501
    await registry.raise_generation(3)
    assert await registry.commit([create(Tenant("u", 1.0))]) == 502


@pytest.fixture
async def black_hole() -> AsyncIterator[str]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"


async def test_the_end_of_an_outage_is_no_line_of_the_call_that_noticed_it(
    server: EmbeddedValkey, registry: RedisRegistry
) -> None:
    """`redis.recovered` has neither request nor tenant, though a call's task logs it."""
    with capture_logs([merge_contextvars]) as lines, bound_contextvars(request_id="r-1", tenant="t"):
        await server.stop()
        with pytest.raises(RegistryUnavailableError):
            await registry.tenant("t")
        await server.start()
        await registry.tenant("t")
    found = {line["event"]: line for line in lines}
    assert found["redis.unavailable"]["request_id"] == "r-1"
    assert found["redis.recovered"] == {"event": "redis.recovered", "log_level": "info"}


async def test_a_server_that_never_answers_fails_in_bounded_time(black_hole: str) -> None:
    """With UNAVAILABLE and a time to try again, reads and writes alike."""
    registry = RedisRegistry(RedisConnection(RedisOptions(black_hole, timeout_s=0.3)))
    loop = asyncio.get_running_loop()
    for call in (registry.tenant("t"), registry.commit([create(Tenant("t", 1.0))])):
        began_s = loop.time()
        with pytest.raises(RegistryUnavailableError) as caught:
            await call
        assert caught.value.retry_after_s
        assert loop.time() - began_s < 3
    await registry.close()


class Failures:
    """A store observer that keeps what was tried and failed."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def answered(self, command: str, seconds: float) -> None:
        """See ports.StoreObserver."""

    def failed(self, error: str) -> None:
        """See ports.StoreObserver."""
        self.errors.append(error)


async def test_one_call_waits_for_a_server_that_hangs_and_no_other_does(server: EmbeddedValkey) -> None:
    """Calls after the first one that got no answer do not even try, until the server was heard again."""
    failures = Failures()
    registry = RedisRegistry(RedisConnection(RedisOptions(server.url, timeout_s=0.3), failures))
    await registry.commit([create(Tenant("t", 1.0))])
    assert server.pid
    os.kill(server.pid, signal.SIGSTOP)
    for number in range(10):
        with pytest.raises(RegistryUnavailableError):
            await registry.tenant("t")
        with pytest.raises(RegistryUnavailableError):
            await registry.commit([create(Tenant(f"n{number}", 1.0))])
    assert failures.errors == ["TimeoutError"]
    with capture_logs() as lines:
        os.kill(server.pid, signal.SIGCONT)
        await _refreshed(registry)
    assert await registry.tenant("t")
    assert [line["event"] for line in lines] == ["redis.recovered"]
    await registry.close()


async def test_calls_that_queue_for_a_server_that_hangs_wait_once(black_hole: str) -> None:
    """Twenty at once, before it was ever seen: one of them asks for all."""
    failures = Failures()
    registry = RedisRegistry(RedisConnection(RedisOptions(black_hole, timeout_s=0.3), failures))
    outcomes = await asyncio.gather(*(registry.tenant("t") for _ in range(20)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {RegistryUnavailableError}
    assert failures.errors == ["TimeoutError"]
    await registry.close()


async def test_a_server_that_is_not_durable_is_warned_about(tmp_path: Path, server: EmbeddedValkey) -> None:
    """Synced every second: each write waits for the disk (WAITAOF); without a log there is only a warning."""
    connection = RedisConnection(RedisOptions(server.url))
    registry = RedisRegistry(connection)
    await connection.client.config_set("appendfsync", "everysec")
    with capture_logs() as logs:
        await registry.commit([create(Tenant("t", 1.0))])
    assert connection._waits_for_disk
    assert not [e for e in logs if e["event"] == "redis.not_durable"]
    await registry.close()

    connection = RedisConnection(RedisOptions(server.url))
    await connection.client.config_set("appendonly", "no")
    await connection.client.config_set("maxmemory-policy", "allkeys-lru")
    registry = RedisRegistry(connection)
    with capture_logs() as logs:
        await registry.commit([create(Tenant("u", 1.0))])
    assert {"redis.not_durable", "redis.may_evict"} <= {e["event"] for e in logs}
    await registry.close()


async def test_a_read_only_server_is_unavailable_for_writes(registry: RedisRegistry) -> None:
    """A replica after a failover; reads go on, and so do writes once it is a primary."""
    await registry.commit([create(Tenant("t", 1.0))])
    client = registry._connection.client
    await client.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(RegistryUnavailableError):
        await registry.commit([create(Tenant("u", 1.0))])
    await client.execute_command("REPLICAOF", "NO", "ONE")
    await registry.commit([create(Tenant("u", 1.0))])


async def _refreshed(registry: RedisRegistry) -> RegistryView:
    for _ in range(200):
        try:
            return await registry.refresh(RegistryView())
        except RegistryUnavailableError:
            await asyncio.sleep(0.05)
    raise AssertionError("the server did not come back")


async def _num_commands(registry: RedisRegistry) -> int:
    info = await registry._connection.client.info("stats")
    return int(info["total_commands_processed"])
