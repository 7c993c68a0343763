"""The manager as people run it: uploads, tenants, restarts, kills, and what each caller is told."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet.adapters.v1 import tenant_pb2
from lorikeet_contract.manifest import Manifest
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.fake_node import FakeNode
from tests.support.manager_process import ManagerProcess, managed, upload_parts
from tests.support.waiting import eventually

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ADAPTERS = FIXTURES / "adapters" / "qwen3_moe"
BAD_NAMES = json.loads((FIXTURES / "adapters_bad" / "bad_names.json").read_text())["names"]

Managed = tuple[ManagerProcess, list[FakeNode]]


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Managed]:
    """A manager whose one node is connected."""
    async with managed(tmp_path) as (manager, nodes):
        await eventually(lambda: nodes[0].syncs, 10)
        yield manager, nodes


async def failure_of(call: object) -> RpcFailure:
    """How a call failed."""
    with pytest.raises(grpc.RpcError) as caught:
        await call  # pyright: ignore[reportGeneralTypeIssues]
    return from_rpc_error(caught.value)


def revision_files(manager: ManagerProcess) -> set[str]:
    """Digests in the local artifact store."""
    folder = manager.data_dir / "artifacts" / "revisions"
    return {p.parent.name for p in folder.glob("*/payload")} if folder.exists() else set()


async def test_an_upload_becomes_a_stored_registered_and_pushed_revision(stack: Managed) -> None:
    """Reply, list, store, node and report say the same."""
    manager, (node,) = stack
    reply = await manager.upload(ADAPTERS / "attn-experts-r16", "demo/a", aliases=["prod"])
    assert reply.created
    assert reply.revision.state == pb.REVISION_STATE_READY
    assert reply.revision.name == f"tenants/demo/adapters/a/revisions/{reply.revision.digest}"
    assert reply.revision.max_rank == 16
    report = reply.revision.report
    assert report.tensors_used + report.tensors_neutral == report.tensors_total > 0
    adapter = (await manager.call("GetAdapter", pb.GetAdapterRequest(name="a"))).adapter
    assert adapter.current_digest == reply.revision.digest
    assert dict(adapter.aliases) == {"prod": reply.revision.digest}
    assert adapter.revisions[0].report == report
    folder = manager.data_dir / "artifacts" / "revisions" / reply.revision.digest
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
    assert manifest.digest == reply.revision.digest
    assert (folder / "payload").stat().st_size == manifest.payload_bytes == reply.revision.payload_bytes
    await eventually(lambda: node.names() == {"demo/a": reply.revision.digest})
    loaded = await manager.call("LoadAdapter", pb.LoadAdapterRequest(name="a@prod"))
    assert [(p.state, p.failure) for p in loaded.placements] == [(pb.RESIDENCY_STATE_ACTIVE, "")]
    assert node.streamed == {}  # read from the shared directory
    placed = await manager.call("GetPlacement", pb.GetPlacementRequest())
    assert list(placed.placements) == list(loaded.placements)


async def test_the_same_content_is_created_once_and_validate_only_stores_nothing(stack: Managed) -> None:
    """A repeat with a request id gets the first answer; one with the id and other content is refused."""
    manager, _ = stack
    checked = await manager.upload(ADAPTERS / "attn-r8", "demo/a", validate_only=True, request_id="r")
    assert (checked.created, checked.revision.report.tensors_used > 0) == (False, True)
    assert await manager.names() == {}
    assert revision_files(manager) == set()
    first = await manager.upload(ADAPTERS / "attn-r8", "demo/a", request_id="r")
    assert first.created
    assert first.revision.digest == checked.revision.digest
    assert await manager.upload(ADAPTERS / "attn-r8", "demo/a", request_id="r") == first
    received = await manager.call("GetUpload", pb.GetUploadRequest(adapter="a", request_id="r"))
    assert sum(received.received_bytes.values()) == sum(
        p.stat().st_size for p in (ADAPTERS / "attn-r8").iterdir()
    )
    again = await manager.upload(ADAPTERS / "attn-r8", "demo/a")
    assert (again.created, again.revision.digest) == (False, first.revision.digest)
    failure = await failure_of(manager.upload(ADAPTERS / "attn-r1", "demo/a", request_id="r"))
    assert (failure.code, failure.reason) == ("ALREADY_EXISTS", "REQUEST_ID_REUSED")


async def test_a_broken_upload_goes_on_where_it_stopped_also_after_a_kill(stack: Managed) -> None:
    """GetUpload says where; the result is as if nothing had happened, and nothing stays staged."""
    manager, (node,) = stack
    directory = ADAPTERS / "attn-experts-r16"
    parts = upload_parts(directory, "demo/a", request_id="r", stop_after=3)
    failure = await failure_of(asyncio.to_thread(manager._blocking, "Upload", parts, None, 20))
    assert failure.code == "INVALID_ARGUMENT"
    await manager.kill()
    await manager.start()
    received = await manager.call("GetUpload", pb.GetUploadRequest(adapter="a", request_id="r"))
    if not received.received_bytes:
        pytest.fail("nothing was kept")
    rest = upload_parts(directory, "demo/a", request_id="r", received=received.received_bytes)
    reply = await asyncio.to_thread(manager._blocking, "Upload", rest, None, 20)
    await eventually(lambda: node.names() == {"demo/a": reply.revision.digest}, 10)
    assert list((manager.data_dir / "staging").iterdir()) == []


async def test_acknowledged_registrations_survive_kills_of_manager_store_and_node(tmp_path: Path) -> None:
    """The list equals the journal after each, on the manager and on two nodes."""
    async with managed(tmp_path, num_nodes=2) as (manager, nodes):
        await eventually(lambda: all(n.syncs for n in nodes), 10)
        journal: dict[str, str] = {}
        for name in ("attn-r1", "attn-r8", "experts-r4"):
            reply = await manager.upload(ADAPTERS / name, f"demo/{name}")
            journal[f"tenants/demo/adapters/{name}"] = reply.revision.digest
        short = {name.replace("tenants/", "").replace("/adapters/", "/"): d for name, d in journal.items()}

        await manager.kill()
        await manager.start()
        assert await manager.names() == journal

        (store,) = [p for p in psutil.Process(_pid(manager)).children() if "valkey" in p.name()]
        os.kill(store.pid, signal.SIGKILL)
        assert await manager.names() == journal  # from memory until it is back

        await nodes[0].restart()
        await eventually(lambda: all(n.names() == short for n in nodes), 10)

        await _until_done(lambda: manager.call("DeleteAdapter", pb.DeleteAdapterRequest(name="attn-r1")))
        del journal["tenants/demo/adapters/attn-r1"], short["demo/attn-r1"]
        assert await manager.names() == journal
        await eventually(lambda: all(n.names() == short for n in nodes), 10)
        assert revision_files(manager) == set(journal.values())


async def test_uploads_need_a_node_to_have_been_seen_once(tmp_path: Path) -> None:
    """Before that FAILED_PRECONDITION says what to do; after it the node may be away."""
    node = FakeNode()
    await node.start()
    await node.stop()  # a port, but nobody there
    manager = ManagerProcess(tmp_path, [node])
    await manager.start()
    failure = await failure_of(manager.upload(ADAPTERS / "attn-r8", "demo/a"))
    assert (failure.code, failure.reason) == ("FAILED_PRECONDITION", "BASE_MODEL_UNKNOWN")
    assert "--nodes" in failure.message
    assert await manager.stop() == 0
    async with managed(tmp_path / "seen") as (manager, (seen,)):
        await eventually(lambda: seen.syncs, 10)
        await seen.stop()
        await manager.kill()
        await manager.start()
        assert (await manager.upload(ADAPTERS / "attn-r8", "demo/a")).created
        loaded = await manager.call("LoadAdapter", pb.LoadAdapterRequest(name="a"))
        assert ["not connected" in p.failure for p in loaded.placements] == [True]


async def test_tenants_are_kept_apart(stack: Managed) -> None:
    """Another tenant's names are NOT_FOUND in every call, and tenants cannot manage tenants."""
    manager, _ = stack
    other = await manager.tenant("other")
    mine = await manager.upload(ADAPTERS / "attn-r8", "demo/a")
    theirs = await manager.upload(ADAPTERS / "attn-r8", "other/a", token=other)
    assert mine.created
    assert theirs.created
    assert len(revision_files(manager)) == 1
    for method, request in (
        ("GetAdapter", pb.GetAdapterRequest(name="demo/a")),
        ("DeleteAdapter", pb.DeleteAdapterRequest(name="demo/a")),
        ("PinAdapter", pb.PinAdapterRequest(name="demo/a", pinned=True)),
        ("SetAlias", pb.SetAliasRequest(name="demo/a", alias="x", digest=mine.revision.digest)),
        ("LoadAdapter", pb.LoadAdapterRequest(name="demo/a")),
        ("UnloadAdapter", pb.UnloadAdapterRequest(name="demo/a")),
        ("GetPlacement", pb.GetPlacementRequest(name="demo/a")),
        ("GetUpload", pb.GetUploadRequest(adapter="demo/a", request_id="r")),
        ("ListAdapters", pb.ListAdaptersRequest(parent="tenants/demo")),
    ):
        failure = await failure_of(manager.call(method, request, token=other))
        assert failure.code == "NOT_FOUND", method
    assert (await failure_of(manager.upload(ADAPTERS / "attn-r8", "demo/b", token=other))).code == "NOT_FOUND"
    assert await manager.names(other) == {"tenants/other/adapters/a": theirs.revision.digest}
    assert len(await manager.names()) == 2  # the bootstrap token is an admin's
    failure = await failure_of(manager.call("ListTenants", tenant_pb2.ListTenantsRequest(), token=other))
    assert failure.code == "PERMISSION_DENIED"
    failure = await failure_of(manager.call("ListAdapters", pb.ListAdaptersRequest(), token="lk_wrong"))
    assert failure.code == "UNAUTHENTICATED"


