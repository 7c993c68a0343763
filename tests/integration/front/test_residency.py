"""The manager's side of a node: catalog, loads with streamed payloads, watches."""

import asyncio
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from inference_service.api import adapter_intake
from inference_service.domain.adapter import AdapterDemand, ResidencyTier, ResidentAdapter
from inference_service.domain.errors import AdapterUnavailableError, DiskCacheError, PayloadMissingError
from inference_service.engine.payload_cache import PayloadReceiver
from lorikeet.residency.v1 import residency_pb2
from lorikeet_contract.manifest import Manifest, PayloadDtype, PayloadLayer
from lorikeet_rpc.errors import from_rpc_error
from tests.support.node import (
    ACME,
    ADMIN,
    DIGEST,
    NODE_TOKEN,
    OTHERS,
    SECOND,
    auth,
    catalog_pages,
    code_of,
    make_request,
    run_node,
)
from tests.support.waiting import eventually

PAYLOAD = bytes(range(256)) * 100
MANIFEST = Manifest(
    base_digest="b" * 64,
    schema_digest="c" * 64,
    dtype=PayloadDtype.FLOAT32,
    payload_bytes=len(PAYLOAD),
    layers=(PayloadLayer(0, 0, len(PAYLOAD), hashlib.sha256(PAYLOAD).hexdigest(), ()),),
)


def load_parts(
    data: bytes = PAYLOAD, chunk: int = 1000, **header: Any
) -> Iterator[residency_pb2.LoadAdapterRequest]:
    """A streamed load."""
    values = {
        "digest": MANIFEST.digest,
        "manifest": MANIFEST.to_json(),
        "tier": residency_pb2.RESIDENCY_TIER_ACTIVE,
        **header,
    }
    yield residency_pb2.LoadAdapterRequest(header=residency_pb2.LoadHeader(**values))
    for offset in range(0, len(data), chunk):
        part = residency_pb2.PayloadChunk(offset=offset, data=data[offset : offset + chunk])
        yield residency_pb2.LoadAdapterRequest(chunk=part)


def left_behind(directory: Path) -> list[str]:
    """Files below a directory, the cache's own empty folders aside."""
    return [str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()]


@pytest.mark.parametrize("token", [None, ACME, ADMIN, "wrong"])
async def test_only_the_node_token_gets_in(tmp_path: Path, token: str | None) -> None:
    """Tenants, admins too, are no manager."""
    async with run_node(tmp_path) as node:
        calls = [
            node.residency.ListResident(residency_pb2.ListResidentRequest(), metadata=auth(token)),
            node.residency.WatchResidency(residency_pb2.WatchResidencyRequest(), metadata=auth(token)),
            node.residency.SyncCatalog(iter(catalog_pages(9)), metadata=auth(token)),
            node.residency.Drain(residency_pb2.DrainRequest(), metadata=auth(token)),
        ]
        assert {await code_of(call) for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}


async def test_a_node_without_a_secret_has_no_manager(tmp_path: Path) -> None:
    """No configured token matches no token."""
    async with run_node(tmp_path, with_catalog=False, node_token=None) as node:
        for token in (None, "", NODE_TOKEN):
            call = node.residency.ListResident(residency_pb2.ListResidentRequest(), metadata=auth(token))
            assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED


