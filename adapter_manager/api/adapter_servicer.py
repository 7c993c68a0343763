"""AdapterService: convert, call, convert. Errors become statuses in the interceptor."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from adapter_manager.api import convert
from adapter_manager.api.authentication import current_caller
from adapter_manager.application.adapters import AdapterDirectory
from adapter_manager.application.deletion import Deletion
from adapter_manager.application.probes import ProbeService
from adapter_manager.application.residency import Fleet, ResidencyService
from adapter_manager.application.uploads import UploadService
from adapter_manager.domain.errors import InvalidRequestError
from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet.adapters.v1 import adapter_service_pb2_grpc
from lorikeet_rpc.interceptors import annotate_request

_Context = grpc.aio.ServicerContext[Any, Any]


class AdapterServicer(adapter_service_pb2_grpc.AdapterServiceServicer):
    """Serves tenants and admins."""

    def __init__(
        self,
        directory: AdapterDirectory,
        uploads: UploadService,
        deletion: Deletion,
        residency: ResidencyService,
        fleet: Fleet,
        probes: ProbeService,
        load_timeout_s: float,
    ) -> None:
        self._directory = directory
        self._uploads = uploads
        self._deletion = deletion
        self._residency = residency
        self._fleet = fleet
        self._probes = probes
        self._load_timeout_s = load_timeout_s

    async def Upload(
        self, request_iterator: AsyncIterator[pb.UploadRequest], context: _Context
    ) -> pb.UploadResponse:
        """See the proto."""
        async for first in request_iterator:
            header = convert.upload_header(first)
            async with self._uploads.open(current_caller(), header) as upload:
                if upload.result is None:
                    async for message in request_iterator:
                        chunk = convert.upload_chunk(message)
                        await upload.write(chunk.file_name, chunk.offset, chunk.data)
                result = await upload.finish()
                annotate_request(upload=convert.upload_outcome(result))
            await self._fleet.catch_up()
            if not (header.is_validate_only or result.is_created):
                await self._fleet.retry(result.revision.digest)
            return convert.upload_response(result, self._directory.probe_of(result.revision.digest))
        raise InvalidRequestError("the upload's stream was empty", metadata={"field": "header"})

    async def GetUpload(self, request: pb.GetUploadRequest, context: _Context) -> pb.GetUploadResponse:
        """See the proto."""
        received = await self._uploads.received_bytes(current_caller(), request.adapter, request.request_id)
        return pb.GetUploadResponse(received_bytes=received)

    async def GetAdapter(self, request: pb.GetAdapterRequest, context: _Context) -> pb.GetAdapterResponse:
        """See the proto."""
        details = await self._directory.get(current_caller(), request.name)
        return pb.GetAdapterResponse(adapter=convert.adapter(details))

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: _Context
    ) -> pb.ListAdaptersResponse:
        """See the proto."""
        items, next_token = await self._directory.list(
            current_caller(), request.parent, request.page_size, request.page_token
        )
        return pb.ListAdaptersResponse(
            adapters=[convert.adapter(item) for item in items], next_page_token=next_token
        )

    async def DeleteAdapter(
        self, request: pb.DeleteAdapterRequest, context: _Context
    ) -> pb.DeleteAdapterResponse:
        """See the proto."""
        await self._deletion.delete(current_caller(), request.name, request.etag)
        return pb.DeleteAdapterResponse()

    async def PinAdapter(self, request: pb.PinAdapterRequest, context: _Context) -> pb.PinAdapterResponse:
        """See the proto."""
        details = await self._directory.pin(current_caller(), request.name, request.pinned, request.etag)
        await self._fleet.catch_up()
        return pb.PinAdapterResponse(adapter=convert.adapter(details))

    async def SetAlias(self, request: pb.SetAliasRequest, context: _Context) -> pb.SetAliasResponse:
        """See the proto."""
        details = await self._directory.set_alias(
            current_caller(), request.name, request.alias, request.digest, request.etag
        )
        await self._fleet.catch_up()
        return pb.SetAliasResponse(adapter=convert.adapter(details))

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: _Context) -> pb.LoadAdapterResponse:
        """See the proto."""
        tier = convert.wanted_tier(request)
        placements = await self._residency.load(
            current_caller(), request.name, tier, self._timeout_s(context)
        )
        return pb.LoadAdapterResponse(placements=convert.placements(placements))

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: _Context
    ) -> pb.UnloadAdapterResponse:
        """See the proto."""
        placements = await self._residency.unload(current_caller(), request.name, self._timeout_s(context))
        return pb.UnloadAdapterResponse(placements=convert.placements(placements))

    async def ProbeAdapter(
        self, request: pb.ProbeAdapterRequest, context: _Context
    ) -> pb.ProbeAdapterResponse:
        """See the proto."""
        done = await self._probes.probe(current_caller(), request.name, self._timeout_s(context))
        return pb.ProbeAdapterResponse(revision=convert.revision(done.name, done.revision, None, done.probe))

    async def GetPlacement(
        self, request: pb.GetPlacementRequest, context: _Context
    ) -> pb.GetPlacementResponse:
        """See the proto."""
        placements = await self._residency.fresh_placement(current_caller(), request.name)
        return pb.GetPlacementResponse(placements=convert.placements(placements))

    def _timeout_s(self, context: _Context) -> float:
        remaining: Any = context.time_remaining()  # None without a deadline, whatever the stub says
        return self._load_timeout_s if remaining is None else min(remaining, self._load_timeout_s)
