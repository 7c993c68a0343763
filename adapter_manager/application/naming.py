"""From the names that callers write to adapters and revisions that exist for them."""

from adapter_manager.domain.adapter import Adapter, Revision, RevisionState
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.errors import (
    AdapterNotFoundError,
    AdapterNotReadyError,
    InvalidRequestError,
    TenantNotFoundError,
)
from lorikeet_contract.names import (
    AdapterName,
    AdapterReference,
    InvalidNameError,
    check_segment,
    parse_reference,
)


def reference(caller: Caller, text: str, field: str = "name") -> AdapterReference:
    """Parse any form of name; a bare one is of the caller's tenant.

    Raises:
        InvalidRequestError: outside the grammar.
        AdapterNotFoundError: another tenant's, which for this caller does not exist.
    """
    try:
        parsed = parse_reference(text, caller.tenant)
    except InvalidNameError as error:
        raise InvalidRequestError(str(error), metadata={"field": field}) from None
    if not caller.may_see(parsed.name.tenant):
        raise not_found(parsed.name)
    return parsed


def whole_adapter(caller: Caller, text: str, field: str = "name") -> AdapterName:
    """The same where only an adapter as a whole is meant."""
    parsed = reference(caller, text, field)
    if parsed.alias is not None or parsed.digest is not None:
        raise InvalidRequestError(
            f"{field} {text!r} names one revision; here give the adapter, {parsed.name.short!r}",
            metadata={"field": field},
        )
    return parsed.name


def parent_tenant(caller: Caller, parent: str) -> str | None:
    """The tenant whose adapters to list; None for an admin who lists all.

    Raises:
        TenantNotFoundError: another tenant, for whom this caller may not ask.
    """
    if not parent:
        return None if caller.is_admin else caller.tenant
    tenant = parent.removeprefix("tenants/")
    try:
        check_segment(tenant, "tenant id")
    except InvalidNameError as error:
        raise InvalidRequestError(str(error), metadata={"field": "parent"}) from None
    if not caller.may_see(tenant):
        raise TenantNotFoundError(f"there is no tenant {tenant!r}", metadata={"tenant": tenant})
    return tenant


def ready_revision(adapter: Adapter, wanted: AdapterReference) -> Revision:
    """The READY revision that a name answers with.

    Raises:
        AdapterNotFoundError: no such alias or revision.
        AdapterNotReadyError: it is there, but not READY.
    """
    if wanted.alias is not None:
        digest = adapter.alias(wanted.alias)
        if digest is None:
            known = ", ".join(a for a, _ in adapter.aliases) or "none"
            raise AdapterNotFoundError(
                f"adapter {adapter.name.short!r} has no alias {wanted.alias!r}; it has: {known}",
                metadata={"adapter": adapter.name.short, "alias": wanted.alias},
            )
    else:
        digest = wanted.digest or adapter.current_digest
    if not digest:
        raise AdapterNotReadyError(
            f"adapter {adapter.name.short!r} has no READY revision yet; wait for its upload, or repeat it",
            metadata={"adapter": adapter.name.short},
        )
    revision = adapter.revision(digest)
    if revision is None:
        raise AdapterNotFoundError(
            f"adapter {adapter.name.short!r} has no revision {digest}",
            metadata={"adapter": adapter.name.short, "digest": digest},
        )
    if revision.state is not RevisionState.READY:
        raise AdapterNotReadyError(
            f"revision {digest} of {adapter.name.short!r} is {revision.state.value.upper()}"
            + (f": {revision.failure}" if revision.failure else ""),
            metadata={"adapter": adapter.name.short, "digest": digest, "state": revision.state.value},
        )
    return revision


def not_found(name: AdapterName) -> AdapterNotFoundError:
    """The one answer for adapters that are not there and for those that are somebody else's."""
    return AdapterNotFoundError(f"there is no adapter {name.short!r}", metadata={"adapter": name.short})