async def test_catalog_reaches_the_engine_and_is_swapped_whole(tmp_path: Path) -> None:
    """Shares, every revision and the store reach the engine; names and tokens the requests."""
    async with run_node(tmp_path) as node:
        assert {(t.tenant, t.weight, t.max_running_requests) for t in node.engine.tenants} == {
            ("acme", 2.0, 3),
            ("other", 1.0, 0),
        }
        assert {d.source.digest: d.source.store_path for d in node.engine.desired} == {
            d: f"revisions/{d}" for d in (DIGEST, SECOND, OTHERS)
        }
        assert {d.tier for d in node.engine.desired} == {ResidencyTier.ABSENT}
        assert node.engine.store_url == "file:///store"
        empty = [residency_pb2.SyncCatalogRequest(generation=2, last_page=True)]
        assert await node.sync(empty) == 2
        assert (
            await code_of(node.inference.Generate(make_request(), metadata=auth(ACME)))
            is grpc.StatusCode.UNAUTHENTICATED
        )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("older", grpc.StatusCode.FAILED_PRECONDITION),
        ("equal", grpc.StatusCode.OK),
        ("no last page", grpc.StatusCode.INVALID_ARGUMENT),
        ("page lost", grpc.StatusCode.INVALID_ARGUMENT),
        ("mixed generations", grpc.StatusCode.INVALID_ARGUMENT),
        ("nothing", grpc.StatusCode.INVALID_ARGUMENT),
        ("bad digest", grpc.StatusCode.INVALID_ARGUMENT),
        ("path escapes", grpc.StatusCode.INVALID_ARGUMENT),
        ("absolute path", grpc.StatusCode.INVALID_ARGUMENT),
        ("bad name", grpc.StatusCode.INVALID_ARGUMENT),
        ("bad weight", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_catalogs_that_change_nothing(tmp_path: Path, change: str, code: grpc.StatusCode) -> None:
    """Old, broken and malformed catalogs leave the node's own as it is."""
    async with run_node(tmp_path) as node:
        pages = catalog_pages(2)
        if change in {"older", "equal"}:
            pages = catalog_pages(0 if change == "older" else 1)
        elif change == "no last page":
            pages = pages[:1]
        elif change == "page lost":
            pages = pages[1:]
        elif change == "mixed generations":
            pages[1].generation = 3
        elif change == "nothing":
            pages = []
        elif change == "bad digest":
            pages[1].revisions[0].digest = "A" * 64
        elif change == "path escapes":
            pages[1].revisions[0].store_path = "revisions/../../etc"
        elif change == "absolute path":
            pages[1].revisions[0].store_path = "/etc/passwd"
        elif change == "bad name":
            pages[1].adapters[0].adapter = "../x"
        else:
            pages[0].tenants[0].weight = float("nan")
        call = node.residency.SyncCatalog(iter(pages), metadata=auth(NODE_TOKEN))
        assert await code_of(call) is code
        assert (await node.generate(make_request(adapter="pirate")))[-1].finish.adapter.digest == SECOND


async def test_streamed_payload(tmp_path: Path) -> None:
    """Chunks end up in the disk cache, whole, and the engine is asked to load them."""
    async with run_node(tmp_path) as node:
        reply = await node.residency.LoadAdapter(load_parts(pinned=True), metadata=auth(NODE_TOKEN))
        assert (reply.adapter.digest, reply.adapter.pinned) == (MANIFEST.digest, True)
        assert reply.adapter.tier == residency_pb2.RESIDENCY_TIER_ACTIVE
        directory = node.cache_dir / MANIFEST.digest
        assert (directory / "payload").read_bytes() == PAYLOAD
        assert (directory / "manifest.json").read_bytes() == MANIFEST.to_json()
        (wanted,) = node.engine.loads
        assert (wanted.source.store_path, wanted.source.payload_bytes) == ("", len(PAYLOAD))


async def test_load_from_the_shared_store(tmp_path: Path) -> None:
    """A header with a path needs no chunks."""
    async with run_node(tmp_path) as node:
        path = f"revisions/{MANIFEST.digest}"
        await node.residency.LoadAdapter(load_parts(b"", store_path=path), metadata=auth(NODE_TOKEN))
        (wanted,) = node.engine.loads
        assert wanted.source.store_path == path
        assert left_behind(node.cache_dir) == []


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda: load_parts(PAYLOAD[:-1]), id="cut short"),
        pytest.param(lambda: load_parts(PAYLOAD + b"x"), id="too long"),
        pytest.param(lambda: list(load_parts())[:2] + list(load_parts())[3:], id="gap"),
        pytest.param(lambda: list(load_parts())[1:], id="no header"),
        pytest.param(list, id="nothing"),
        pytest.param(lambda: [*load_parts(), next(load_parts())], id="second header"),
        pytest.param(lambda: load_parts(digest="0" * 64), id="another digest"),
        pytest.param(lambda: load_parts(digest="../../x"), id="digest as path"),
        pytest.param(lambda: load_parts(manifest=b"{}"), id="no manifest"),
        pytest.param(lambda: load_parts(tier=residency_pb2.RESIDENCY_TIER_DISK), id="tier disk"),
        pytest.param(lambda: load_parts(tier=77), id="unknown tier"),
        pytest.param(lambda: [residency_pb2.LoadAdapterRequest()], id="empty part"),
    ],
)
async def test_broken_loads_leave_nothing(tmp_path: Path, parts: Any) -> None:
    """Refused with the caller's code, temporary files gone, the engine not bothered."""
    async with run_node(tmp_path) as node:
        code = await code_of(node.residency.LoadAdapter(iter(list(parts())), metadata=auth(NODE_TOKEN)))
        assert code in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
        assert left_behind(node.cache_dir) == []
        assert node.engine.loads == []


