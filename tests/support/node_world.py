"""A stack whose node a test kills, stops and holds at chosen stages, and what its clients see of it."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet.residency.v1 import residency_pb2, residency_service_pb2_grpc
from lorikeet_bench import rigs
from lorikeet_contract.status import StatusCode
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.fault_table import FaultCase
from tests.support.gated_backend import STARTS
from tests.support.gates import VARIABLE, Gates
from tests.support.stack import NODE_TOKEN, Stack, make_request
from tests.support.uploads import adapter_files

PROMPT = 5  # the copy base repeats it, so no watermark may be this token
DEADLINE_S = 60.0
_LONG = 8000  # tokens of a stream that is still running whenever a fault comes
_ENGINE = "inference_service.engine.engine_process"


@dataclass
class Outcome:
    """How one call ended: `token` is what a stream may emit; no `failure` and not whole is no clear end."""

    what: str
    token: int
    tokens: list[int] = field(default_factory=list)
    is_whole: bool = False
    failure: RpcFailure | None = None
    ended_s: float = 0.0

    def record(self, case: FaultCase, is_clear: Callable[[RpcFailure], bool]) -> None:
        """Add what is lost or wrong about it to a row."""
        if any(t != self.token for t in self.tokens):
            case.wrong.append(f"{self.what}: {sorted(set(self.tokens))}, not {self.token}")
        if self.is_whole:
            return
        if self.failure is None or not is_clear(self.failure):
            found = f"{self.failure} {self.failure.reason}" if self.failure else "no status"
            case.lost.append(f"{self.what} ended after {len(self.tokens)} tokens with {found}")


class Stream:
    """A Generate call on its way."""

    def __init__(self, world: "NodeWorld", adapter: str | None, **options: Any) -> None:
        self.outcome = Outcome(f"stream on {adapter}", world.token_of(adapter))
        self._started = asyncio.Event()
        self._task = asyncio.create_task(self._run(world.stack, adapter, **options))

    async def started(self) -> None:
        """Wait for its first token, or its end."""
        await asyncio.wait_for(self._started.wait(), DEADLINE_S)

    async def ended(self) -> Outcome:
        """Wait for its end."""
        return await self._task

    async def _run(
        self,
        stack: Stack,
        adapter: str | None,
        *,
        max_tokens: int = _LONG,
        prompt_tokens: int = 1,
        timeout_s: float | None = DEADLINE_S,
    ) -> Outcome:
        request = make_request([PROMPT] * prompt_tokens, adapter=adapter, max_tokens=max_tokens)
        call = stack.inference().Generate(request, metadata=stack.auth(), timeout=timeout_s)
        try:
            async for piece in call:
                self.outcome.tokens += [t.id for t in piece.tokens]
                self.outcome.is_whole = self.outcome.is_whole or piece.HasField("finish")
                if self.outcome.tokens:
                    self._started.set()
        except grpc.aio.AioRpcError as error:
            self.outcome.is_whole = False
            self.outcome.failure = from_rpc_error(error)
        finally:
            self.outcome.ended_s = time.monotonic()
            self._started.set()
        return self.outcome


class NodeWorld:
    """Both services, the node with gates. `watermarks` are uploaded at the start."""

    def __init__(
        self,
        root: Path,
        watermarks: Mapping[str, int],
        *,
        node_flags: Sequence[str] = (),
        is_streamed: bool = False,
    ) -> None:
        """Build it.

        Args:
            root: a new directory.
            watermarks: adapters by name, with the token that each emits.
            node_flags: more flags of the node.
            is_streamed: the node cannot read the artifact store, so the manager streams payloads to it.
        """
        self.gates = Gates(root / "gates")
        self.watermarks = dict(watermarks)
        self.digests: dict[str, str] = {}
        self._root = root
        base = rigs.write_copy_base(root / "base")
        self.stack = Stack(base, root / "stack", node_flags=node_flags)
        node, manager = self.stack.node, self.stack.manager
        node.command[2] = "tests.support.gated_service"
        node.cwd = Path(__file__).resolve().parents[2]
        # Socket directories of its own, so that what is left of them can be counted.
        self.sockets = root / "sockets"
        self.sockets.mkdir()
        node.env |= {VARIABLE: str(self.gates.directory), "TMPDIR": str(self.sockets)}
        self.store = root / "stack" / "manager" / "artifacts"
        if is_streamed:
            # One path that means another directory in each process: it is the manager's alone.
            manager.cwd = root / "stack"
            self.store = root / "stack" / "artifacts"
            manager.command += ["--store-url", "file:///proc/self/cwd/artifacts"]

    async def __aenter__(self) -> Self:
        await self.stack.__aenter__()
        for name, token in self.watermarks.items():
            await self.upload(name, token)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.gates.release_all()
        await self.stack.__aexit__(*exc)

    async def upload(self, name: str, token: int) -> str:
        """Upload a watermark; returns its digest."""
        self.watermarks[name] = token
        reply = await self.stack.upload(rigs.write_moe_watermark(self._root / f"w{token}", token), name)
        self.digests[name] = reply.revision.digest
        return reply.revision.digest

    async def push(self, name: str, request_id: str) -> tuple[adapter_pb2.UploadResponse, int]:
        """Upload a watermark as our clients do: only what the manager lacks; returns how much that was."""
        directory = self._root / f"w{self.watermarks[name]}"
        request = adapter_pb2.GetUploadRequest(adapter=name, request_id=request_id)
        received: dict[str, int] = {}
        try:
            reply = await self.stack.adapters().GetUpload(request, metadata=self.stack.auth(), timeout=60)
            received = dict(reply.received_bytes)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
        total = sum(path.stat().st_size for path in adapter_files(directory))
        pushed = await self.stack.upload(directory, name, received=received, request_id=request_id)
        return pushed, total - sum(received.values())

    def token_of(self, adapter: str | None) -> int:
        """What a stream on the adapter emits."""
        return PROMPT if adapter is None else self.watermarks[adapter]

    def stored(self, name: str) -> Path:
        """The directory of an adapter's files in the artifact store."""
        return self.store / "revisions" / self.digests[name]

    def cached(self, name: str) -> Path:
        """The same in the node's disk cache."""
        return self._root / "stack" / "node" / "adapters" / self.digests[name]

    def stream(self, adapter: str | None, **options: Any) -> Stream:
        """Begin a long stream."""
        return Stream(self, adapter, **options)

    async def ask(self, adapter: str | None, *, timeout_s: float = DEADLINE_S) -> Outcome:
        """A short request to its end."""
        return await Stream(self, adapter, max_tokens=4, timeout_s=timeout_s).ended()

    async def load(self, name: str) -> Outcome:
        """Have the manager load an adapter."""
        request = adapter_pb2.LoadAdapterRequest(name=name)
        return await self._managed(f"load of {name}", self.stack.adapters().LoadAdapter, request)

    async def unload(self, name: str) -> Outcome:
        """Have the manager unload an adapter."""
        request = adapter_pb2.UnloadAdapterRequest(name=name)
        return await self._managed(f"unload of {name}", self.stack.adapters().UnloadAdapter, request)

    async def unloaded(self, name: str) -> None:
        """Unload an adapter, again until it is done: after a restart the manager needs a moment."""
        end_s = time.monotonic() + DEADLINE_S
        while not (outcome := await self.unload(name)).is_whole:
            assert time.monotonic() < end_s, outcome
            await asyncio.sleep(0.1)

    async def active(self, name: str) -> None:
        """Wait until the node has an adapter on the device, without asking for it."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            held = await self.resident()
            if name in held and held[name].tier == residency_pb2.RESIDENCY_TIER_ACTIVE:
                return
            assert time.monotonic() < end_s, held
            await asyncio.sleep(0.05)

    async def resident(self) -> Mapping[str, residency_pb2.ResidentAdapter]:
        """What the node says that it holds, by adapter."""
        async with grpc.aio.insecure_channel(self.stack.node_address) as channel:
            stub: Any = residency_service_pb2_grpc.ResidencyServiceStub(channel)
            reply = await stub.ListResident(
                residency_pb2.ListResidentRequest(), metadata=self.stack.auth(NODE_TOKEN), timeout=10
            )
        found = {a.digest: a for a in reply.adapters}
        return {name: found[digest] for name, digest in self.digests.items() if digest in found}

    async def is_serving(self) -> bool:
        """What the node's health says; False also where it does not answer."""
        async with grpc.aio.insecure_channel(self.stack.node_address) as channel:
            try:
                reply = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=5
                )
            except grpc.aio.AioRpcError:
                return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    async def serving(self) -> None:
        """Wait until health says it: it follows the engine by a moment."""
        end_s = time.monotonic() + DEADLINE_S
        while not await self.is_serving():
            assert time.monotonic() < end_s, "health never came back"
            await asyncio.sleep(0.05)

    def engine(self) -> psutil.Process:
        """The one engine process of the node, alive."""
        (engine,) = self.engines()
        return engine

    def engines(self) -> list[psutil.Process]:
        """Engine processes of the node that runs now, dead ones that nobody waited for included."""
        assert self.stack.node.popen is not None
        found = psutil.Process(self.stack.node.popen.pid).children(recursive=True)
        return [p for p in found if p.status() == psutil.STATUS_ZOMBIE or _ENGINE in p.cmdline()]

    def starts(self) -> list[float]:
        """When engine processes began to load their model."""
        path = self.gates.directory / STARTS
        return [float(line) for line in path.read_text().splitlines()]

    def signal_engine(self, number: signal.Signals) -> psutil.Process:
        """Send the engine a signal; returns it."""
        engine = self.engine()
        os.kill(engine.pid, number)
        return engine

    async def recovered(self, names: Sequence[str | None], since_s: float, timeout_s: float = 90.0) -> float:
        """Ask until each answers right; nothing but UNAVAILABLE may come before. Returns the time it took."""
        for name in names:
            while True:
                answer = await self.ask(name)
                if answer.is_whole:
                    assert answer.tokens == [self.token_of(name)] * 4, (name, answer)
                    break
                assert answer.failure is not None
                assert answer.failure.code == "UNAVAILABLE", (name, answer.failure, answer.failure.reason)
                assert time.monotonic() - since_s < timeout_s, f"{name}: {answer.failure}"
                await asyncio.sleep(0.05)
        return time.monotonic() - since_s

    async def check_rest(self, case: FaultCase) -> None:
        """Counters are back, one engine process lives, and no dead one's sockets lie around."""
        if held := await self.stack.at_rest():
            case.lost.append(held)
        engines = [f"{p.pid} {p.status()}" for p in self.engines()]
        if len(engines) != 1:
            case.lost.append(f"engine processes: {engines}")
        sockets = [p.name for p in self.sockets.iterdir()]
        if len(sockets) != 1:
            case.lost.append(f"socket directories: {sockets}")

    @contextmanager
    def hung_store(self, name: str) -> Generator[Callable[[], Awaitable[None]]]:
        """Inside, who reads the adapter's manifest from the store waits; yields a wait until one does."""
        manifest = self.stored(name) / "manifest.json"
        kept = manifest.with_name("manifest.kept")
        manifest.rename(kept)
        os.mkfifo(manifest)
        writers: list[int] = []

        async def is_read() -> None:
            end_s = time.monotonic() + 30
            while not writers:
                with suppress(OSError):  # nobody reads it yet
                    writers.append(os.open(manifest, os.O_WRONLY | os.O_NONBLOCK))
                assert time.monotonic() < end_s, "nobody reads the store"
                await asyncio.sleep(0.005)

        try:
            yield is_read
        finally:
            kept.replace(manifest)
            for writer in writers:
                with suppress(BrokenPipeError):  # the reader was killed meanwhile
                    os.write(writer, manifest.read_bytes())
                os.close(writer)

    async def _managed(self, what: str, method: Callable[..., Awaitable[Any]], request: Any) -> Outcome:
        outcome = Outcome(what, 0)
        try:
            reply = await method(request, metadata=self.stack.auth(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            outcome.failure = from_rpc_error(error)
        else:
            failures = [p.failure for p in reply.placements if p.failure]
            outcome.is_whole = not failures
            if failures:
                # Answered, and the answer says of the node what was wrong with it: as clear as a status.
                outcome.failure = RpcFailure(
                    StatusCode.UNAVAILABLE, "PLACEMENT", failures[0], retry_after_s=1.0
                )
        outcome.ended_s = time.monotonic()
        return outcome
