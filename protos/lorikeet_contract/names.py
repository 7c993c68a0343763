"""Resource names: tenants/{t}/adapters/{a}/revisions/{digest}, and the short forms t/a and t/a@alias."""

import re
from dataclasses import dataclass

_SEGMENT = r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
_DIGEST = r"[0-9a-f]{64}"
_SEGMENT_RE = re.compile(_SEGMENT)
_RESOURCE_RE = re.compile(rf"tenants/({_SEGMENT})/adapters/({_SEGMENT})(?:/revisions/({_DIGEST}))?")
_SHORT_RE = re.compile(rf"(?:({_SEGMENT})/)?({_SEGMENT})(?:@({_SEGMENT}))?")

# A name that would read as the base model or as a part of a resource name.
RESERVED = frozenset({"base", "tenants", "adapters", "revisions"})


class InvalidNameError(ValueError):
    """A name outside the grammar; the message is safe to show (control characters are escaped)."""


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A tenant's adapter."""

    tenant: str
    adapter: str

    def __str__(self) -> str:
        return f"tenants/{self.tenant}/adapters/{self.adapter}"

    @property
    def short(self) -> str:
        """The form people type: t/a."""
        return f"{self.tenant}/{self.adapter}"

    def revision(self, digest: str) -> str:
        """The resource name of one revision."""
        return f"{self}/revisions/{digest}"


@dataclass(frozen=True, slots=True)
class AdapterReference:
    """What a client wrote: an adapter, by its current revision, an alias or a digest. At most one is set."""

    name: AdapterName
    alias: str | None = None
    digest: str | None = None


def parse_reference(text: str, default_tenant: str | None = None) -> AdapterReference:
    """Read any of the documented forms.

    Args:
        text: "a", "t/a", either with "@alias", or a resource name with or without a revision.
        default_tenant: the tenant of a bare "a" (the caller's own).

    Raises:
        InvalidNameError: `text` is none of these, or names no tenant and there is no default.
    """
    if match := _RESOURCE_RE.fullmatch(text):
        tenant, adapter, digest = match.groups()
        return AdapterReference(AdapterName(tenant, _free(adapter)), digest=digest)
    if match := _SHORT_RE.fullmatch(text):
        tenant, adapter, alias = match.groups()
        tenant = tenant or default_tenant
        if tenant is None:
            raise InvalidNameError(f"adapter name {text!a} names no tenant; write tenant/{text}")
        return AdapterReference(AdapterName(tenant, _free(adapter)), alias=alias)
    shown = text if len(text) <= 80 else text[:77] + "..."
    raise InvalidNameError(
        f"adapter name {shown!a} is not of the form name, tenant/name, tenant/name@alias or "
        "tenants/{tenant}/adapters/{name}/revisions/{digest}; a name has 1 to 63 characters of [a-z0-9._-] "
        "and begins and ends with a letter or digit"
    )


def check_segment(text: str, what: str) -> str:
    """Return `text` if it is a valid tenant id, adapter id or alias, else raise InvalidNameError."""
    if not _SEGMENT_RE.fullmatch(text) or text in RESERVED:
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise InvalidNameError(
            f"{what} {shown!a} must have 1 to 63 characters of [a-z0-9._-], begin and end with a letter or "
            f"digit, and be none of {', '.join(sorted(RESERVED))}"
        )
    return text


def _free(adapter: str) -> str:
    if adapter in RESERVED:
        raise InvalidNameError(f"adapter name {adapter!r} is reserved")
    return adapter
