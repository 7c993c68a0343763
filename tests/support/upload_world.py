"""A stack with small disks, for uploads that go wrong: what they leave behind, and what is sent again."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_bench import rigs
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.fault_table import FaultCase
from tests.support.journal import DEADLINE_S, Journal, until_acknowledged
from tests.support.stack import Stack
from tests.support.steady_clients import STEADY, SteadyReads, SteadyStreams, upload_steady
from tests.support.uploads import upload_parts
from tests.support.waiting import eventually

Clients = tuple[SteadyStreams, SteadyReads]
_CHUNK_BYTES = 5_000
_DISK_BYTES = 8 << 20


@dataclass
class UploadWorld:
    """A stack with an embedded store; data directory and artifact store on small disks if one can mount."""

    stack: Stack
    journal: Journal
    steady: dict[str, str]
    mount_failure: str
    artifacts: Path

    @property
    def data_dir(self) -> Path:
        """The manager's."""
        return self.stack.root / "manager"

    @property
    def leftovers(self) -> list[str]:
        """What lies in staging, and revisions' files beyond those of acknowledged watermarks."""
        stored = {p.name for p in (self.artifacts / "revisions").iterdir()}
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

    async def push_rest(self, name: str, token: int) -> None:
        """As a client does: ask where to go on, send the rest, until it is acknowledged."""

        async def push() -> None:
            received: dict[str, int] = {}
            try:
                reply = await self.stack.adapters().GetUpload(
                    pb.GetUploadRequest(adapter=name, request_id=name),
                    metadata=self.stack.auth(), timeout=DEADLINE_S,
                )  # fmt: skip
                received = dict(reply.received_bytes)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
            parts = self.parts(name, token, request_id=name, received=received)
            await self.journal.upload(name, token, lambda: iter(parts))

        await until_acknowledged(push)


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


@asynccontextmanager
async def upload_world(root: Path) -> AsyncIterator[UploadWorld]:
    """Two resident adapters; their names are in STEADY."""
    base = rigs.write_copy_base(root / "base")
    disks = [root / "stack" / "manager", root / "artifacts"]
    mounted = list[Path]()
    failure = ""
    for disk in disks:
        disk.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=700", "tmpfs", str(disk)]
        tried = await asyncio.to_thread(subprocess.run, mount, capture_output=True, text=True, check=False)
        if tried.returncode:
            failure = tried.stderr.strip()
        else:
            mounted.append(disk)
    try:
        flags = ["--store-url", disks[1].as_uri()]
        async with Stack(base, root / "stack", manager_flags=flags) as stack:
            journal = Journal(stack, root)
            yield UploadWorld(stack, journal, await upload_steady(stack, journal), failure, disks[1])
    finally:
        for disk in mounted:
            await asyncio.to_thread(subprocess.run, ["umount", str(disk)], check=True)
