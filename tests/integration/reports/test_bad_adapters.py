"""A registered adapter that cannot be loaded fails its own requests, and nothing else.

Sources: vllm-project/vllm#11727, #13698, kubernetes-sigs/gateway-api-inference-extension#584.
"""

import asyncio
import dataclasses
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from adapter_manager.application.ingest import IngestTarget, ingest_directory
from lorikeet_bench import rigs
from lorikeet_contract.manifest import PayloadLayer
from lorikeet_rpc.errors import from_rpc_error
from lorikeet_rpc.schema_message import schema_from_message
from tests.support.lone_node import LoneNode, Revision, lone_node
from tests.support.steady_clients import SteadyStreams

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_RANK = 8
STEADY: dict[str | None, int] = {"demo/a": 11, "demo/b": 22}


@dataclasses.dataclass
class World:
    """A node that serves a and b, and a revision to spoil."""

    node: LoneNode
    root: Path
    good: Revision
    num_good: int = 0

    async def answers_a_new_one(self) -> None:
        """A good adapter that the node has never seen loads and answers."""
        self.num_good += 1
        revision = self.good.numbered(self.num_good)
        self.node.put(revision)
        self.node.names["good"] = revision
        await self.node.sync()
        done = await self.node.stack.generate([5], adapter="demo/good", max_tokens=4)
        assert done.token_ids == [33] * 4
        assert done.finish is not None
        assert done.finish.adapter.digest == revision.digest


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Four slots and a low rank limit."""
    root = tmp_path_factory.mktemp("bad-adapters")
    flags = ["--max-active-adapters", "4", "--max-rank", str(MAX_RANK)]
    async with lone_node(rigs.write_copy_base(root / "base"), root, flags) as node:
        for name, token in (("a", 11), ("b", 22)):
            node.names[name] = node.ingested(rigs.write_moe_watermark(root / name, token))
            node.put(node.names[name])
        good = node.ingested(rigs.write_moe_watermark(root / "good", 33))
        yield World(node, root, good)


def spoiled_files(harm: Callable[[Path], object]) -> Callable[[World, int], Revision]:
    """Registered whole, its files harmed afterwards."""

    def make(world: World, number: int) -> Revision:
        revision = world.good.numbered(number)
        harm(world.node.put(revision))
        return revision

    return make


def spoiled_manifest(**fields: Any) -> Callable[[World, int], Revision]:
    """Consistent with its digest, but it says what cannot be."""

    def make(world: World, number: int) -> Revision:
        revision = world.good.numbered(number).changed(**fields)
        world.node.put(revision)
        return revision

    return make


def spoiled_site(**fields: Any) -> Callable[[World, int], Revision]:
    """The same for the last site of the first layer."""

    def make(world: World, number: int) -> Revision:
        first, *rest = world.good.numbered(number).manifest.layers
        site = dataclasses.replace(first.sites[-1], **fields)
        layer = dataclasses.replace(first, sites=(*first.sites[:-1], site))
        revision = world.good.numbered(number).changed(layers=(layer, *rest))
        world.node.put(revision)
        return revision

    return make


def document(data: Callable[[dict[str, Any]], object]) -> Callable[[World, int], Revision]:
    """A manifest that is none, or not of a known form."""

    def make(world: World, number: int) -> Revision:
        revision = world.good.numbered(number)
        content = data(json.loads(revision.document))
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        revision = dataclasses.replace(revision, document=text)
        world.node.put(revision)
        return revision

    return make


def over_the_rank_limit(world: World, number: int) -> Revision:
    """Twice the node's maximum."""
    rank, rng = 2 * MAX_RANK, np.random.default_rng(number)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora_{side}.weight": rng.standard_normal(
            shape
        )
        for layer in range(2)
        for side, shape in (("A", (rank, 64)), ("B", (64, rank)))
    }
    path = rigs.write_adapter(
        world.root / f"rank-{number}", tensors, r=rank, alpha=rank, target_modules=["v_proj"]
    )
    revision = world.node.ingested(path)
    world.node.put(revision)
    return revision


def of_another_model(world: World, number: int, **claims: str) -> Revision:
    """Twice as wide; with `claims` it says that it was made for this one."""
    shape = rigs.RigShape(vocab=128)
    schema = json.loads(schema_from_message(world.node.model.lora_schema).to_json())
    for site in schema["sites"]:
        site["in_features"] *= 2 if site["in_features"] == 64 else 1
        if site["out_features"] == 64:
            site["out_features"] = 128
            site["slices"][0]["out_features"] = 128
    wide = type(schema_from_message(world.node.model.lora_schema)).from_json(json.dumps(schema).encode())
    directory = rigs.write_moe_watermark(world.root / f"wide-{number}", 33, shape)
    built = ingest_directory(directory, IngestTarget(wide, "f" * 64), directory / "payload")
    revision = Revision(built.manifest.to_json(), built.payload_path.read_bytes()).changed(**claims)
    world.node.put(revision)
    return revision


def disguised(world: World, number: int) -> Revision:
    """Of another model, though it says that it is of this one."""
    mine = world.good.manifest
    return of_another_model(world, number, base_digest=mine.base_digest, schema_digest=mine.schema_digest)


def with_nan(world: World, number: int) -> Revision:
    """A weight that is no number, with the right checksum."""
    revision = world.good.numbered(number)
    payload = bytearray(revision.payload)
    payload[:4] = np.float32(np.nan).tobytes()
    revision = revision.with_payload(bytes(payload))
    world.node.put(revision)
    return revision


