"""What the manager counts is what its clients, its nodes and its store did."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_bench import rigs
from lorikeet_rpc.errors import from_rpc_error
from tests.support.metered_stack import MeteredStack
from tests.support.redis_server import BINARY, RedisServer
from tests.support.scrapes import Scrape
from tests.support.uploads import adapter_files, blocking_upload, upload_parts

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICE = "lorikeet.adapters.v1.AdapterService"
PUSHES = {"SyncCatalog": ("catalog",), "LoadAdapter": ("load", "stream"), "UnloadAdapter": ("unload",)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeteredStack]:
    """A node that takes ranks up to 8."""
    root = tmp_path_factory.mktemp("manager")
    base = rigs.write_copy_base(root / "base")
    async with MeteredStack(base, root / "stack", node_flags=["--max-rank", "8"]) as running:
        yield running


def grown(before: Scrape, after: Scrape, name: str, label: str) -> dict[str, float]:
    """By how much a counter grew, by label, where it did."""
    first, last = before.by(name, label), after.by(name, label)
    return {key: value - first.get(key, 0) for key, value in last.items() if value != first.get(key, 0)}


def num_bytes(directory: Path) -> int:
    """What an upload of it sends."""
    return sum(path.stat().st_size for path in adapter_files(directory))


async def reason_of(stack: MeteredStack, directory: Path, name: str, token: str = "") -> str:
    """How an upload failed, in the manager's own words also where it answers before the last chunk."""
    parts = upload_parts(directory, name)
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(blocking_upload, stack.manager_address, token or stack.token, parts)
    return from_rpc_error(caught.value).reason


