"""TenantService: convert, call, convert. The authenticator lets admins only come here."""

from typing import Any

import grpc.aio

from adapter_manager.api import tenant_convert
from adapter_manager.application.residency import Fleet
from adapter_manager.application.tenants import TenantDirectory
from lorikeet.adapters.v1 import tenant_pb2 as pb
from lorikeet.adapters.v1 import tenant_service_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class TenantServicer(tenant_service_pb2_grpc.TenantServiceServicer):
    """Serves admins."""

    def __init__(self, directory: TenantDirectory, fleet: Fleet) -> None:
        self._directory = directory
        self._fleet = fleet

    async def CreateTenant(
        self, request: pb.CreateTenantRequest, context: _Context
    ) -> pb.CreateTenantResponse:
        """See the proto."""
        limits = tenant_convert.limits(request.limits)
        stored = await self._directory.create(request.tenant_id, limits, request.request_id)
        await self._fleet.catch_up()
        return pb.CreateTenantResponse(tenant=tenant_convert.tenant(stored))

    async def GetTenant(self, request: pb.GetTenantRequest, context: _Context) -> pb.GetTenantResponse:
        """See the proto."""
        stored = await self._directory.get(tenant_convert.tenant_id(request.name, "name"))
        return pb.GetTenantResponse(tenant=tenant_convert.tenant(stored))

    async def ListTenants(self, request: pb.ListTenantsRequest, context: _Context) -> pb.ListTenantsResponse:
        """See the proto."""
        items, next_token = await self._directory.list(request.page_size, request.page_token)
        return pb.ListTenantsResponse(
            tenants=[tenant_convert.tenant(item) for item in items], next_page_token=next_token
        )

    async def DeleteTenant(
        self, request: pb.DeleteTenantRequest, context: _Context
    ) -> pb.DeleteTenantResponse:
        """See the proto."""
        await self._directory.delete(tenant_convert.tenant_id(request.name, "name"), request.etag)
        await self._fleet.catch_up()
        return pb.DeleteTenantResponse()

    async def CreateToken(self, request: pb.CreateTokenRequest, context: _Context) -> pb.CreateTokenResponse:
        """See the proto."""
        tenant = tenant_convert.tenant_id(request.parent, "parent")
        token, record = await self._directory.create_token(tenant, request.admin)
        await self._fleet.catch_up()
        return tenant_convert.token_response(token, record)

    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: _Context) -> pb.RevokeTokenResponse:
        """See the proto."""
        tenant = tenant_convert.tenant_id(request.parent, "parent")
        await self._directory.revoke_token(tenant, request.token_id)
        await self._fleet.catch_up()
        return pb.RevokeTokenResponse()
