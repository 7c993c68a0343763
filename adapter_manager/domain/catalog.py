"""The catalog: all that nodes need to know of the registry, at one generation. Pure."""

from dataclasses import dataclass, field
from types import MappingProxyType

from adapter_manager.domain.adapter import Adapter, DigestUse, Revision
from adapter_manager.domain.node import BaseModel, ResidencyTier
from adapter_manager.domain.tenant import Tenant, TokenOwner


@dataclass(frozen=True, slots=True)
class RegistryView:
    """Everything that is registered, as of one generation of one registry (its epoch).

    Mappings are replaced, never changed, so a view that somebody holds stays what it was.
    """

    epoch: str = ""
    generation: int = 0
    tenants: MappingProxyType[str, Tenant] = field(default_factory=lambda: MappingProxyType({}))
    tokens: MappingProxyType[str, TokenOwner] = field(default_factory=lambda: MappingProxyType({}))
    adapters: MappingProxyType[str, Adapter] = field(default_factory=lambda: MappingProxyType({}))
    uses: MappingProxyType[str, DigestUse] = field(default_factory=lambda: MappingProxyType({}))
    models: MappingProxyType[str, BaseModel] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class WantedRevision:
    """What the manager wants of one node for one READY revision."""

    digest: str
    payload_bytes: int
    tier: ResidencyTier
    is_pinned: bool = False
    # Why a wanted revision cannot be wanted of this node (no room, another base model); empty otherwise.
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class NodeCatalog:
    """One node's catalog: only adapters made for its base model, and what it should hold."""

    generation: int
    tenants: tuple[Tenant, ...]
    adapters: tuple[Adapter, ...]
    revisions: tuple[WantedRevision, ...]
    store_url: str
    _by_digest: dict[str, WantedRevision] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_digest.update((r.digest, r) for r in self.revisions)

    def wish(self, digest: str) -> WantedRevision | None:
        """What is wanted for a revision; None where it is not for this node's base model."""
        return self._by_digest.get(digest)


def ready_for_base(adapter: Adapter, base_digest: str) -> tuple[Revision, ...]:
    """The adapter's READY revisions that were made for this base model."""
    return tuple(r for r in adapter.ready if r.base_digest == base_digest)