def with_config(directory: Path, **changes: object) -> Path:
    """An adapter directory with other settings."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


async def test_uploads_by_result(stack: MeteredStack, tmp_path: Path) -> None:
    """Each upload once, its bytes as far as they came, its stages, its refusal by reason."""
    before = await stack.manager_scrape()
    good = [rigs.write_moe_watermark(tmp_path / f"good{n}", 10 + n) for n in range(2)]
    for index, directory in enumerate(good):
        reply = await stack.upload(directory, f"demo/good{index}")
        assert reply.created
    assert not (await stack.upload(good[0], "demo/good0")).created
    await stack.upload(good[0], "demo/tried", validate_only=True)
    dora = with_config(rigs.write_moe_watermark(tmp_path / "dora", 20), use_dora=True)
    large = with_config(rigs.write_moe_watermark(tmp_path / "large", 20, layout="per-expert"), r=2)
    foreign = rigs.write_moe_watermark(tmp_path / "foreign", 20, rigs.RigShape(intermediate=24))
    reasons = [
        await reason_of(stack, dora, "demo/dora"),
        await reason_of(stack, foreign, "demo/foreign"),
        await reason_of(stack, good[0], "demo/good0", "lk_" + "x" * 43),
        await reason_of(stack, good[0], "demo/UPPER"),
        await reason_of(stack, good[0], "nobody/good0"),
    ]
    await stack.upload(large, "demo/per-expert")
    after = await stack.manager_scrape()
    assert reasons[0] == "UNSUPPORTED_ADAPTER"
    assert reasons[2] == "UNAUTHENTICATED"
    assert grown(before, after, "lorikeet_uploads_rejected_total", "reason") == Counter(reasons)
    results = {"created": 3, "existing": 1, "validated": 1, "rejected": 5}
    assert grown(before, after, "lorikeet_uploads_total", "result") == results
    sent = sum(map(num_bytes, (*good, good[0], good[0], dora, foreign, large)))
    assert after.value("lorikeet_upload_bytes_total") - before.value("lorikeet_upload_bytes_total") == sent
    stages = grown(before, after, "lorikeet_ingest_duration_seconds_count", "stage")
    assert stages == {"verify": 7, "build": 7, "register": 4}
    calls = after.value("lorikeet_rpc_server_duration_seconds_count", method=f"/{SERVICE}/Upload")
    assert calls == sum(after.by("lorikeet_uploads_total", "result").values())


async def test_uploads_of_what_is_there(stack: MeteredStack, tmp_path: Path) -> None:
    """Existing where it is whole, with the same request id or another; mended where it was damaged."""
    directory = rigs.write_moe_watermark(tmp_path / "there", 40)

    async def push(request_id: str) -> pb.UploadResponse:
        parts = upload_parts(directory, "demo/there", request_id=request_id)
        return await asyncio.to_thread(blocking_upload, stack.manager_address, stack.token, parts)

    before = await stack.manager_scrape()
    digest = (await push("there")).revision.digest
    await push("there")
    await push("elsewhere")
    stored = stack.root / "manager" / "artifacts" / "revisions" / digest / "payload"
    stored.write_bytes(bytes(stored.stat().st_size))
    await push("there")
    await push("there")
    after = await stack.manager_scrape()
    results = {"created": 1, "existing": 3, "mended": 1}
    assert grown(before, after, "lorikeet_uploads_total", "result") == results
    sent = after.value("lorikeet_upload_bytes_total") - before.value("lorikeet_upload_bytes_total")
    assert sent == 3 * num_bytes(directory)


async def test_an_upload_that_breaks_off(stack: MeteredStack, tmp_path: Path) -> None:
    """It is counted as interrupted, with the bytes that were taken."""
    directory = rigs.write_moe_watermark(tmp_path / "broken", 30)
    before = await stack.manager_scrape()
    is_over = asyncio.Event()
    sent = list(upload_parts(directory, "demo/broken", chunk_bytes=1 << 12, stop_after=4))
    taken = sum(len(part.chunk.data) for part in sent)

    async def parts() -> AsyncIterator[pb.UploadRequest]:
        for part in sent:
            yield part
        await is_over.wait()

    call = stack.adapters().Upload(parts(), metadata=stack.auth())
    name = "lorikeet_upload_bytes_total"
    await stack.manager_shows(lambda s: s.value(name) - before.value(name) == taken)
    call.cancel()
    is_over.set()
    after = await stack.manager_shows(
        lambda s: grown(before, s, "lorikeet_uploads_total", "result") == {"interrupted": 1}
    )
    assert after.value(name) - before.value(name) == taken
    assert not grown(before, after, "lorikeet_uploads_rejected_total", "reason")


async def test_the_registry_is_counted(stack: MeteredStack, tmp_path: Path) -> None:
    """Tenants, adapters and revisions by state, in all and by tenant, as the API lists them."""
    token = await stack.set_tenant("second")
    for index, name in enumerate(("x", "y", "x")):
        directory = rigs.write_moe_watermark(tmp_path / str(index), 40 + index)
        await stack.upload(directory, f"second/{name}", token=token)
    found = await stack.manager_shows(lambda s: s.value("lorikeet_tenant_adapters", tenant="second") == 2)
    listed = await stack.adapters().ListAdapters(pb.ListAdaptersRequest(), metadata=stack.auth(token))
    revisions = [r for a in listed.adapters for r in a.revisions]
    assert len(revisions) == 3
    assert {state: n for state, n in states(found, "second").items() if n} == {"ready": 3}
    assert found.value("lorikeet_registry_tenants") == 2
    tenants = found.by("lorikeet_tenant_adapters", "tenant")
    assert set(tenants) == {"demo", "second"}
    assert found.value("lorikeet_registry_adapters") == sum(tenants.values())
    all_states = found.by("lorikeet_registry_revisions", "state")
    assert set(all_states) == {"pending", "ready", "failed", "deleting"}
    assert all_states == found.by("lorikeet_tenant_revisions", "state")


def states(found: Scrape, tenant: str) -> dict[str, float]:
    """A tenant's revisions."""
    return {
        dict(labels)["state"]: value
        for labels, value in found.samples("lorikeet_tenant_revisions").items()
        if dict(labels)["tenant"] == tenant
    }


