"""A node in this process: the real gRPC services, with weights that are only bytes."""

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import grpc
import grpc.aio

from inference_service.domain.errors import PayloadError, StaleGenerationError
from lorikeet.inference.v1 import inference_service_pb2_grpc, model_pb2
from lorikeet.residency.v1 import residency_pb2 as pb
from lorikeet.residency.v1 import residency_service_pb2_grpc
from lorikeet_contract.schema import LoraSchema
from lorikeet_contract.status import ServiceError, StatusCode
from lorikeet_rpc.interceptors import Principal, RequestInterceptor
from lorikeet_rpc.schema_message import schema_to_message
from tests.support.built_revisions import BASE_DIGEST

TOKEN = "node-secret"


class RefusedError(ServiceError):
    """What a test makes the node answer to a load."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "ADAPTER_UNAVAILABLE"


class FakeNode:
    """Start it, see what it was told, make it restart or demand. It keeps its port for its whole life."""

    def __init__(
        self, *, schema: LoraSchema | None = None, base_digest: str = BASE_DIGEST, shares_store: bool = True
    ) -> None:
        self.schema = schema or LoraSchema(0, ())
        self.base_digest = base_digest
        self.shares_store = shares_store
        self.max_active, self.arena_bytes, self.host_bytes = 8, 1 << 30, 1 << 30
        self.port = 0
        # What each load of a digest is answered with, for ever, instead of being done.
        self.refusals: dict[str, ServiceError] = {}
        self.loads: list[str] = []
        self.unloads: list[str] = []
        # Digest and reason of each demand that the manager said it cannot meet.
        self.refused: dict[str, str] = {}
        # Each probe's digest, and what probes are answered with.
        self.probes: list[str] = []
        self.probe_answer = pb.ProbeAdapterResponse(
            verdict=pb.PROBE_VERDICT_CHANGES, max_difference=0.5, top1_changes=3, positions=9
        )
        self.probe_error: ServiceError | None = None
        self.streamed: dict[str, bytes] = {}
        self.syncs: list[int] = []
        self._server: grpc.aio.Server | None = None
        self._numbers = itertools.count(1)
        self._forget()

    @property
    def address(self) -> str:
        """What --nodes takes."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serve; a later start is a restart with nothing resident and a new instance id."""
        self._forget()

        def authenticate(token: str | None, _method: str) -> Principal:
            if token != TOKEN:
                raise RefusedError("wrong node token")
            return Principal("manager", is_admin=True)

        self._server = grpc.aio.server(interceptors=[RequestInterceptor(authenticate, "fake_node")])
        residency_service_pb2_grpc.add_ResidencyServiceServicer_to_server(_Residency(self), self._server)
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(_Inference(self), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Go away at once, like a killed process."""
        if self._server:
            await self._server.stop(0)
            self._server = None

    async def restart(self) -> None:
        """Come back as a new process."""
        await self.stop()
        await self.start()

    async def demand(self, digest: str) -> None:
        """Tell the manager that a request waits for `digest`."""
        await self._emit(pb.WatchResidencyResponse(demand=pb.Demand(digest=digest, waiting_requests=1)))

    async def evict(self, digest: str, tier: pb.ResidencyTier) -> None:
        """Move a revision by the node's own decision."""
        self.held[digest].tier = tier
        await self._emit(pb.WatchResidencyResponse(changed=self.held[digest]))

    def names(self) -> dict[str, str]:
        """The catalog's adapters with what their bare names answer with."""
        return {f"{a.tenant}/{a.adapter}": a.current_digest for a in self.adapters}

    def model(self) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(
            name="fake",
            architecture="FakeForCausalLM",
            instance_id=self.instance_id,
            base_digest=self.base_digest,
            dtype="float32",
            limits=model_pb2.Limits(
                max_rank=64,
                max_active_adapters=self.max_active,
                adapter_arena_bytes=self.arena_bytes,
                host_pool_bytes=self.host_bytes,
            ),
            lora_schema=schema_to_message(self.schema),
        )

    def snapshot(self) -> pb.ListResidentResponse:
        return pb.ListResidentResponse(
            instance_id=self.instance_id, catalog_generation=self.generation, adapters=self.held.values()
        )

    async def load(self, header: pb.LoadHeader, payload: bytes) -> pb.ResidentAdapter:
        self.loads.append(header.digest)
        if header.digest in self.refusals:
            raise self.refusals[header.digest]
        assert hashlib.sha256(header.manifest).hexdigest() == header.digest
        if header.store_path:
            payload = self._read_store(header)
        else:
            self.streamed[header.digest] = payload
        if len(payload) != json.loads(header.manifest)["payload_bytes"]:
            raise PayloadError(f"payload of {len(payload)} bytes is cut")
        adapter = pb.ResidentAdapter(
            digest=header.digest, tier=header.tier, pinned=header.pinned, payload_bytes=len(payload)
        )
        self.held[header.digest] = adapter
        await self._emit(pb.WatchResidencyResponse(changed=adapter))
        return adapter

    async def sync(self, pages: AsyncIterator[pb.SyncCatalogRequest]) -> pb.SyncCatalogResponse:
        received = [page async for page in pages]
        assert [p.page for p in received] == list(range(len(received)))
        assert received[-1].last_page
        generation = received[0].generation
        if generation < self.generation:
            raise StaleGenerationError(f"generation {generation} is older than {self.generation}")
        self.generation = generation
        self.syncs.append(generation)
        self.store_url = received[0].store_url
        self.tenants = [t for page in received for t in page.tenants]
        self.adapters = [a for page in received for a in page.adapters]
        self.revisions = {r.digest: r for page in received for r in page.revisions}
        return pb.SyncCatalogResponse(instance_id=self.instance_id, generation=generation)

    async def unload(self, digest: str, *, keep_on_disk: bool) -> bool:
        self.unloads.append(digest)
        if digest in self.refusals:
            raise self.refusals[digest]
        adapter = self.held.pop(digest, None)
        if adapter is None:
            return False
        adapter.tier = pb.RESIDENCY_TIER_DISK if keep_on_disk else pb.RESIDENCY_TIER_ABSENT
        if keep_on_disk:
            self.held[digest] = adapter
        await self._emit(pb.WatchResidencyResponse(changed=adapter))
        return True

    def refuse_demand(self, digest: str, reason: str) -> bool:
        self.refused[digest] = reason
        return True

    async def probe(self, digest: str) -> pb.ProbeAdapterResponse:
        self.probes.append(digest)
        if self.probe_error is not None:
            raise self.probe_error
        return self.probe_answer

    async def watch(self) -> AsyncIterator[pb.WatchResidencyResponse]:
        events: asyncio.Queue[pb.WatchResidencyResponse] = asyncio.Queue()
        self._watchers.append(events)
        yield pb.WatchResidencyResponse(instance_id=self.instance_id, snapshot=self.snapshot())
        while True:
            yield await events.get()

    def _read_store(self, header: pb.LoadHeader) -> bytes:
        path = Path(urlparse(self.store_url).path) / header.store_path / "payload"
        if not self.shares_store or not path.exists():
            raise PayloadError(f"{path} is not readable here")
        return path.read_bytes()

    async def _emit(self, event: pb.WatchResidencyResponse) -> None:
        event.instance_id = self.instance_id
        for watcher in self._watchers:
            await watcher.put(event)

    def _forget(self) -> None:
        self.instance_id = f"instance-{next(self._numbers)}"
        self.generation = 0
        self.store_url = ""
        self.held: dict[str, pb.ResidentAdapter] = {}
        self.tenants: list[pb.CatalogTenant] = []
        self.adapters: list[pb.CatalogAdapter] = []
        self.revisions: dict[str, pb.CatalogRevision] = {}
        self._watchers: list[asyncio.Queue[pb.WatchResidencyResponse]] = []


class _Residency(residency_service_pb2_grpc.ResidencyServiceServicer):
    def __init__(self, node: FakeNode) -> None:
        self._node = node

    async def SyncCatalog(self, request_iterator: Any, context: Any) -> pb.SyncCatalogResponse:
        return await self._node.sync(request_iterator)

    async def LoadAdapter(self, request_iterator: Any, context: Any) -> pb.LoadAdapterResponse:
        parts = [part async for part in request_iterator]
        payload = b"".join(part.chunk.data for part in parts[1:])
        return pb.LoadAdapterResponse(adapter=await self._node.load(parts[0].header, payload))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:
        unloaded = await self._node.unload(request.digest, keep_on_disk=request.keep_on_disk)
        return pb.UnloadAdapterResponse(unloaded=unloaded)

    async def RefuseDemand(self, request: Any, context: Any) -> pb.RefuseDemandResponse:
        return pb.RefuseDemandResponse(was_awaited=self._node.refuse_demand(request.digest, request.reason))

    async def ProbeAdapter(self, request: pb.ProbeAdapterRequest, context: Any) -> pb.ProbeAdapterResponse:
        return await self._node.probe(request.digest)

    async def ListResident(self, request: Any, context: Any) -> pb.ListResidentResponse:
        return self._node.snapshot()

    async def WatchResidency(self, request: Any, context: Any) -> AsyncIterator[pb.WatchResidencyResponse]:
        async for event in self._node.watch():
            yield event


class _Inference(inference_service_pb2_grpc.InferenceServiceServicer):
    def __init__(self, node: FakeNode) -> None:
        self._node = node

    async def GetModel(self, request: Any, context: Any) -> model_pb2.GetModelResponse:
        return self._node.model()