@pytest.mark.parametrize("method", ["GetAdapter", "Upload"])
async def test_hostile_names_get_a_client_error(stack: Managed, method: str) -> None:
    """Never INTERNAL, and nothing is written outside the data directory."""
    manager, _ = stack
    before = set(manager.data_dir.parent.iterdir())
    for name in BAD_NAMES:
        if method == "Upload":
            parts = iter([pb.UploadRequest(header=pb.UploadHeader(adapter=name))])
            failure = await failure_of(asyncio.to_thread(manager._blocking, "Upload", parts, None, 20))
        else:
            failure = await failure_of(manager.call("GetAdapter", pb.GetAdapterRequest(name=name)))
        assert failure.code in {"INVALID_ARGUMENT", "NOT_FOUND"}, name
        assert "\n" not in failure.message
    assert set(manager.data_dir.parent.iterdir()) == before


async def test_a_bad_adapter_is_refused_and_leaves_nothing(stack: Managed) -> None:
    """Neither a record, nor files, nor staged bytes."""
    manager, _ = stack
    failure = await failure_of(manager.upload(FIXTURES / "adapters_bad" / "nan-weights", "demo/a"))
    assert failure.code == "INVALID_ARGUMENT"
    assert await manager.names() == {}
    assert revision_files(manager) == set()
    assert list((manager.data_dir / "staging").iterdir()) == []


