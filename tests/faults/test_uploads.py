"""Uploads that break off, come in pieces that do not fit, or find a full disk: nothing half-done is seen.

What was refused has a clear status; what is sent again is registered; the disk holds what it held before.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_bench import rigs
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.fault_table import FaultCase, FaultTable
from tests.support.journal import DEADLINE_S, Journal, answered, until_acknowledged
from tests.support.stack import Stack
from tests.support.steady_clients import SteadyReads, SteadyStreams
from tests.support.uploads import upload_parts
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEADY = {"demo/one": 11, "demo/two": 22}
ROOT = Path(__file__).resolve().parents[2]
_CHUNK_BYTES = 5_000
_DISK_BYTES = 8 << 20


@dataclass
class World:
    """A stack with an embedded store, its data directory on a small file system where one can be mounted."""

    stack: Stack
    journal: Journal
    steady: dict[str, str]
    mount_failure: str

    @property
    def data_dir(self) -> Path:
        """The manager's."""
        return self.stack.root / "manager"

    @property
    def leftovers(self) -> list[str]:
        """What lies in staging, and revisions' files beyond those of acknowledged watermarks."""
        stored = {p.name for p in (self.data_dir / "artifacts" / "revisions").iterdir()}
        known = set(self.journal.digests.values())
        return [*(p.name for p in (self.data_dir / "staging").iterdir()), *(stored - known)]

    def parts(self, name: str, token: int, **options: Any) -> list[pb.UploadRequest]:
        """The messages of an upload in several chunks."""
        directory = self.journal.watermark(token)
        return list(upload_parts(directory, name, chunk_bytes=_CHUNK_BYTES, **options))

    async def failure(self, parts: list[pb.UploadRequest]) -> RpcFailure:
        """How an upload of these messages fails."""
        call = self.stack.adapters().Upload(iter(parts), metadata=self.stack.auth(), timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return from_rpc_error(caught.value)

    async def is_listed(self, name: str) -> bool:
        """Whether the manager shows the adapter at all."""
        reply = await self.stack.adapters().ListAdapters(
            pb.ListAdaptersRequest(page_size=1000), metadata=self.stack.auth(), timeout=DEADLINE_S
        )
        return any(a.name.endswith("/" + name.partition("/")[2]) for a in reply.adapters)

    async def check(self, case: FaultCase, name: str, streams: SteadyStreams, reads: SteadyReads) -> None:
        """Take what is lost and wrong into the row; nothing may be left over."""
        await streams.progress()
        await reads.progress()
        await eventually(lambda: not self.leftovers, 20)
        lost, wrong = await self.journal.compare([*STEADY, name], [self.stack])
        case.lost += [*streams.unclear, *reads.broken, *lost]
        case.wrong += [*streams.wrong, *wrong]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two resident adapters."""
    root = tmp_path_factory.mktemp("uploads")
    base = rigs.write_copy_base(root / "base")
    data_dir = root / "stack" / "manager"
    data_dir.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=700", "tmpfs", str(data_dir)]
    mounted = await asyncio.to_thread(subprocess.run, mount, capture_output=True, text=True, check=False)
    try:
        async with Stack(base, root / "stack") as stack:
            journal = Journal(stack, root)
            steady = {n: (await journal.upload(n, t)).revision.digest for n, t in STEADY.items()}
            for name, token in STEADY.items():
                assert await answered(stack, name) == token
            yield World(stack, journal, steady, mounted.stderr.strip() if mounted.returncode else "")
    finally:
        if mounted.returncode == 0:
            await asyncio.to_thread(subprocess.run, ["umount", str(data_dir)], check=True)


@pytest_asyncio.fixture(loop_scope="module")
async def clients(world: World) -> AsyncIterator[tuple[SteadyStreams, SteadyReads]]:
    """They ask throughout each test."""
    async with (
        SteadyStreams(world.stack, {**STEADY, None: 5}) as streams,
        SteadyReads(world.stack, world.steady) as reads,
    ):
        yield streams, reads


Clients = tuple[SteadyStreams, SteadyReads]
_UPLOADER = """
import sys, time
import grpc
from pathlib import Path
from lorikeet.adapters.v1 import adapter_service_pb2_grpc
from tests.support.uploads import upload_parts
address, token, directory, name, request_id = sys.argv[1:]
def parts():
    sent = upload_parts(Path(directory), name, chunk_bytes=5_000, request_id=request_id)
    for number, part in enumerate(sent):
        if number == 4:
            print("half", flush=True)
            time.sleep(600)
        yield part
with grpc.insecure_channel(address) as channel:
    stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)
    stub.Upload(parts(), metadata=(("authorization", "Bearer " + token),))
