"""Tenants, what they may use, and their tokens (hashes only)."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None stands for the node's or the manager's own limit."""

    weight: float = 1.0
    max_running_requests: int | None = None
    max_waiting_requests: int | None = None
    max_adapters: int | None = None


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A bearer token as we keep it: its public id and its sha256, never itself."""

    token_id: str
    sha256: str
    is_admin: bool
    create_time_s: float


@dataclass(frozen=True, slots=True)
class Tenant:
    """An owner of adapters. Its id is its name's only segment."""

    tenant_id: str
    create_time_s: float
    limits: TenantLimits = field(default_factory=TenantLimits)
    tokens: tuple[TokenRecord, ...] = ()
    # The request that made it, so that a repeat of that request is answered and not refused.
    request_id: str = ""

    @property
    def name(self) -> str:
        """The resource name."""
        return f"tenants/{self.tenant_id}"

    def with_token(self, token: TokenRecord) -> "Tenant":
        """A copy that also knows `token`."""
        return replace(self, tokens=(*self.tokens, token))

    def without_token(self, token_id: str) -> "Tenant":
        """A copy that no longer knows the token."""
        return replace(self, tokens=tuple(t for t in self.tokens if t.token_id != token_id))


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """How many adapters a tenant has; exists exactly as long as the tenant, and makes the limit atomic."""

    tenant_id: str
    num_adapters: int = 0


@dataclass(frozen=True, slots=True)
class TokenOwner:
    """Whose token it is: what authentication looks up by the token's sha256."""

    sha256: str
    tenant_id: str
    token_id: str
    is_admin: bool
