"""Values of tenants and their tokens."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """A tenant's share and quotas; None means the default of the manager or the node."""

    weight: float | None = None
    max_running_requests: int | None = None
    max_waiting_requests: int | None = None
    max_adapters: int | None = None


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token as the registry knows it: never the token itself."""

    token_id: str
    create_time: datetime | None
    admin: bool


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token, shown this once."""

    token: str
    record: TokenRecord


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant with its limits and tokens."""

    name: str
    create_time: datetime | None
    limits: TenantLimits
    tokens: tuple[TokenRecord, ...]
    etag: str
