"""A stack that has no place of its own but one directory, and the three ways to upload to it."""

import asyncio
import hashlib
import stat
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_admin.app import app
from lorikeet_bench import rigs
from lorikeet_client import Lorikeet, LorikeetError
from tests.support.stack import Stack
from tests.support.uploads import blocking_upload, upload_parts

SECRET = "only for the owner's eyes"
SERVED = ("demo/w10", 10)


class EnclosedStack:
    """Stores, the services' home, temporary and working directory, and others' files: all below `root`."""

    def __init__(self, root: Path, stack: Stack) -> None:
        self.root, self.stack = root, stack

    @classmethod
    @asynccontextmanager
    async def running(cls, root: Path) -> AsyncIterator["EnclosedStack"]:
        """Start it, with one adapter that answers."""
        for name in ("home", "tmp", "work", "outside"):
            (root / name).mkdir()
        (root / "outside" / "secret").write_text(SECRET)
        stack = Stack(rigs.write_copy_base(root / "base"), root / "stack")
        for process in (stack.manager, stack.node):
            process.command = ["env", "-C", str(root / "work"), *process.command]
            process.env |= {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp")}
        async with stack:
            name, mark = SERVED
            await stack.upload(rigs.write_moe_watermark(root / "served", mark), name)
            await stack.wait_known(name)
            yield cls(root, stack)

    def snapshot(self) -> dict[str, tuple[object, ...]]:
        """Kind, mode and content of everything outside the stores; the stores' revisions by name."""
        found: dict[str, tuple[object, ...]] = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            is_store = name.startswith(("stack/manager/", "stack/node/")) or name.endswith(".log")
            if is_store and "/revisions/" not in name and "/staging/" not in name:
                continue
            info = path.lstat()
            content = str(path.readlink()) if path.is_symlink() else ""
            if stat.S_ISREG(info.st_mode) and not is_store:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = (info.st_mode, info.st_nlink, content)
        return found

    async def send(self, parts: Iterable[pb.UploadRequest]) -> pb.UploadResponse:
        """Any messages as an upload over raw gRPC."""
        return await asyncio.to_thread(blocking_upload, self.stack.manager_address, self.stack.token, parts)

    async def upload(self, directory: Path, name: str, **header: Any) -> pb.UploadResponse:
        """Upload a directory over raw gRPC; links are followed."""
        return await self.send(upload_parts(directory, name, **header))

    async def refused_by_client(self, directory: Path, name: str) -> LorikeetError:
        """What the Python client raises for it."""

        def by_client() -> None:
            with Lorikeet(self.stack.node_address, self.stack.manager_address, self.stack.token) as client:
                client.upload_adapter(directory, name)

        with pytest.raises(LorikeetError) as error:
            await asyncio.to_thread(by_client)
        assert SECRET not in str(error.value)
        return error.value

    async def pushed(self, directory: Path, name: str) -> int:
        """Exit code of `lorikeet adapters push`."""
        stack = self.stack
        connection = [
            "--inference",
            stack.node_address,
            "--manager",
            stack.manager_address,
            "--token",
            stack.token,
        ]
        command = [*connection, "adapters", "push", str(directory), "--name", name]
        done = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert SECRET not in done.output
        return done.exit_code


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    """How a call is refused; the words must be printable."""
    with pytest.raises(grpc.RpcError) as caught:
        await call
    error: Any = caught.value
    message = str(error.details())
    assert message.isascii()
    assert message.isprintable()
    assert SECRET not in message
    return error.code(), message