def beyond_the_payload(world: World, number: int) -> Revision:
    """A layer that would reach far beyond the file."""
    last: PayloadLayer = world.good.numbered(number).manifest.layers[-1]
    far = dataclasses.replace(last, num_bytes=1 << 50)
    revision = world.good.numbered(number).changed(layers=(far,))
    world.node.put(revision)
    return revision


BAD: dict[str, Callable[[World, int], Revision]] = {
    "files deleted": spoiled_files(shutil.rmtree),
    "payload deleted": spoiled_files(lambda d: (d / "payload").unlink()),
    "payload truncated": spoiled_files(lambda d: (d / "payload").write_bytes(b"x" * 1000)),
    "payload zeroed": spoiled_files(lambda d: (d / "payload").write_bytes(bytes(90112))),
    "manifest deleted": spoiled_files(lambda d: (d / "manifest.json").unlink()),
    "rank over the maximum": over_the_rank_limit,
    "another base": of_another_model,
    "shapes of another model": disguised,
    "unknown site": spoiled_site(key="nonsense"),
    "unknown rank": spoiled_site(rank=3000000),
    "rank that is no number": spoiled_site(rank="two"),
    "scales that do not fit": spoiled_site(scales=(1.0, 2.0, 3.0, 4.0, 5.0)),
    "infinite scale": document(lambda m: _set_scale(m, float("inf"))),
    "not a number": with_nan,
    "range beyond the payload": beyond_the_payload,
    "other payload size": spoiled_manifest(payload_bytes=17),
    "no JSON": document(lambda m: b"\x80\x04pickle" + json.dumps(m).encode()),
    "JSON of another kind": document(lambda m: [m]),
    "unknown format": document(lambda m: m | {"format": "lorikeet-adapter/99"}),
    "fields missing": document(lambda m: {k: v for k, v in m.items() if k != "layers"}),
    "nested too deep": document(lambda m: b"[" * 100_000 + json.dumps(m).encode()),
}


def _set_scale(manifest: dict[str, Any], scale: float) -> dict[str, Any]:
    manifest["layers"][0]["sites"][0]["scales"] = [scale]
    return manifest


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status of a call that must fail, and its message."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), from_rpc_error(error.value).message


def failed_loads(node: LoneNode, digest: str) -> int:
    """How often the node tried in vain, by its log."""
    lines = node.stack.node.log.read_text().splitlines()
    return sum("residency.load_failed" in line and digest in line for line in lines)


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_adapter_fails_alone(world: World, kind: str) -> None:
    """Requests, a load and a streamed load are refused; four streams and a good adapter do not notice."""
    node, stack = world.node, world.node.stack
    bad = BAD[kind](world, 1000 + list(BAD).index(kind))
    node.names["bad"] = bad
    await node.sync()
    async with SteadyStreams(stack, STEADY, num_each=2) as streams:
        await streams.progress()
        ends = await asyncio.gather(
            *(refusal(stack.generate([5], adapter="demo/bad", max_tokens=4)) for _ in range(3))
        )
        assert {code for code, _ in ends} == {grpc.StatusCode.FAILED_PRECONDITION}, ends
        assert str(world.root) not in str(ends)
        tries = failed_loads(node, bad.digest)
        await world.answers_a_new_one()
        assert tries == failed_loads(node, bad.digest) <= 1
        code, _ = await refusal(node.load(bad))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        spoiled = dataclasses.replace(bad, payload=bad.payload[:-1])
        code, _ = await refusal(node.load(spoiled, is_streamed=True))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        await world.answers_a_new_one()
        await streams.progress()
    assert (streams.wrong, streams.unclear) == ([], [])
    held = {a.digest: a for a in (await node.resident()).adapters}
    assert bad.digest not in held or not held[bad.digest].arena_bytes
    assert not await stack.at_rest()


async def test_what_is_wanted_and_cannot_be_is_not_tried_for_ever(world: World) -> None:
    """The catalog wants it on the device, and is pushed again and again: no read a push."""
    bad = BAD["payload truncated"](world, 2000)
    world.node.names["bad"] = bad
    world.node.pinned.add("bad")
    try:
        for _ in range(20):
            await world.node.sync()
            await world.answers_a_new_one()
        assert 1 <= failed_loads(world.node, bad.digest) <= 5
    finally:
        world.node.pinned.clear()


async def test_a_demand_that_is_refused_ends_its_requests(world: World) -> None:
    """Only the manager could bring it, and cannot: the request ends with its words before it times out."""
    node, stack = world.node, world.node.stack
    lost = world.good.numbered(3000)
    node.names["lost"] = lost
    shared, node.store = node.store, Path("/nonexistent/elsewhere")
    try:
        await node.sync()
        waiting = asyncio.create_task(
            refusal(stack.generate([5], adapter="demo/lost", max_tokens=4, timeout_s=100))
        )
        while not await node.refuse(lost, "its files are lost: upload it again"):
            assert not waiting.done()
            await asyncio.sleep(0.05)
        code, message = await waiting
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "its files are lost: upload it again" in message
        assert not await node.refuse(lost, "nobody waits")
        await node.load(lost, is_streamed=True)
        assert (await stack.generate([5], adapter="demo/lost", max_tokens=4)).token_ids == [33] * 4
    finally:
        node.store = shared
        await node.sync()
