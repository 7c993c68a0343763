"""ResidencyService on the wire: convert, call, convert."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from inference_service.api import convert_residency as convert
from inference_service.api.adapter_intake import AdapterIntake
from inference_service.api.adapter_probe import AdapterProbe
from inference_service.api.catalog_pages import read_catalog
from inference_service.api.residency_service import ResidencyService
from lorikeet.residency.v1 import residency_pb2, residency_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class ResidencyServicer(residency_service_pb2_grpc.ResidencyServiceServicer):
    """Only the adapter manager gets here: the authenticator asks for the node token."""

    def __init__(self, service: ResidencyService, intake: AdapterIntake, probe: AdapterProbe) -> None:
        self._service = service
        self._intake = intake
        self._probe = probe

    async def SyncCatalog(
        self, request_iterator: AsyncIterator[residency_pb2.SyncCatalogRequest], context: Context
    ) -> residency_pb2.SyncCatalogResponse:
        """Swap the whole catalog in."""
        snapshot = await read_catalog(convert.each(request_iterator, convert.catalog_page))
        await self._service.sync_catalog(snapshot)
        return residency_pb2.SyncCatalogResponse(
            instance_id=self._service.instance_id, generation=snapshot.generation
        )

    async def LoadAdapter(
        self, request_iterator: AsyncIterator[residency_pb2.LoadAdapterRequest], context: Context
    ) -> residency_pb2.LoadAdapterResponse:
        """Bring a revision to a tier, with its payload if need be."""
        loaded = await self._intake.load(convert.each(request_iterator, convert.load_part))
        return residency_pb2.LoadAdapterResponse(adapter=convert.resident_adapter(loaded))

    async def UnloadAdapter(
        self, request: residency_pb2.UnloadAdapterRequest, context: Context
    ) -> residency_pb2.UnloadAdapterResponse:
        """Take a revision off device and host."""
        digest = convert.digest("digest", request.digest)
        unloaded = await self._service.unload(digest, keep_on_disk=convert.keep_on_disk(request))
        return residency_pb2.UnloadAdapterResponse(unloaded=unloaded)

    async def RefuseDemand(
        self, request: residency_pb2.RefuseDemandRequest, context: Context
    ) -> residency_pb2.RefuseDemandResponse:
        """End who waits for a revision that the manager cannot bring."""
        digest = convert.digest("digest", request.digest)
        was_awaited = await self._service.refuse_demand(digest, request.reason)
        return residency_pb2.RefuseDemandResponse(was_awaited=was_awaited)

    async def ProbeAdapter(
        self, request: residency_pb2.ProbeAdapterRequest, context: Context
    ) -> residency_pb2.ProbeAdapterResponse:
        """Compare a revision with the base model."""
        remaining: Any = context.time_remaining()  # None without a deadline, whatever the stub says
        result = await self._probe.probe(convert.digest("digest", request.digest), remaining)
        return convert.probe_response(result)

    async def ListResident(
        self, request: residency_pb2.ListResidentRequest, context: Context
    ) -> residency_pb2.ListResidentResponse:
        """All that is here."""
        return convert.list_response(await self._service.report())

    async def WatchResidency(
        self, request: residency_pb2.WatchResidencyRequest, context: Context
    ) -> AsyncIterator[residency_pb2.WatchResidencyResponse]:
        """A snapshot, then events."""
        sequence = 0
        async with aclosing(self._service.watch()) as events:
            async for event in events:
                instance_id, generation = self._service.instance_id, self._service.catalog_generation
                yield convert.watch_response(instance_id, generation, sequence, event)
                sequence += 1

    async def Drain(
        self, request: residency_pb2.DrainRequest, context: Context
    ) -> residency_pb2.DrainResponse:
        """Take no new requests and let running ones end."""
        return residency_pb2.DrainResponse(
            aborted_requests=await self._service.drain(convert.grace_s(request))
        )
