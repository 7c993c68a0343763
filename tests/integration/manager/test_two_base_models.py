"""Nodes of several base models behind one manager: an adapter goes to those of its own base alone."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2 as pb
from tests.support.fake_node import FakeNode
from tests.support.lora_schemas import qwen3_moe, schema_of
from tests.support.manager_process import ADAPTERS, FIXTURES, ManagerProcess, failure_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
QWEN, TWIN, LLAMA, NOBODYS = "b" * 64, "0" * 64, "3" * 64, "7" * 64


@dataclass
class World:
    """The manager, and a node of qwen3_moe, of another model of the same shapes, and of llama."""

    manager: ManagerProcess
    qwen: FakeNode
    twin: FakeNode
    llama: FakeNode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """No node shares the store, so that each byte that one gets is sent to it."""
    nodes = [
        FakeNode(schema=schema, base_digest=base, shares_store=False)
        for schema, base in ((qwen3_moe(), QWEN), (qwen3_moe(), TWIN), (schema_of("llama"), LLAMA))
    ]
    for node in nodes:
        await node.start()
    manager = ManagerProcess(tmp_path_factory.mktemp("bases"), nodes)
    try:
        await manager.start()
        await eventually(lambda: all(node.syncs for node in nodes), 60)
        yield World(manager, *nodes)
    finally:
        await manager.stop()
        for node in nodes:
            await node.stop()


def was_told_nothing(node: FakeNode) -> bool:
    """No name, no load, no byte, no probe."""
    return not (node.names() or node.loads or node.streamed or node.probes)


async def test_a_base_that_no_node_serves_is_refused_before_any_byte(world: World) -> None:
    """With the digest that was asked for and those that are there, before a chunk is taken."""
    manager = world.manager
    failure = await failure_of(manager.upload(ADAPTERS / "attn-r8", "demo/none", base_digest=NOBODYS))
    assert (failure.code, failure.reason) == ("FAILED_PRECONDITION", "BASE_MISMATCH")
    assert failure.metadata == {"base_digest": NOBODYS, "served": f"{TWIN}, {LLAMA}, {QWEN}"}
    assert all(digest in failure.message for digest in (NOBODYS, TWIN, LLAMA, QWEN))
    failure = await failure_of(manager.upload(ADAPTERS / "attn-r8", "demo/none", base_digest="../../x"))
    assert (failure.code, failure.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert failure.metadata == {"field": "header.base_digest"}
    assert "header.base_digest is '../../x'; it must be a base model's digest" in failure.message
    assert list((manager.data_dir / "staging").iterdir()) == []


async def test_an_adapter_of_other_shapes_is_refused_by_them(world: World) -> None:
    """Whichever model is named, the files must fit it; the base's name that they record is only a note."""
    upload = world.manager.upload
    wrong = await failure_of(upload(ADAPTERS / "attn-r8", "demo/wrong", base_digest=LLAMA))
    assert (wrong.code, wrong.reason) == ("INVALID_ARGUMENT", "INVALID_ADAPTER")
    llama = FIXTURES / "adapters" / "llama" / "attn-mlp-r16"
    wrong = await failure_of(upload(llama, "demo/wrong", base_digest=QWEN))
    assert wrong.reason == "INVALID_ADAPTER"
    assert wrong.message.startswith("the adapter cannot be served on this base model: the adapter names '")
    assert "' as its base model, this server has '" in wrong.message
    renamed = FIXTURES / "adapters_bad" / "wrong-base-name-only"
    reply = await upload(renamed, "demo/renamed", base_digest=QWEN, validate_only=True)
    (note,) = [w for w in reply.revision.report.warnings if "as its base model" in w]
    assert "all shapes fit" in note
    assert await world.manager.names() == {}


async def test_shapes_alike_digests_apart(world: World) -> None:
    """A model of the same shapes is another base all the same: the digest that the upload names decides."""
    manager, qwen, twin, llama = world.manager, world.qwen, world.twin, world.llama
    reply = await manager.upload(ADAPTERS / "attn-r8", "demo/a", base_digest=QWEN, request_id="r")
    assert reply.revision.base_digest == QWEN
    await eventually(lambda: qwen.names() == {"demo/a": reply.revision.digest}, 60)
    loaded = await manager.call("LoadAdapter", pb.LoadAdapterRequest(name="a"))
    failures = {p.node: p.failure for p in loaded.placements}
    assert failures[qwen.address] == ""
    for node, base in ((twin, TWIN), (llama, LLAMA)):
        assert QWEN in failures[node.address]
        assert base in failures[node.address]
    assert qwen.streamed.keys() == {reply.revision.digest}
    await twin.demand(reply.revision.digest)
    other = await manager.upload(ADAPTERS / "attn-r8", "demo/twin", base_digest=TWIN)
    assert other.revision.digest != reply.revision.digest
    await eventually(lambda: twin.names() == {"demo/twin": other.revision.digest}, 60)
    assert (twin.loads, twin.streamed, twin.probes) == ([], {}, [])
    assert qwen.names() == {"demo/a": reply.revision.digest}
    assert was_told_nothing(llama)
    again = await manager.upload(ADAPTERS / "attn-r8", "demo/a", base_digest=QWEN, request_id="r")
    assert (again.created, again.revision.digest) == (False, reply.revision.digest)
    failure = await failure_of(
        manager.upload(ADAPTERS / "attn-r8", "demo/a", base_digest=TWIN, request_id="r")
    )
    assert failure.reason == "REQUEST_ID_REUSED"
