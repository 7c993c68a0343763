"""Tenants and their tokens, for admins."""

from collections.abc import Sequence

import structlog

from adapter_manager.application.transactions import Transactions
from adapter_manager.domain.errors import (
    EtagMismatchError,
    InvalidRequestError,
    LimitExceededError,
    TenantExistsError,
    TenantNotEmptyError,
    TenantNotFoundError,
    TokenNotFoundError,
)
from adapter_manager.domain.page import decode_token, encode_token, page_size
from adapter_manager.domain.tenant import Tenant, TenantLimits, TenantUsage, TokenOwner, TokenRecord
from adapter_manager.ports import (
    Change,
    Clock,
    MintToken,
    NewToken,
    Registry,
    Stored,
    create,
    delete,
    forget,
    update,
)
from lorikeet_contract.names import InvalidNameError, check_segment

log = structlog.get_logger(__name__)

MAX_TOKENS = 100
_LISTING = "tenants"


class TenantDirectory:
    """Tenants and tokens. Callers have checked that an admin asks."""

    def __init__(
        self, registry: Registry, transactions: Transactions, mint_token: MintToken, clock: Clock
    ) -> None:
        self._registry = registry
        self._transactions = transactions
        self._mint_token = mint_token
        self._clock = clock

    async def create(self, tenant_id: str, limits: TenantLimits, request_id: str) -> Stored[Tenant]:
        """Make a tenant. A repeat with the same request id and limits returns the one that is there."""
        _check_id(tenant_id, "tenant_id")
        _check_limits(limits)
        tenant = Tenant(tenant_id, self._clock(), limits, request_id=request_id)

        async def attempt() -> tuple[Sequence[Change], bool]:
            known = await self._registry.tenant(tenant_id)
            if known is None:
                return [create(tenant), create(TenantUsage(tenant_id))], True
            if request_id and known.value.request_id == request_id and known.value.limits == limits:
                return [], False
            raise TenantExistsError(
                f"tenant {tenant_id!r} exists already; choose another id, or use it as it is",
                metadata={"tenant": tenant_id},
            )

        if await self._transactions.run(attempt):
            log.info("tenant.created", tenant=tenant_id)
        return await self.get(tenant_id)

    async def get(self, tenant_id: str) -> Stored[Tenant]:
        """A tenant, or TenantNotFoundError."""
        stored = await self._registry.tenant(_check_id(tenant_id, "name"))
        if stored is None:
            raise _not_found(tenant_id)
        return stored

    async def list(self, size: int, token: str) -> tuple[Sequence[Stored[Tenant]], str]:
        """One page of tenants, and the token of the next page ("" after the last)."""
        page = await self._registry.tenants(decode_token(token, _LISTING), page_size(size))
        return page.items, encode_token(_LISTING, page.next_after) if page.next_after else ""

    async def delete(self, tenant_id: str, etag: str) -> None:
        """Delete a tenant without adapters, its tokens too."""

        async def attempt() -> tuple[Sequence[Change], None]:
            stored = await self.get(tenant_id)
            if etag and etag != stored.etag:
                raise EtagMismatchError(f"tenant {tenant_id!r} changed since you read it; read it again")
            usage = await self._registry.usage(tenant_id)
            if usage and usage.value.num_adapters:
                raise TenantNotEmptyError(
                    f"tenant {tenant_id!r} has {usage.value.num_adapters} adapters; delete them first",
                    metadata={"tenant": tenant_id, "num_adapters": str(usage.value.num_adapters)},
                )
            tokens = [forget(_owner(tenant_id, token)) for token in stored.value.tokens]
            return [delete(stored), *([delete(usage)] if usage else []), *tokens], None

        await self._transactions.run(attempt)
        log.info("tenant.deleted", tenant=tenant_id)

    async def create_token(self, tenant_id: str, is_admin: bool) -> tuple[NewToken, TokenRecord]:
        """Issue a token; only the reply ever holds it."""
        token = self._mint_token()
        return token, await self.add_token(tenant_id, token, is_admin)

    async def add_token(self, tenant_id: str, token: NewToken, is_admin: bool) -> TokenRecord:
        """Register a token that was made before; one that is registered already stays as it is."""
        record = TokenRecord(token.token_id, token.sha256, is_admin, self._clock())

        async def attempt() -> tuple[Sequence[Change], TokenRecord]:
            stored = await self.get(tenant_id)
            for known in stored.value.tokens:
                if known.sha256 == token.sha256:
                    return [], known
            if len(stored.value.tokens) >= MAX_TOKENS:
                raise LimitExceededError(
                    f"tenant {tenant_id!r} has {MAX_TOKENS} tokens; revoke those that nobody uses",
                    metadata={"limit": "max_tokens", "maximum": str(MAX_TOKENS)},
                )
            changed = update(stored, stored.value.with_token(record))
            return [changed, create(_owner(tenant_id, record))], record

        added = await self._transactions.run(attempt)
        if added is record:
            log.info("token.created", tenant=tenant_id, token_id=token.token_id, admin=is_admin)
        return added

    async def revoke_token(self, tenant_id: str, token_id: str) -> None:
        """Make a token worthless, here at once and wherever else the registry is read within its poll."""

        async def attempt() -> tuple[Sequence[Change], None]:
            stored = await self.get(tenant_id)
            gone = [t for t in stored.value.tokens if t.token_id == token_id]
            if not gone:
                raise TokenNotFoundError(
                    f"tenant {tenant_id!r} has no token {token_id!r}", metadata={"tenant": tenant_id}
                )
            changed = update(stored, stored.value.without_token(token_id))
            return [changed, *(forget(_owner(tenant_id, t)) for t in gone)], None

        await self._transactions.run(attempt)
        log.info("token.revoked", tenant=tenant_id, token_id=token_id)

    async def bootstrap(self, tenant_id: str, token: NewToken) -> bool:
        """Make sure that a tenant exists; True if `token` is an admin token of it now.

        False: the tenant was there without it. It was revoked and must not come back; a fresh one may.

        Raises:
            RegistryUnavailableError: the registry is away; nothing of it is lost by trying again.
        """
        try:
            stored = await self.get(tenant_id)
        except TenantNotFoundError:
            await self.create(tenant_id, TenantLimits(), request_id="bootstrap")
            await self.add_token(tenant_id, token, is_admin=True)
            return True
        return any(known.sha256 == token.sha256 for known in stored.value.tokens)


def _owner(tenant_id: str, token: TokenRecord) -> TokenOwner:
    return TokenOwner(token.sha256, tenant_id, token.token_id, token.is_admin)


def _not_found(tenant_id: str) -> TenantNotFoundError:
    return TenantNotFoundError(f"there is no tenant {tenant_id!r}", metadata={"tenant": tenant_id})


def _check_id(tenant_id: str, field: str) -> str:
    try:
        return check_segment(tenant_id, "tenant id")
    except InvalidNameError as error:
        raise InvalidRequestError(str(error), metadata={"field": field}) from None


def _check_limits(limits: TenantLimits) -> None:
    if not 0 < limits.weight <= 1e6:
        raise InvalidRequestError(
            f"limits.weight is {limits.weight}; it must be above 0 and at most 1000000",
            metadata={"field": "limits.weight", "value": str(limits.weight)},
        )
    for field in ("max_running_requests", "max_waiting_requests", "max_adapters"):
        if getattr(limits, field) == 0:
            raise InvalidRequestError(
                f"limits.{field} is 0, which would stop the tenant; leave it out for the default, or give at "
                "least 1",
                metadata={"field": f"limits.{field}", "value": "0"},
            )
