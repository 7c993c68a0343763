"""A catalog's pages put together; nothing of them counts until the last is there."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from inference_service.api.catalog import CatalogAdapter, CatalogSnapshot
from inference_service.domain.adapter import DesiredAdapter
from inference_service.domain.errors import InvalidRequestError
from inference_service.domain.tenant import TenantShare
from lorikeet_contract.names import AdapterName
from lorikeet_rpc.interceptors import Principal
from lorikeet_rpc.tokens import token_id_of


@dataclass(frozen=True, slots=True)
class CatalogTenant:
    """A tenant with the hashes of its tokens; admin tokens may act for every tenant."""

    share: TenantShare
    token_sha256: frozenset[str]
    admin_token_sha256: frozenset[str]


@dataclass(frozen=True, slots=True)
class CatalogPage:
    """A part of one generation."""

    generation: int
    page: int
    is_last: bool
    tenants: tuple[CatalogTenant, ...]
    adapters: tuple[CatalogAdapter, ...]
    desired: tuple[DesiredAdapter, ...]
    store_url: str


async def read_catalog(pages: AsyncIterator[CatalogPage]) -> CatalogSnapshot:
    """The whole catalog.

    Raises:
        InvalidRequestError: pages are missing, out of order or of different generations.
    """
    tenants: dict[str, TenantShare] = {}
    principals: dict[str, Principal] = {}
    adapters: dict[AdapterName, CatalogAdapter] = {}
    desired: dict[str, DesiredAdapter] = {}
    generation, store_url, expected = 0, "", 0
    async for page in pages:
        if page.page != expected or (expected and page.generation != generation):
            raise InvalidRequestError(
                f"catalog page {page.page} of generation {page.generation} came where page {expected} of "
                f"generation {generation if expected else 'any'} was due: send all pages in order",
                metadata={"field": "page", "value": str(page.page)},
            )
        generation, expected = page.generation, expected + 1
        store_url = page.store_url or store_url
        for tenant in page.tenants:
            tenants[tenant.share.tenant] = tenant.share
            principals |= _principals(tenant)
        adapters |= {adapter.name: adapter for adapter in page.adapters}
        desired |= {wanted.source.digest: wanted for wanted in page.desired}
        if page.is_last:
            return CatalogSnapshot(
                generation, principals, tuple(tenants.values()), adapters, tuple(desired.values()), store_url
            )
    raise InvalidRequestError(
        f"the catalog ended after {expected} pages without its last page: send it again from the first",
        metadata={"field": "last_page"},
    )


def _principals(tenant: CatalogTenant) -> dict[str, Principal]:
    name = tenant.share.tenant
    return {
        sha256: Principal(name, sha256 in tenant.admin_token_sha256, token_id_of(sha256))
        for sha256 in tenant.token_sha256 | tenant.admin_token_sha256
    }
