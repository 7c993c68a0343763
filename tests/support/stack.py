"""A real local stack for tests: both services as processes, the embedded store, loopback ports, raw stubs.

It speaks through the generated stubs alone, so that what it sees does not pass through our own client's code.
"""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet.adapters.v1 import adapter_pb2, adapter_service_pb2_grpc, tenant_pb2, tenant_service_pb2_grpc
from lorikeet.inference.v1 import generation_pb2, inference_service_pb2_grpc, model_pb2
from tests.support.uploads import upload_parts

NODE_TOKEN = "test-node-token"


_PORTS = range(10240, 32000)  # below the ephemeral range, so that no outgoing connection sits on one
_given: set[int] = set()


def free_port() -> int:
    """A loopback port that nobody listens on and that this process has not given out."""
    while True:
        port = secrets.choice(_PORTS)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port


@dataclass
class Completion:
    """A whole streamed answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[generation_pb2.TokenInfo] = field(default_factory=list)
    prompt_tokens: list[generation_pb2.TokenInfo] = field(default_factory=list)
    finish: generation_pb2.Finish | None = None
    sequences: list[int] = field(default_factory=list)


class Process:
    """One service process with its log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name, self.command, self.log, self.cwd = name, list(command), log, cwd
        self.env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **(env or {})}
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; output is appended to the log."""
        with self.log.open("ab") as out:
            self.popen = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=self.env,
                cwd=self.cwd,
            )

    def stop(self, grace_s: float = 20.0) -> int:
        """SIGTERM, then wait; returns the exit code. Fails the test if it does not end in time."""
        assert self.popen is not None
        if self.popen.poll() is None:
            self.popen.terminate()
        try:
            return self.popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} ignored SIGTERM for {grace_s} s:\n{self.tail()}") from None

    def kill(self) -> None:
        """SIGKILL."""
        assert self.popen is not None
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)

    def tail(self, lines: int = 60) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Stack:
    """Both services over one model directory. Start with `async with`."""

    def __init__(
        self,
        model_dir: Path,
        root: Path,
        *,
        node_flags: Sequence[str] = (),
        manager_flags: Sequence[str] = (),
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.node_address = f"127.0.0.1:{free_port()}"
        self.manager_address = f"127.0.0.1:{free_port()}"
        self.node = Process(
            "inference",
            [
                sys.executable, "-m", "inference_service", "--model-dir", str(model_dir),
                "--listen", self.node_address,
                "--dtype", dtype, "--device", device, "--data-dir", str(root / "node"), *node_flags,
            ],
            root / "node.log",
            {"INFERENCE_NODE_TOKEN": NODE_TOKEN},
        )  # fmt: skip
        self.manager = Process(
            "manager",
            [
                sys.executable, "-m", "adapter_manager", "--listen", self.manager_address,
                "--nodes", self.node_address,
                "--data-dir", str(root / "manager"), "--bootstrap-tenant", "demo", *manager_flags,
            ],
            root / "manager.log",
            # Tests compare a node's counters before and after; `--probe-on-load` lets a test have probes.
            {"ADAPTER_MANAGER_NODE_TOKEN": NODE_TOKEN, "ADAPTER_MANAGER_PROBE_ON_LOAD": "false"},
        )  # fmt: skip
        self.token = ""
        self._channels: list[grpc.aio.Channel] = []

    async def __aenter__(self) -> Self:
        self.node.start()
        self.manager.start()
        try:
            await self.ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        for channel in self._channels:
            await channel.close()
        for process in (self.manager, self.node):
            if process.popen is not None and process.popen.poll() is None:
                process.popen.terminate()
        for process in (self.manager, self.node):
            if process.popen is not None:
                await asyncio.to_thread(process.stop)

    async def ready(self, timeout_s: float = 180.0) -> None:
        """Wait until both serve and the node has a catalog; reads the bootstrap token."""
        await self._serving(self.node, self.node_address, timeout_s)
        await self._serving(self.manager, self.manager_address, timeout_s)
        self.token = (self.root / "manager" / "bootstrap-token").read_text().strip()
        end = time.monotonic() + timeout_s
        while True:
            try:
                await self.model()
            except grpc.aio.AioRpcError as error:
                if time.monotonic() > end:
                    raise AssertionError(
                        f"no catalog: {error}\n{self.node.tail()}\n{self.manager.tail()}"
                    ) from error
                await asyncio.sleep(0.05)
            else:
                return

    async def _serving(self, process: Process, address: str, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                assert process.popen is not None
                if process.popen.poll() is not None:
                    raise AssertionError(
                        f"{process.name} ended with {process.popen.returncode}:\n{process.tail()}"
                    )
                try:
                    reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.aio.AioRpcError:
                    pass
                if time.monotonic() > end:
                    raise AssertionError(
                        f"{process.name} is not serving after {timeout_s} s:\n{process.tail()}"
                    )
                await asyncio.sleep(0.05)

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._channels.append(channel)
        return channel

    def inference(self) -> Any:
        """A stub on a channel of its own."""
        return inference_service_pb2_grpc.InferenceServiceStub(self._channel(self.node_address))

    def adapters(self) -> Any:
        """A stub of the adapter service."""
        return adapter_service_pb2_grpc.AdapterServiceStub(self._channel(self.manager_address))

    def tenants(self) -> Any:
        """A stub of the tenant service."""
        return tenant_service_pb2_grpc.TenantServiceStub(self._channel(self.manager_address))

    def auth(self, token: str | None = None) -> tuple[tuple[str, str], ...]:
        """Call metadata with a bearer token, by default the bootstrap tenant's."""
        return (("authorization", f"Bearer {token or self.token}"),)

    async def model(self) -> model_pb2.GetModelResponse:
        """GetModel."""
        stub = self.inference()
        return await stub.GetModel(model_pb2.GetModelRequest(), metadata=self.auth(), timeout=10)

    async def status(self) -> model_pb2.EngineStatus:
        """The engine's counters."""
        return (await self.model()).status

    async def at_rest(self, timeout_s: float = 30.0) -> str:
        """Wait until no request, lease or block is held; what is held after all, in words."""
        end = time.monotonic() + timeout_s
        while True:
            s = await self.status()
            busy = (s.running_requests, s.waiting_requests, s.adapter_leases)
            if busy == (0, 0, 0) and s.kv_blocks_available == s.kv_blocks_total:
                return ""
            if time.monotonic() > end:
                return f"counters do not return: {s}"
            await asyncio.sleep(0.05)

    async def upload(
        self, directory: Path, name: str, *, token: str | None = None, **options: Any
    ) -> adapter_pb2.UploadResponse:
        """Upload every regular file of a PEFT directory; `options` are those of `upload_parts`."""
        parts = upload_parts(directory, name, **options)
        return await self.adapters().Upload(parts, metadata=self.auth(token), timeout=120)

    async def wait_known(self, adapter: str, digest: str | None = None, timeout_s: float = 10.0) -> None:
        """Wait until the node answers for an adapter (and, if given, with that revision)."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                done = await self.generate([1], adapter=adapter, max_tokens=1)
                if digest is None or (done.finish is not None and done.finish.adapter.digest == digest):
                    return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
            assert time.monotonic() < end, f"{adapter} (digest {digest}) is not known after {timeout_s} s"
            await asyncio.sleep(0.02)

    async def generate(
        self,
        prompt: Sequence[int] | str,
        *,
        adapter: str | None = None,
        token: str | None = None,
        stub: Any = None,
        timeout_s: float = 60.0,
        **sampling: Any,
    ) -> Completion:
        """Stream one greedy request (unless `sampling` says otherwise) to its end."""
        request = make_request(prompt, adapter=adapter, **sampling)
        out = Completion()
        call = (stub or self.inference()).Generate(request, metadata=self.auth(token), timeout=timeout_s)
        async for piece in call:
            out.text += piece.text_delta
            out.tokens += piece.tokens
            out.token_ids += [t.id for t in piece.tokens]
            out.prompt_tokens += piece.prompt_tokens
            out.sequences.append(piece.sequence)
            if piece.HasField("finish"):
                out.finish = piece.finish
        return out

    async def set_tenant(self, tenant: str) -> str:
        """Create a tenant; returns a token of it."""
        stub = self.tenants()
        await stub.CreateTenant(
            tenant_pb2.CreateTenantRequest(tenant_id=tenant), metadata=self.auth(), timeout=10
        )
        reply = await stub.CreateToken(
            tenant_pb2.CreateTokenRequest(parent=f"tenants/{tenant}"), metadata=self.auth(), timeout=10
        )
        return reply.token


async def rest_of(call: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """What is left of a stream that `read` was begun with; grpc.aio refuses `async for` on such a call."""
    while (piece := await call.read()) is not grpc.aio.EOF:
        yield piece


def make_request(
    prompt: Sequence[int] | str, *, adapter: str | None = None, request_id: str = "", **sampling: Any
) -> generation_pb2.GenerateRequest:
    """A GenerateRequest; greedy unless `temperature` says otherwise."""
    params = generation_pb2.SamplingParams(**{"temperature": 0.0, **sampling})
    request = generation_pb2.GenerateRequest(sampling=params, request_id=request_id)
    if adapter is not None:
        request.adapter = adapter
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request
