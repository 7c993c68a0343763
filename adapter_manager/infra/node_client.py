"""The NodeClient port over gRPC: one channel to one inference service, with the node token."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc

from adapter_manager.domain.catalog import NodeCatalog
from adapter_manager.domain.errors import ArtifactStoreError, NodeCallError
from adapter_manager.domain.node import NodeEvent, NodeModel, ResidencySnapshot, ResidentAdapter
from adapter_manager.domain.probe import ProbeFindings
from adapter_manager.infra import node_messages
from adapter_manager.ports import LoadOrder
from lorikeet.inference.v1 import inference_service_pb2_grpc, model_pb2
from lorikeet.residency.v1 import residency_pb2, residency_service_pb2_grpc
from lorikeet_rpc.channel import ClientTls, Ping, open_channel
from lorikeet_rpc.errors import from_rpc_error

_T = TypeVar("_T")

_CALL_TIMEOUT_S = 10.0
_SYNC_TIMEOUT_S = 60.0
# Sooner than clients: while a connection is dead without knowing it, its node learns of no change.
_PING = Ping(every_s=10.0, timeout_s=5.0)


class GrpcNodeClient:
    """Implements `ports.NodeClient`. Build inside the running loop; connects on the first call."""

    def __init__(self, address: str, token: str, tls: ClientTls | None = None) -> None:
        self.address = address
        self._channel = open_channel(address, token=token or None, tls=tls, ping=_PING, aio=True)
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._residency = residency_service_pb2_grpc.ResidencyServiceStub(self._channel)

    async def model(self) -> NodeModel:
        """See ports.NodeClient."""
        async with self._errors_named():
            response = await self._inference.GetModel(model_pb2.GetModelRequest(), timeout=_CALL_TIMEOUT_S)
            return self._understood(lambda: node_messages.node_model(response))

    async def watch(self) -> AsyncGenerator[NodeEvent]:
        """See ports.NodeClient."""
        async with self._errors_named():
            call = self._residency.WatchResidency(residency_pb2.WatchResidencyRequest())
            try:
                async for response in call:
                    event = node_messages.event(response)
                    if event is not None:
                        yield event
            finally:
                call.cancel()

    async def resident(self) -> ResidencySnapshot:
        """See ports.NodeClient."""
        async with self._errors_named():
            response = await self._residency.ListResident(
                residency_pb2.ListResidentRequest(), timeout=_CALL_TIMEOUT_S
            )
            return node_messages.snapshot(response)

    async def sync_catalog(self, catalog: NodeCatalog) -> int:
        """See ports.NodeClient."""
        async with self._errors_named():
            pages = node_messages.catalog_pages(catalog)
            response = await self._residency.SyncCatalog(iter(pages), timeout=_SYNC_TIMEOUT_S)
            return response.generation

    async def load(
        self, order: LoadOrder, payload: AsyncIterator[bytes] | None, timeout_s: float
    ) -> ResidentAdapter:
        """See ports.NodeClient."""
        failures: list[ArtifactStoreError] = []
        async with self._errors_named():
            parts = node_messages.load_parts(order, payload and _noting(payload, failures))
            try:
                response = await self._residency.LoadAdapter(parts, timeout=timeout_s)
            except (asyncio.CancelledError, grpc.RpcError):
                # What a request iterator raises ends the call as if it had been cancelled.
                if failures:
                    raise failures[0] from None
                raise
            return node_messages.resident_adapter(response.adapter)

    async def unload(self, digest: str, *, keep_on_disk: bool, timeout_s: float) -> bool:
        """See ports.NodeClient."""
        request = residency_pb2.UnloadAdapterRequest(digest=digest, keep_on_disk=keep_on_disk)
        async with self._errors_named():
            response = await self._residency.UnloadAdapter(request, timeout=timeout_s)
            return response.unloaded

    async def refuse_demand(self, digest: str, reason: str) -> bool:
        """See ports.NodeClient."""
        request = residency_pb2.RefuseDemandRequest(digest=digest, reason=reason)
        async with self._errors_named():
            response = await self._residency.RefuseDemand(request, timeout=_CALL_TIMEOUT_S)
            return response.was_awaited

    async def probe(self, digest: str, timeout_s: float) -> ProbeFindings:
        """See ports.NodeClient."""
        async with self._errors_named():
            response = await self._residency.ProbeAdapter(
                residency_pb2.ProbeAdapterRequest(digest=digest), timeout=timeout_s
            )
            return self._understood(lambda: node_messages.probe_findings(response))

    async def close(self) -> None:
        """See ports.NodeClient."""
        await self._channel.close()

    def _understood(self, read: Callable[[], _T]) -> _T:
        try:
            return read()
        except ValueError as error:
            raise NodeCallError(
                self.address, node_messages.FAILED_PRECONDITION, "SCHEMA", str(error)
            ) from error

    @asynccontextmanager
    async def _errors_named(self) -> AsyncGenerator[None]:
        try:
            yield
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            raise NodeCallError(
                self.address, failure.code, failure.reason, failure.message or failure.code.value
            ) from error


async def _noting(payload: AsyncIterator[bytes], failures: list[ArtifactStoreError]) -> AsyncGenerator[bytes]:
    try:
        async for data in payload:
            yield data
    except ArtifactStoreError as error:
        failures.append(error)
        raise