async def test_pushes_are_those_that_the_node_got(stack: MeteredStack, tmp_path: Path) -> None:
    """Loads, unloads and catalogs, the failed ones too, counted on either side."""
    node = stack.node_address
    wanted = rigs.write_moe_watermark(tmp_path / "wanted", 50)
    await stack.upload(wanted, "demo/wanted")
    damaged = await stack.upload(rigs.write_moe_watermark(tmp_path / "damaged", 51), "demo/damaged")
    path = stack.root / "manager" / "artifacts" / "revisions" / damaged.revision.digest / "payload"
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    adapters = stack.adapters()
    for name in ("wanted", "damaged"):
        load = pb.LoadAdapterRequest(name=f"demo/{name}")
        await adapters.LoadAdapter(load, metadata=stack.auth(), timeout=60)
    found = await stack.manager_shows(
        lambda s: s.value("lorikeet_node_observed_revisions", node=node, tier="active") == 1
    )
    assert found.value("lorikeet_node_desired_revisions", node=node, tier="active") == 2
    assert found.value("lorikeet_node_residency_lag", node=node, step="load") == 1
    for name in ("wanted", "damaged"):
        unload = pb.UnloadAdapterRequest(name=f"demo/{name}")
        await adapters.UnloadAdapter(unload, metadata=stack.auth(), timeout=60)
    in_step = {
        "lorikeet_node_connected": 1,
        "lorikeet_node_catalog_lag": 0,
        "lorikeet_node_residency_lag": 0,
        "lorikeet_node_desired_revisions": 0,
    }
    manager = await stack.manager_shows(
        lambda s: in_step == {name: sum(s.samples(name).values()) for name in in_step}
    )
    failures = manager.by("lorikeet_node_push_failures_total", "push")
    assert failures.get("load", 0) + failures.get("stream", 0) >= 1
    async with asyncio.timeout(30):
        # A push may be on its way between the two scrapes.
        while differing(await stack.manager_scrape(), await stack.node_scrape()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def differing(manager: Scrape, node: Scrape) -> set[str]:
    """What manager and node count differently."""
    pushes, failures = (
        manager.by(f"lorikeet_node_{name}_total", "push") for name in ("pushes", "push_failures")
    )
    found = set[str]()
    for method, kinds in PUSHES.items():
        full = f"/lorikeet.residency.v1.ResidencyService/{method}"
        calls = node.by("lorikeet_rpc_server_calls_total", "method").get(full, 0)
        errors = node.by("lorikeet_rpc_server_errors_total", "method").get(full, 0)
        if (calls, errors) != tuple(sum(n.get(kind, 0) for kind in kinds) for n in (pushes, failures)):
            found.add(method)
    generation = "lorikeet_catalog_generation"
    return found | ({generation} if manager.value(generation) != node.value(generation) else set())


async def test_a_node_that_is_away(stack: MeteredStack) -> None:
    """Not connected, and what cannot be known of it is not shown; then it is back."""
    node = stack.node_address
    lags = ("lorikeet_node_catalog_lag", "lorikeet_node_residency_lag", "lorikeet_node_observed_revisions")
    await asyncio.to_thread(stack.node.kill)
    away = await stack.manager_shows(lambda s: s.value("lorikeet_node_connected", node=node) == 0)
    assert {dict(labels)["node"] for labels in away.samples("lorikeet_node_connected")} == {node}
    assert not any(away.samples(name) for name in lags)
    stack.node.start()
    back = await stack.manager_shows(lambda s: s.value("lorikeet_node_connected", node=node) == 1, 60)
    assert all(back.samples(name) for name in lags)


@pytest.mark.skipif(BINARY is None, reason="redis-server is not installed (Debian: redis-server)")
async def test_the_store_goes_and_comes(tmp_path: Path) -> None:
    """Up, away with errors, up again; the registry's counts stay meanwhile."""
    base = rigs.write_copy_base(tmp_path / "base")
    server = RedisServer(tmp_path / "redis")
    await server.start()
    try:
        async with MeteredStack(base, tmp_path / "s", manager_flags=["--redis-url", server.url]) as stack:
            await stack.upload(rigs.write_moe_watermark(tmp_path / "a", 10), "demo/a")
            up = await stack.manager_scrape()
            assert up.value("lorikeet_redis_up") == 1
            assert up.value("lorikeet_redis_reconnects_total") == 0
            assert not up.samples("lorikeet_redis_errors_total")
            commands = up.by("lorikeet_redis_command_duration_seconds_count", "command")
            assert commands["read"] > 0
            assert commands["write"] > 0
            await server.kill()
            away = await stack.manager_shows(lambda s: s.value("lorikeet_redis_up") == 0)
            assert sum(away.samples("lorikeet_redis_errors_total").values()) >= 1
            assert away.value("lorikeet_registry_adapters") == 1
            assert (await stack.generate([1], adapter="demo/a", max_tokens=1)).finish is not None
            await server.start()
            back = await stack.manager_shows(lambda s: s.value("lorikeet_redis_up") == 1)
            assert back.value("lorikeet_redis_reconnects_total") >= 1
            for command, count in commands.items():
                assert back.by("lorikeet_redis_command_duration_seconds_count", "command")[command] >= count
    finally:
        await server.kill()
