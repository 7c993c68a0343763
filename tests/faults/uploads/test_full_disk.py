"""A disk is full: of the staging directory, of the artifact store, of the embedded store.

What was refused says so, nothing half-done is seen, and with room again the repeat goes through.
"""

import asyncio
import time
from collections.abc import Callable, Iterator

import grpc
import grpc.aio
import psutil
import pytest

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.fault_table import FaultTable
from tests.support.journal import until_acknowledged
from tests.support.steady_clients import STEADY
from tests.support.upload_world import Clients, Filler, UploadWorld
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def filler(world: UploadWorld) -> Iterator[Filler]:
    """Skips where no file system may be mounted."""
    if world.mount_failure:
        pytest.skip(f"needs to mount a small tmpfs: {world.mount_failure}")
    filler = Filler(world.data_dir / "filler")
    yield filler
    filler.remove()


def _staged_bytes(parts: list[pb.UploadRequest]) -> int:
    return sum(f.size_bytes for f in parts[0].header.files)


# What the disk still takes when the upload begins, of the bytes that will be staged.
ROOM: dict[str, Callable[[int], int]] = {
    "staging: not a byte": lambda _: 0,
    "staging: half of it": lambda staged: staged // 2,
    "payload: its first pages": lambda staged: staged + (48 << 10),
}


@pytest.mark.parametrize("stage", ROOM)
async def test_the_disk_is_full(
    world: UploadWorld, clients: Clients, stage: str, filler: Filler, faults: FaultTable
) -> None:
    """RESOURCE_EXHAUSTED says that it is the disk; with room again the repeat goes through."""
    index = list(ROOM).index(stage)
    name, token = f"demo/full-{index}", 50 + index
    with faults.case("disk full", f"upload: {stage}") as case:
        parts = world.parts(name, token, request_id=name)
        await asyncio.to_thread(filler.leave, ROOM[stage](_staged_bytes(parts)))
        failure = await world.failure(parts)
        assert failure.code == "RESOURCE_EXHAUSTED", failure
        assert "No space left" in failure.message
        assert failure.retry_after_s
        assert not await world.is_listed(name)
        filler.remove()
        room_s = time.monotonic()
        await world.push_rest(name, token)
        case.recovered(time.monotonic() - room_s)
        await world.check(case, name, *clients)


async def test_the_artifact_stores_disk_is_full(
    world: UploadWorld, clients: Clients, filler: Filler, faults: FaultTable
) -> None:
    """UNAVAILABLE, nothing registered and no part of a payload left; with room the repeat goes through."""
    name, token = "demo/unstored", 53
    filler.path = world.artifacts / "filler"
    with faults.case("disk full", "artifact store") as case:
        await asyncio.to_thread(filler.leave, 16 << 10)
        failure = await world.failure(world.parts(name, token, request_id=name))
        assert (failure.code, failure.reason) == ("UNAVAILABLE", "ARTIFACT_STORE"), failure
        assert failure.retry_after_s
        assert not await world.is_listed(name)
        known = {world.journal.digests[t] for t in STEADY.values()}
        assert known <= {p.name for p in (world.artifacts / "revisions").iterdir()}
        await eventually(
            lambda: not [p for p in world.artifacts.rglob("payload*") if p.name != "payload"], 20
        )
        filler.remove()
        room_s = time.monotonic()
        await world.push_rest(name, token)
        case.recovered(time.monotonic() - room_s)
        await world.check(case, name, *clients)


async def test_the_disk_is_full_for_the_store_itself(
    world: UploadWorld, clients: Clients, filler: Filler, faults: FaultTable
) -> None:
    """The embedded store's log takes no more: it ends rather than to lie. Room again, and it is back."""
    with faults.case("disk full", "embedded store's log") as case:
        refusals: list[RpcFailure] = []
        await asyncio.to_thread(filler.leave, 0)
        for number in range(200):  # the log's last page still takes some
            try:
                await world.journal.set_alias("demo/one", f"a{number % 50}", 11)
            except grpc.aio.AioRpcError as error:
                refusals.append(from_rpc_error(error))
                if len(refusals) > 2:
                    break
        assert refusals, "the disk was never full for the store"
        for failure in refusals:
            assert failure.code == "UNAVAILABLE", failure
            assert failure.retry_after_s
        filler.remove()
        room_s = time.monotonic()
        await until_acknowledged(lambda: world.journal.set_alias("demo/one", "prod", 11))
        case.recovered(time.monotonic() - room_s)
        names = [n for n in world.journal.entries if n.startswith("demo/one@")]
        lost, wrong = await world.journal.compare(names, [world.stack])
        case.lost += lost
        case.wrong += wrong
        manager = psutil.Process(world.stack.manager.popen.pid if world.stack.manager.popen else 0)
        assert [p for p in manager.children() if "valkey" in p.name()]
        await world.check(case, "demo/one", *clients)