async def test_a_payload_above_the_cache_is_refused_at_once(tmp_path: Path) -> None:
    """By its manifest, before a byte of it is kept."""
    async with run_node(tmp_path, disk_cache_bytes=1000) as node:
        call = node.residency.LoadAdapter(load_parts(), metadata=auth(NODE_TOKEN))
        assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION
        assert left_behind(node.cache_dir) == []


class FullDisk(PayloadReceiver):
    """A receiver whose disk takes nothing."""

    def write(self, offset: int, data: bytes) -> None:
        """As a write that fails."""
        raise DiskCacheError("this node's disk cache cannot take it: No space left on device")


@pytest.mark.parametrize("can_free", [True, False])
async def test_a_full_disk_cache_makes_room_or_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, can_free: bool
) -> None:
    """With room made another attempt is worth while (RESOURCE_EXHAUSTED); with none to make it is not."""
    monkeypatch.setattr(adapter_intake, "PayloadReceiver", FullDisk)
    async with run_node(tmp_path) as node:
        node.engine.can_free = can_free
        call = node.residency.LoadAdapter(load_parts(), metadata=auth(NODE_TOKEN))
        code = grpc.StatusCode.RESOURCE_EXHAUSTED if can_free else grpc.StatusCode.FAILED_PRECONDITION
        assert await code_of(call) is code
        assert node.engine.freed == [len(PAYLOAD)]
        assert (left_behind(node.cache_dir), node.engine.loads) == ([], [])


async def test_a_stream_replaces_what_was_here_and_damaged(tmp_path: Path) -> None:
    """The engine throws its copy away while it loads it: the chunks that follow are taken after all."""
    async with run_node(tmp_path) as node:
        node.engine.adapters[MANIFEST.digest] = ResidentAdapter(MANIFEST.digest, ResidencyTier.DISK)
        node.engine.load_error = PayloadMissingError("not on this node")

        async def parts() -> Any:
            header, *chunks = load_parts()
            yield header
            await eventually(lambda: node.engine.loads)
            node.engine.load_error = None
            for chunk in chunks:
                yield chunk

        await node.residency.LoadAdapter(parts(), metadata=auth(NODE_TOKEN))
        assert (node.cache_dir / MANIFEST.digest / "payload").read_bytes() == PAYLOAD
        assert len(node.engine.loads) == 2


async def test_a_refused_demand_reaches_the_engine(tmp_path: Path) -> None:
    """With the manager's words; a digest that is none is refused itself."""
    async with run_node(tmp_path) as node:
        request = residency_pb2.RefuseDemandRequest(digest=DIGEST, reason="lost")
        reply = await node.residency.RefuseDemand(request, metadata=auth(NODE_TOKEN))
        assert (reply.was_awaited, node.engine.refused) == (True, {DIGEST: "lost"})
        request.digest = "../x"
        call = node.residency.RefuseDemand(request, metadata=auth(NODE_TOKEN))
        assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_upload_leaves_nothing(tmp_path: Path) -> None:
    """The manager went away in the middle."""
    async with run_node(tmp_path) as node:
        more = asyncio.Event()

        async def parts() -> Any:
            for part in list(load_parts())[:5]:
                yield part
            await more.wait()

        call = node.residency.LoadAdapter(parts(), metadata=auth(NODE_TOKEN))
        waiting = asyncio.ensure_future(call)
        await eventually(lambda: left_behind(node.cache_dir))
        call.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await eventually(lambda: not left_behind(node.cache_dir))


