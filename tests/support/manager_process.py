"""The adapter manager as a process over a fake node, spoken to through the generated stubs."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet.adapters.v1 import adapter_service_pb2_grpc, tenant_pb2, tenant_service_pb2_grpc
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.fake_node import TOKEN, FakeNode
from tests.support.lora_schemas import qwen3_moe
from tests.support.stack import Process, free_port
from tests.support.uploads import upload_parts
from tests.support.waiting import eventually

CHUNK_BYTES = 1 << 16  # several of them to a small fixture
FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
ADAPTERS = FIXTURES / "adapters" / "qwen3_moe"


class ManagerProcess:
    """Start, kill, start again: the data directory stays."""

    def __init__(self, root: Path, nodes: Sequence[FakeNode], flags: Sequence[str] = ()) -> None:
        self.data_dir = root / "manager"
        self.address = f"127.0.0.1:{free_port()}"
        self.process = Process(
            "manager",
            [
                sys.executable, "-m", "adapter_manager", "--listen", self.address,
                "--data-dir", str(self.data_dir), "--bootstrap-tenant", "demo",
                "--nodes", ",".join(node.address for node in nodes), *flags,
            ],
            root / "manager.log",
            {"ADAPTER_MANAGER_NODE_TOKEN": TOKEN},
        )  # fmt: skip
        self.token = ""
        self._channel: grpc.Channel | None = None

    async def start(self) -> None:
        """Start it and wait until it serves."""
        self.process.start()
        self._channel = grpc.insecure_channel(
            self.address,
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)],
        )
        await eventually(self._is_serving, 90)
        self.token = (self.data_dir / "bootstrap-token").read_text().strip()

    async def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self._close()
        return await asyncio.to_thread(self.process.stop)

    async def kill(self) -> None:
        """SIGKILL."""
        self._close()
        await asyncio.to_thread(self.process.kill)

    async def call(
        self, method: str, request: Any, *, token: str | None = None, timeout_s: float = 20
    ) -> Any:
        """One unary call by name, on a thread: the blocking client keeps a server's early status."""
        return await asyncio.to_thread(self._blocking, method, request, token, timeout_s)

    async def upload(self, directory: Path, name: str, *, token: str | None = None, **header: Any) -> Any:
        """Upload every file of a PEFT directory."""
        request = upload_parts(directory, name, chunk_bytes=CHUNK_BYTES, **header)
        return await asyncio.to_thread(self._blocking, "Upload", request, token, 60)

    async def names(self, token: str | None = None) -> dict[str, str]:
        """Current digests of all that the caller's list shows, over pages of two."""
        found: dict[str, str] = {}
        page_token = ""
        while True:
            request = pb.ListAdaptersRequest(page_size=2, page_token=page_token)
            reply = await self.call("ListAdapters", request, token=token)
            found |= {a.name: a.current_digest for a in reply.adapters}
            page_token = reply.next_page_token
            if not page_token:
                return found

    async def tenant(self, tenant_id: str) -> str:
        """Make a tenant; returns a token of it."""
        await self.call("CreateTenant", tenant_pb2.CreateTenantRequest(tenant_id=tenant_id))
        request = tenant_pb2.CreateTokenRequest(parent=f"tenants/{tenant_id}")
        return (await self.call("CreateToken", request)).token

    def _blocking(self, method: str, request: Any, token: str | None, timeout_s: float) -> Any:
        assert self._channel is not None
        stubs = (
            adapter_service_pb2_grpc.AdapterServiceStub(self._channel),
            tenant_service_pb2_grpc.TenantServiceStub(self._channel),
        )
        stub = next(s for s in stubs if hasattr(s, method))
        metadata = (("authorization", f"Bearer {token or self.token}"),)
        return getattr(stub, method)(request, metadata=metadata, timeout=timeout_s)

    def _is_serving(self) -> bool:
        assert self._channel is not None
        assert self.process.popen is not None
        assert self.process.popen.poll() is None, self.process.tail()
        try:
            reply = health_pb2_grpc.HealthStub(self._channel).Check(
                health_pb2.HealthCheckRequest(), timeout=1
            )
        except grpc.RpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


@asynccontextmanager
async def managed(
    root: Path, *, num_nodes: int = 1, flags: Sequence[str] = ()
) -> AsyncIterator[tuple[ManagerProcess, list[FakeNode]]]:
    """A manager process and fake qwen3_moe nodes in this one."""
    root.mkdir(parents=True, exist_ok=True)
    nodes = [FakeNode(schema=qwen3_moe()) for _ in range(num_nodes)]
    for node in nodes:
        await node.start()
    manager = ManagerProcess(root, nodes, flags)
    try:
        await manager.start()
        yield manager, nodes
    finally:
        if manager.process.popen is not None and manager.process.popen.poll() is None:
            await manager.stop()
        for node in nodes:
            await node.stop()


Managed = tuple[ManagerProcess, list[FakeNode]]


async def failure_of(call: Awaitable[object]) -> RpcFailure:
    """How a call failed."""
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def revision_files(manager: ManagerProcess) -> set[str]:
    """Digests in the local artifact store."""
    folder = manager.data_dir / "artifacts" / "revisions"
    return {p.parent.name for p in folder.glob("*/payload")} if folder.exists() else set()


def pid(manager: ManagerProcess) -> int:
    """Of the running manager."""
    assert manager.process.popen
    return manager.process.popen.pid


async def until_done(call: Callable[[], Awaitable[object]], timeout_s: float = 15) -> None:
    """Call until the manager is no longer UNAVAILABLE."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while True:
        try:
            await call()
        except grpc.RpcError as error:
            assert from_rpc_error(error).code == "UNAVAILABLE"
            assert loop.time() < end_s
            await asyncio.sleep(0.1)
        else:
            return
