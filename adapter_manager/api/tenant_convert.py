"""Tenants and tokens as messages and back. Pure."""

from adapter_manager.api.convert import timestamp
from adapter_manager.domain.errors import InvalidRequestError
from adapter_manager.domain.tenant import Tenant, TenantLimits, TokenRecord
from adapter_manager.ports import NewToken, Stored
from lorikeet.adapters.v1 import tenant_pb2 as pb


def limits(message: pb.TenantLimits) -> TenantLimits:
    """What is set; the rest stays at its default."""
    return TenantLimits(
        weight=message.weight if message.HasField("weight") else 1.0,
        max_running_requests=(
            message.max_running_requests if message.HasField("max_running_requests") else None
        ),
        max_waiting_requests=(
            message.max_waiting_requests if message.HasField("max_waiting_requests") else None
        ),
        max_adapters=message.max_adapters if message.HasField("max_adapters") else None,
    )


def limits_message(record: TenantLimits) -> pb.TenantLimits:
    """Inverse of `limits`."""
    return pb.TenantLimits(
        weight=record.weight,
        max_running_requests=record.max_running_requests,
        max_waiting_requests=record.max_waiting_requests,
        max_adapters=record.max_adapters,
    )


def tenant(stored: Stored[Tenant]) -> pb.Tenant:
    """A tenant with its tokens' records."""
    record = stored.value
    return pb.Tenant(
        name=record.name,
        create_time=timestamp(record.create_time_s),
        limits=limits_message(record.limits),
        tokens=[token_record(t) for t in record.tokens],
        etag=stored.etag,
    )


def token_record(record: TokenRecord) -> pb.TokenRecord:
    """What may be shown of a token."""
    return pb.TokenRecord(
        token_id=record.token_id, create_time=timestamp(record.create_time_s), admin=record.is_admin
    )


def token_response(token: NewToken, record: TokenRecord) -> pb.CreateTokenResponse:
    """The one reply that ever holds a token."""
    return pb.CreateTokenResponse(token=token.token, record=token_record(record))


def tenant_id(name: str, field: str) -> str:
    """The id in tenants/{t}; its own grammar is checked further inside."""
    if not name.startswith("tenants/"):
        raise InvalidRequestError(
            f"{field} must be of the form tenants/{{tenant}}, e.g. tenants/demo", metadata={"field": field}
        )
    return name.removeprefix("tenants/")
