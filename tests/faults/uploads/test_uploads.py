"""Uploads that break off, or that are not what they say: nothing half-done is seen, the repeat goes through.

What was refused has a clear status; what is sent again is registered; the disk holds what it held before.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest

from lorikeet.adapters.v1 import adapter_pb2 as pb
from tests.support.fault_table import FaultTable
from tests.support.journal import DEADLINE_S
from tests.support.steady_clients import SteadyReads
from tests.support.upload_world import Clients, UploadWorld
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).resolve().parents[3]
_CHUNK_BYTES = 5_000
_DISK_BYTES = 8 << 20


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
    world: UploadWorld, clients: Clients, can_resume: bool, faults: FaultTable
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
    world: UploadWorld, clients: Clients, spoil: str, faults: FaultTable
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
    world: UploadWorld, clients: Clients, faults: FaultTable
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