async def test_reads_go_on_and_writes_are_refused_while_the_store_is_away(stack: Managed) -> None:
    """Stopped, not killed: connections hang. Writes get UNAVAILABLE with RetryInfo, and work again after."""
    manager, (node,) = stack
    reply = await manager.upload(ADAPTERS / "attn-r8", "demo/a")
    await eventually(node.names)
    (store,) = [p for p in psutil.Process(_pid(manager)).children() if "valkey" in p.name()]
    store.suspend()
    try:
        adapter = (await manager.call("GetAdapter", pb.GetAdapterRequest(name="a"))).adapter
        assert adapter.current_digest == reply.revision.digest
        pin = pb.PinAdapterRequest(name="a", pinned=True)
        failure = await failure_of(manager.call("PinAdapter", pin))
        assert (failure.code, failure.reason) == ("UNAVAILABLE", "REGISTRY_UNAVAILABLE")
        assert failure.retry_after_s
        assert node.names() == {"demo/a": reply.revision.digest}
    finally:
        store.resume()
    await _until_done(lambda: manager.call("PinAdapter", pin))
    assert (await manager.call("GetAdapter", pb.GetAdapterRequest(name="a"))).adapter.pinned


async def test_a_second_manager_on_the_same_directory_says_who_is_in_the_way(
    stack: Managed, tmp_path: Path
) -> None:
    """Exit code 1, one line, no traceback; the first goes on."""
    manager, nodes = stack
    second = ManagerProcess(tmp_path, nodes)
    second.process.log = tmp_path / "second.log"
    second.process.start()
    assert second.process.popen
    assert await asyncio.to_thread(second.process.popen.wait, 20) == 1
    text = second.process.log.read_text()
    assert str(_pid(manager)) in text
    assert "Traceback" not in text
    assert await manager.names() == {}


async def test_it_stops_in_order_and_keeps_its_token(stack: Managed) -> None:
    """Exit code 0, the store's process gone, the same bootstrap token after the next start."""
    manager, _ = stack
    token = manager.token
    children = psutil.Process(_pid(manager)).children()
    assert await manager.stop() == 0
    assert not any(child.is_running() for child in children)
    await manager.start()
    assert manager.token == token
    assert await manager.names() == {}


def _pid(manager: ManagerProcess) -> int:
    assert manager.process.popen
    return manager.process.popen.pid


async def _until_done(call: object, timeout_s: float = 15) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while True:
        try:
            await call()  # pyright: ignore[reportCallIssue]
        except grpc.RpcError as error:
            assert from_rpc_error(error).code == "UNAVAILABLE"
            assert loop.time() < end_s
            await asyncio.sleep(0.1)
        else:
            return