async def test_a_load_that_fails_says_why(tmp_path: Path) -> None:
    """The engine's own error reaches the manager."""
    async with run_node(tmp_path) as node:
        node.engine.load_error = AdapterUnavailableError("layer 3 is damaged")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.residency.LoadAdapter(load_parts(), metadata=auth(NODE_TOKEN))
        failure = from_rpc_error(caught.value)
        assert (failure.reason, failure.message) == ("ADAPTER_UNAVAILABLE", "layer 3 is damaged")


async def test_list_and_unload(tmp_path: Path) -> None:
    """What is here, and what is gone."""
    async with run_node(tmp_path) as node:
        held = ResidentAdapter(DIGEST, ResidencyTier.HOST, pinned=True, leases=3, failure="why")
        node.engine.adapters[DIGEST] = held
        reply = await node.residency.ListResident(
            residency_pb2.ListResidentRequest(), metadata=auth(NODE_TOKEN)
        )
        assert (reply.instance_id, reply.catalog_generation, reply.arena_total_bytes) == (
            "fake-1",
            1,
            1 << 20,
        )
        (adapter,) = reply.adapters
        shown = {f.name: getattr(adapter, f.name) for f in dataclasses.fields(held) if f.name != "tier"}
        assert shown == {f: getattr(held, f) for f in shown}
        request = residency_pb2.UnloadAdapterRequest(digest=DIGEST)
        assert (await node.residency.UnloadAdapter(request, metadata=auth(NODE_TOKEN))).unloaded
        assert not (await node.residency.UnloadAdapter(request, metadata=auth(NODE_TOKEN))).unloaded


async def test_watch(tmp_path: Path) -> None:
    """A snapshot, then changes, demand and usage; another snapshot when the engine comes back."""
    async with run_node(tmp_path) as node:
        watch = node.residency.WatchResidency(
            residency_pb2.WatchResidencyRequest(), metadata=auth(NODE_TOKEN)
        )
        first = await watch.read()
        assert (first.WhichOneof("event"), first.sequence, first.catalog_generation) == ("snapshot", 0, 1)
        node.engine.tell(ResidentAdapter(DIGEST, ResidencyTier.COPYING))
        changed = await watch.read()
        assert (changed.changed.digest, changed.sequence) == (DIGEST, 1)
        node.engine.tell(AdapterDemand(SECOND, 4))
        assert (await watch.read()).demand.waiting_requests == 4
        for _ in range(3):
            await node.generate(make_request("abc", max_tokens=2, adapter="pirate"))
        used = [await watch.read()]
        while sum(u.usage.requests for u in used) < 3:
            used.append(await watch.read())
        assert {u.usage.digest for u in used} == {SECOND}
        assert sum(u.usage.prompt_tokens for u in used) == 9
        assert sum(u.usage.output_tokens for u in used) == 6
        node.engine.die()
        node.engine.revive()
        again = await watch.read()
        assert (again.WhichOneof("event"), again.instance_id) == ("snapshot", "fake-2")


async def test_a_slow_watcher_sees_the_latest_state(tmp_path: Path) -> None:
    """Thousands of changes of one revision do not pile up."""
    async with run_node(tmp_path) as node:
        watch = node.residency.WatchResidency(
            residency_pb2.WatchResidencyRequest(), metadata=auth(NODE_TOKEN)
        )
        await watch.read()
        for leases in range(5000):
            node.engine.tell(ResidentAdapter(DIGEST, ResidencyTier.HOST, leases=leases))
        seen = 0
        while (await watch.read()).changed.leases != 4999:
            seen += 1
        assert seen < 1000
