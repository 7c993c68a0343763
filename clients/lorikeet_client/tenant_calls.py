"""The unary calls of TenantService. Admins only."""

import secrets
from dataclasses import dataclass

from lorikeet.adapters.v1 import tenant_pb2 as pb
from lorikeet_client import adapter_messages as messages
from lorikeet_client.calls import Call, Service
from lorikeet_client.tenants import NewToken, Tenant, TenantLimits


@dataclass(frozen=True, slots=True)
class TenantPage:
    """A page of a listing; the last one has no next token."""

    items: tuple[Tenant, ...]
    next_page_token: str


def create_tenant(
    tenant_id: str, limits: TenantLimits | None, request_id: str
) -> Call[pb.CreateTenantResponse, Tenant]:
    """Create a tenant; the request id lets a repeated try find its own tenant."""
    request = pb.CreateTenantRequest(
        tenant_id=tenant_id,
        limits=messages.tenant_limits(limits) if limits else None,
        request_id=request_id or secrets.token_hex(16),
    )
    return Call(
        Service.TENANTS,
        "CreateTenant",
        request,
        pb.CreateTenantResponse,
        lambda reply: messages.tenant(reply.tenant),
    )


def get_tenant(tenant_id: str) -> Call[pb.GetTenantResponse, Tenant]:
    """One tenant."""
    return Call(
        Service.TENANTS,
        "GetTenant",
        pb.GetTenantRequest(name=f"tenants/{tenant_id}"),
        pb.GetTenantResponse,
        lambda reply: messages.tenant(reply.tenant),
    )


def list_tenants(page_size: int, page_token: str) -> Call[pb.ListTenantsResponse, TenantPage]:
    """One page of the tenants."""
    return Call(
        Service.TENANTS,
        "ListTenants",
        pb.ListTenantsRequest(page_size=page_size, page_token=page_token),
        pb.ListTenantsResponse,
        lambda reply: TenantPage(
            tuple(messages.tenant(item) for item in reply.tenants), reply.next_page_token
        ),
    )


def delete_tenant(tenant_id: str, etag: str) -> Call[pb.DeleteTenantResponse, None]:
    """Delete a tenant. Not repeated by itself: a second try would be NOT_FOUND."""
    return Call(
        Service.TENANTS,
        "DeleteTenant",
        pb.DeleteTenantRequest(name=f"tenants/{tenant_id}", etag=etag),
        pb.DeleteTenantResponse,
        lambda _: None,
        idempotent=False,
    )


def create_token(tenant_id: str, admin: bool) -> Call[pb.CreateTokenResponse, NewToken]:
    """Make a token. Not repeated by itself: a lost reply would leave a token that nobody knows."""
    return Call(
        Service.TENANTS,
        "CreateToken",
        pb.CreateTokenRequest(parent=f"tenants/{tenant_id}", admin=admin),
        pb.CreateTokenResponse,
        messages.new_token,
        idempotent=False,
    )


def revoke_token(tenant_id: str, token_id: str) -> Call[pb.RevokeTokenResponse, None]:
    """Make a token worthless."""
    return Call(
        Service.TENANTS,
        "RevokeToken",
        pb.RevokeTokenRequest(parent=f"tenants/{tenant_id}", token_id=token_id),
        pb.RevokeTokenResponse,
        lambda _: None,
        idempotent=False,
    )
