"""Tenants, tokens and what their deletion takes along."""

from pathlib import Path

import pytest

from adapter_manager.api.authentication import TokenAuthenticator
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.errors import (
    EtagMismatchError,
    InvalidRequestError,
    PermissionDeniedError,
    RegistryUnavailableError,
    TenantExistsError,
    TenantNotEmptyError,
    TenantNotFoundError,
    TokenNotFoundError,
    UnauthenticatedError,
)
from adapter_manager.domain.tenant import TenantLimits, TokenOwner
from lorikeet_rpc.tokens import new_token
from tests.support.built_revisions import MemoryArtifacts
from tests.support.manager_parts import Parts, make_parts
from tests.support.memory_registry import MemoryRegistry

METHOD = "/lorikeet.adapters.v1.AdapterService/GetAdapter"
ADMIN_METHOD = "/lorikeet.adapters.v1.TenantService/ListTenants"


@pytest.fixture
def registry() -> MemoryRegistry:
    """An empty registry."""
    return MemoryRegistry()


@pytest.fixture
def parts(registry: MemoryRegistry, tmp_path: Path) -> Parts:
    """The rooms over it."""
    return make_parts(registry, MemoryArtifacts(), tmp_path)


async def test_a_repeated_create_returns_the_tenant_another_one_does_not(parts: Parts) -> None:
    """Only the same request id with the same limits is the same request."""
    first = await parts.tenants.create("demo", TenantLimits(weight=2), "r1")
    assert await parts.tenants.create("demo", TenantLimits(weight=2), "r1") == first
    for limits, request_id in [(TenantLimits(weight=3), "r1"), (TenantLimits(weight=2), "")]:
        with pytest.raises(TenantExistsError, match="demo"):
            await parts.tenants.create("demo", limits, request_id)


@pytest.mark.parametrize("tenant_id", ["", "..", "a/b", "Demo", "x" * 64, "base", "tenants", "a\n"])
async def test_bad_tenant_ids_are_refused(parts: Parts, tenant_id: str) -> None:
    """With the field's name."""
    with pytest.raises(InvalidRequestError) as caught:
        await parts.tenants.create(tenant_id, TenantLimits(), "")
    assert caught.value.metadata["field"] == "tenant_id"


@pytest.mark.parametrize(
    "limits",
    [TenantLimits(weight=0), TenantLimits(weight=float("nan")), TenantLimits(max_adapters=0)],
)
async def test_limits_that_would_stop_a_tenant_are_refused(parts: Parts, limits: TenantLimits) -> None:
    """Zero weight, no number, zero adapters."""
    with pytest.raises(InvalidRequestError, match="limits"):
        await parts.tenants.create("demo", limits, "")


async def test_tokens_authenticate_until_they_are_revoked(parts: Parts, registry: MemoryRegistry) -> None:
    """At once in this process; only the hash is kept."""
    await parts.tenant("demo")
    authenticate = TokenAuthenticator(parts.mirror)
    token, record = await parts.tenants.create_token("demo", is_admin=False)
    assert authenticate(token.token, METHOD).tenant == "demo"
    assert not any(token.token in repr(stored) for stored in registry.records.values())
    with pytest.raises(PermissionDeniedError):
        authenticate(token.token, ADMIN_METHOD)
    await parts.tenants.revoke_token("demo", record.token_id)
    with pytest.raises(UnauthenticatedError):
        authenticate(token.token, METHOD)
    with pytest.raises(TokenNotFoundError):
        await parts.tenants.revoke_token("demo", record.token_id)


async def test_admin_tokens_and_missing_tokens(parts: Parts) -> None:
    """An admin may manage tenants; no token and a wrong token are both refused."""
    await parts.tenant("root")
    authenticate = TokenAuthenticator(parts.mirror)
    token, _ = await parts.tenants.create_token("root", is_admin=True)
    assert authenticate(token.token, ADMIN_METHOD).is_admin
    for wrong in (None, "nonsense"):
        with pytest.raises(UnauthenticatedError):
            authenticate(wrong, METHOD)


async def test_before_the_registry_was_read_no_token_is_called_wrong(parts: Parts) -> None:
    """A client must see a reason to try again, not that its token is bad."""
    with pytest.raises(RegistryUnavailableError):
        TokenAuthenticator(parts.mirror)("lk_any", METHOD)


async def test_known_tokens_work_while_the_registry_is_away(parts: Parts, registry: MemoryRegistry) -> None:
    """From memory."""
    await parts.tenant("demo")
    token, _ = await parts.tenants.create_token("demo", is_admin=False)
    registry.is_away = True
    assert TokenAuthenticator(parts.mirror)(token.token, METHOD).tenant == "demo"
    with pytest.raises(RegistryUnavailableError):
        await parts.tenants.create_token("demo", is_admin=False)


async def test_deleting_a_tenant_takes_its_tokens(parts: Parts, registry: MemoryRegistry) -> None:
    """And needs that it has no adapters, and the etag if one is given."""
    await parts.tenant("demo")
    await parts.tenants.create_token("demo", is_admin=False)
    await parts.push("demo/a")
    with pytest.raises(TenantNotEmptyError, match="1 adapters"):
        await parts.tenants.delete("demo", "")
    await parts.deletion.delete(Caller("demo", is_admin=False), "a", "")
    with pytest.raises(EtagMismatchError):
        await parts.tenants.delete("demo", "stale")
    await parts.tenants.delete("demo", (await parts.tenants.get("demo")).etag)
    assert not any(kind is TokenOwner for kind, _ in registry.records)
    with pytest.raises(TenantNotFoundError):
        await parts.tenants.get("demo")


async def test_a_revoked_bootstrap_token_stays_revoked(parts: Parts) -> None:
    """A restart says so, and brings no access back."""
    token = new_token()
    assert await parts.tenants.bootstrap("demo", token)
    await parts.tenants.revoke_token("demo", token.token_id)
    assert not await parts.tenants.bootstrap("demo", token)
    assert (await parts.tenants.get("demo")).value.tokens == ()


async def test_bootstrap_is_idempotent(parts: Parts) -> None:
    """A restart with the same token file adds nothing."""
    token = new_token()
    await parts.tenants.bootstrap("demo", token)
    await parts.tenants.bootstrap("demo", token)
    stored = await parts.tenants.get("demo")
    assert [(t.sha256, t.is_admin) for t in stored.value.tokens] == [(token.sha256, True)]


async def test_tenants_are_listed_by_pages(parts: Parts) -> None:
    """Each once, in order."""
    for name in "edcba":
        await parts.tenant(name)
    seen: list[str] = []
    token = ""
    while True:
        items, token = await parts.tenants.list(2, token)
        seen += [item.value.tenant_id for item in items]
        if not token:
            break
    assert seen == list("abcde")
