"""Uploads to the manager as people run it: what is stored, registered and pushed, and what is refused."""

import asyncio
from pathlib import Path

import pytest

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_contract.manifest import Manifest
from tests.support.fake_node import FakeNode
from tests.support.lora_schemas import qwen3_moe
from tests.support.manager_process import (
    ADAPTERS,
    CHUNK_BYTES,
    FIXTURES,
    Managed,
    ManagerProcess,
    failure_of,
    revision_files,
    until_done,
)
from tests.support.uploads import upload_parts
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


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
    """A repeat with a request id ends in the same revision; one with the id and other content is refused."""
    manager, _ = stack
    checked = await manager.upload(ADAPTERS / "attn-r8", "demo/a", validate_only=True, request_id="r")
    assert (checked.created, checked.revision.report.tensors_used > 0) == (False, True)
    assert await manager.names() == {}
    assert revision_files(manager) == set()
    first = await manager.upload(ADAPTERS / "attn-r8", "demo/a", request_id="r")
    assert first.created
    assert first.revision.digest == checked.revision.digest
    repeat = await manager.upload(ADAPTERS / "attn-r8", "demo/a", request_id="r")
    assert (repeat.created, repeat.revision) == (False, first.revision)
    received = await manager.call("GetUpload", pb.GetUploadRequest(adapter="a", request_id="r"))
    assert sum(received.received_bytes.values()) == sum(
        p.stat().st_size for p in (ADAPTERS / "attn-r8").iterdir()
    )
    again = await manager.upload(ADAPTERS / "attn-r8", "demo/a")
    assert (again.created, again.revision.digest) == (False, first.revision.digest)
    failure = await failure_of(manager.upload(ADAPTERS / "attn-r1", "demo/a", request_id="r"))
    assert (failure.code, failure.reason) == ("ALREADY_EXISTS", "REQUEST_ID_REUSED")


@pytest.mark.parametrize("request_id", ["r", "other", ""])
@pytest.mark.parametrize("name", ["payload", "manifest.json"])
@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_repeat_mends_damaged_files(
    stack: Managed, name: str, request_id: str, is_lost: bool
) -> None:
    """No receipt answers for them: GetUpload knows nothing of it, all is taken again, the revision stays."""
    manager, _ = stack
    first = await manager.upload(ADAPTERS / "attn-r8", "demo/a", request_id="r")
    path = manager.data_dir / "artifacts" / "revisions" / first.revision.digest / name
    good = path.read_bytes()
    for _ in range(2):
        if is_lost:
            path.unlink()
        else:
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        asked = manager.call("GetUpload", pb.GetUploadRequest(adapter="a", request_id="r"))
        assert (await failure_of(asked)).code == "NOT_FOUND"
        again = await manager.upload(ADAPTERS / "attn-r8", "demo/a", request_id=request_id)
        assert (again.created, again.revision) == (False, first.revision)
        assert path.read_bytes() == good


async def test_pushing_an_older_revision_again_makes_it_current(stack: Managed) -> None:
    """The name answers with what was pushed last, also where the same upload was made before another one."""
    manager, (node,) = stack
    older = await manager.upload(ADAPTERS / "attn-r8", "demo/a", request_id="older", aliases=["prod"])
    newer = await manager.upload(ADAPTERS / "attn-r1", "demo/a", request_id="newer", aliases=["prod"])
    again = await manager.upload(ADAPTERS / "attn-r8", "demo/a", request_id="older", aliases=["prod"])
    assert (again.created, again.revision.digest) == (False, older.revision.digest)
    adapter = (await manager.call("GetAdapter", pb.GetAdapterRequest(name="a"))).adapter
    assert adapter.current_digest == older.revision.digest != newer.revision.digest
    assert dict(adapter.aliases) == {"prod": older.revision.digest}
    assert {r.digest for r in adapter.revisions} == {older.revision.digest, newer.revision.digest}
    await eventually(lambda: node.names() == {"demo/a": older.revision.digest})


async def test_a_deleted_adapter_is_pushed_again_with_the_same_request_id(stack: Managed) -> None:
    """What was received for it then is gone: GetUpload says so, and the upload begins anew."""
    manager, _ = stack
    first = await manager.upload(ADAPTERS / "attn-r8", "demo/a", request_id="same")
    request = pb.DeleteAdapterRequest(name="tenants/demo/adapters/a")
    await until_done(lambda: manager.call("DeleteAdapter", request))
    failure = await failure_of(manager.call("GetUpload", pb.GetUploadRequest(adapter="a", request_id="same")))
    assert failure.code == "NOT_FOUND"
    again = await manager.upload(ADAPTERS / "attn-r8", "demo/a", request_id="same")
    assert (again.created, again.revision.digest) == (True, first.revision.digest)


async def test_a_broken_upload_goes_on_where_it_stopped_also_after_a_kill(stack: Managed) -> None:
    """GetUpload says where; the result is as if nothing had happened, and nothing stays staged."""
    manager, (node,) = stack
    directory = ADAPTERS / "attn-experts-r16"
    parts = upload_parts(directory, "demo/a", chunk_bytes=CHUNK_BYTES, request_id="r", stop_after=3)
    failure = await failure_of(asyncio.to_thread(manager._blocking, "Upload", parts, None, 20))
    assert failure.code == "INVALID_ARGUMENT"
    await manager.kill()
    await manager.start()
    received = await manager.call("GetUpload", pb.GetUploadRequest(adapter="a", request_id="r"))
    if not received.received_bytes:
        pytest.fail("nothing was kept")
    rest = upload_parts(
        directory, "demo/a", chunk_bytes=CHUNK_BYTES, request_id="r", received=received.received_bytes
    )
    reply = await asyncio.to_thread(manager._blocking, "Upload", rest, None, 20)
    await eventually(lambda: node.names() == {"demo/a": reply.revision.digest}, 10)
    assert list((manager.data_dir / "staging").iterdir()) == []


async def test_a_bad_adapter_is_refused_and_leaves_nothing(stack: Managed) -> None:
    """Neither a record, nor files, nor staged bytes."""
    manager, _ = stack
    failure = await failure_of(manager.upload(FIXTURES / "adapters_bad" / "nan-weights", "demo/a"))
    assert failure.code == "INVALID_ARGUMENT"
    assert await manager.names() == {}
    assert revision_files(manager) == set()
    assert list((manager.data_dir / "staging").iterdir()) == []


async def test_uploads_need_a_node_to_have_been_seen_once(tmp_path: Path) -> None:
    """Before that FAILED_PRECONDITION says what to do; after it the node may be away."""
    node = FakeNode(schema=qwen3_moe())
    await node.start()
    await node.stop()  # a port, but nobody there
    manager = ManagerProcess(tmp_path, [node])
    await manager.start()
    failure = await failure_of(manager.upload(ADAPTERS / "attn-r8", "demo/a"))
    assert (failure.code, failure.reason) == ("FAILED_PRECONDITION", "BASE_MODEL_UNKNOWN")
    assert "--nodes" in failure.message
    await node.start()
    await eventually(lambda: node.syncs, 10)
    await node.stop()
    await manager.kill()
    await manager.start()
    assert (await manager.upload(ADAPTERS / "attn-r8", "demo/a")).created
    loaded = await manager.call("LoadAdapter", pb.LoadAdapterRequest(name="a"))
    assert ["not connected" in p.failure for p in loaded.placements] == [True]
    assert await manager.stop() == 0