"""


@pytest.mark.parametrize("can_resume", [True, False], ids=["with a request id", "without one"])
async def test_a_client_is_killed_in_the_middle(
    world: World, clients: Clients, can_resume: bool, faults: FaultTable
) -> None:
    """What it sent is kept for its repeat where it has a request id, and cleared away where it has none."""
    name, token = f"demo/killed-{can_resume}".lower(), 30 + can_resume
    request_id = name if can_resume else ""
    stage = f"upload {'with' if can_resume else 'without'} request id"
    with faults.case("client killed", stage) as case:
        arguments = [world.stack.manager_address, world.stack.token, str(world.journal.watermark(token))]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _UPLOADER, *arguments, name, request_id,
            stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        assert process.stdout is not None
        assert await process.stdout.readline() == b"half\n"
        await eventually(lambda: world.leftovers, 20)
        process.kill()
        await process.wait()
        killed_s = time.monotonic()
        assert not await world.is_listed(name)
        received: dict[str, int] = {}
        if can_resume:
            request = pb.GetUploadRequest(adapter=name, request_id=name)
            reply = await world.stack.adapters().GetUpload(
                request, metadata=world.stack.auth(), timeout=DEADLINE_S
            )
            received = dict(reply.received_bytes)
            assert sum(received.values()) > 0
        else:
            await eventually(lambda: not world.leftovers, 20)
        parts = world.parts(name, token, request_id=request_id, received=received)
        await world.journal.upload(name, token, lambda: iter(parts))
        case.recovered(time.monotonic() - killed_s)
        await world.check(case, name, *clients)


def _swapped(parts: list[pb.UploadRequest]) -> list[pb.UploadRequest]:
    return [*parts[:2], parts[3], parts[2], *parts[4:]]


def _twice(parts: list[pb.UploadRequest]) -> list[pb.UploadRequest]:
    return [*parts[:3], parts[2], *parts[3:]]


def _short(parts: list[pb.UploadRequest]) -> list[pb.UploadRequest]:
    return parts[:-1]


def _long(parts: list[pb.UploadRequest]) -> list[pb.UploadRequest]:
    last = parts[-1].chunk
    more = pb.FileChunk(file_name=last.file_name, offset=last.offset + len(last.data), data=b"x")
    return [*parts, pb.UploadRequest(chunk=more)]


def _flipped(parts: list[pb.UploadRequest]) -> list[pb.UploadRequest]:
    changed = pb.UploadRequest()
    changed.CopyFrom(parts[-1])
    changed.chunk.data = changed.chunk.data[:-1] + bytes([changed.chunk.data[-1] ^ 1])
    return [*parts[:-1], changed]


SPOILS = {
    "chunks out of order": (_swapped, "ABORTED"),
    "a chunk twice": (_twice, "ABORTED"),
    "the last chunk missing": (_short, "INVALID_ARGUMENT"),
    "a byte too many": (_long, "INVALID_ARGUMENT"),
    "a bit flipped": (_flipped, "INVALID_ARGUMENT"),
}


@pytest.mark.parametrize("spoil", SPOILS)
async def test_an_upload_is_not_what_it_says(
    world: World, clients: Clients, spoil: str, faults: FaultTable
) -> None:
    """Refused with its own code, not listed; the true one goes in afterwards under the same request id."""
    change, code = SPOILS[spoil]
    index = list(SPOILS).index(spoil)
    name, token = f"demo/spoilt-{index}", 35 + index
    with faults.case("upload spoilt", spoil) as case:
        failure = await world.failure(change(world.parts(name, token, request_id=name)))
        refused_s = time.monotonic()
        assert failure.code == code, failure
        assert not await world.is_listed(name)
        received: dict[str, int] = {}
        try:
            reply = await world.stack.adapters().GetUpload(
                pb.GetUploadRequest(adapter=name, request_id=name),
                metadata=world.stack.auth(), timeout=DEADLINE_S,
            )  # fmt: skip
            received = dict(reply.received_bytes)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND
        parts = world.parts(name, token, request_id=name, received=received)
        await world.journal.upload(name, token, lambda: iter(parts))
        case.recovered(time.monotonic() - refused_s)
        await world.check(case, name, *clients)


async def test_the_manager_is_killed_while_it_writes_a_payload(
    world: World, clients: Clients, faults: FaultTable
) -> None:
    """As soon as the payload's file is there. It is built anew, from what was staged."""
    name, token = "demo/written", 45
    streams, _ = clients
    manager, staging = world.stack.manager, world.data_dir / "staging"

    def kill_at_payload() -> None:
        end_s = time.monotonic() + 60
        while not any(staging.glob("*/payload-*")):
            assert time.monotonic() < end_s
        assert manager.popen is not None
        os.kill(manager.popen.pid, signal.SIGKILL)

    with faults.case("manager killed", "upload: writing the payload") as case:
        killing = asyncio.create_task(asyncio.to_thread(kill_at_payload))
        failure = await world.failure(world.parts(name, token, request_id=name))
        assert failure.code == "UNAVAILABLE", failure
        await killing
        await asyncio.to_thread(manager.kill)
        await streams.progress()
        manager.start()
        began_s = time.monotonic()
        await world.stack.ready()
        assert not list(staging.glob("*/payload-*"))
        reply = await world.stack.adapters().GetUpload(
            pb.GetUploadRequest(adapter=name, request_id=name),
            metadata=world.stack.auth(),
            timeout=DEADLINE_S,
        )
        parts = world.parts(name, token, request_id=name, received=reply.received_bytes)
        await world.journal.upload(name, token, lambda: iter(parts))
        case.recovered(time.monotonic() - began_s)
        async with SteadyReads(world.stack, world.steady) as reads:  # the other ones saw the manager die
            await world.check(case, name, streams, reads)


@dataclass
class Filler:
    """Fills the manager's disk up to a number of free bytes."""

    path: Path

    def leave(self, num_bytes: int) -> None:
        """Take all but so many bytes."""
        state = os.statvfs(self.path.parent)
        self.path.write_bytes(bytes(max(0, state.f_bavail * state.f_frsize - num_bytes)))

    def remove(self) -> None:
        """Give everything back."""
        self.path.unlink(missing_ok=True)


@pytest.fixture
def filler(world: World) -> Iterator[Filler]:
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
    world: World, clients: Clients, stage: str, filler: Filler, faults: FaultTable
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
        await _push_rest(world, name, token)
        case.recovered(time.monotonic() - room_s)
        await world.check(case, name, *clients)


async def test_the_disk_is_full_for_the_store_itself(
    world: World, clients: Clients, filler: Filler, faults: FaultTable
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


async def _push_rest(world: World, name: str, token: int) -> None:
    """As a client does: ask where to go on, send the rest, until it is acknowledged."""

    async def push() -> None:
        received: dict[str, int] = {}
        try:
            reply = await world.stack.adapters().GetUpload(
                pb.GetUploadRequest(adapter=name, request_id=name),
                metadata=world.stack.auth(), timeout=DEADLINE_S,
            )  # fmt: skip
            received = dict(reply.received_bytes)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
        parts = world.parts(name, token, request_id=name, received=received)
        await world.journal.upload(name, token, lambda: iter(parts))

    await until_acknowledged(push)
