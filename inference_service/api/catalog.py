"""What the adapter manager told this node: tenants, tokens, names. A frozen snapshot, swapped whole.

Nothing is persisted: a fresh node waits for its first catalog; one whose manager is away keeps its last.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from inference_service.api.generation_piece import ServedAdapter
from inference_service.domain.adapter import DesiredAdapter
from inference_service.domain.errors import AdapterNotFoundError, StaleGenerationError
from inference_service.domain.tenant import TenantShare
from lorikeet_contract.names import AdapterName, InvalidNameError, parse_reference
from lorikeet_rpc.interceptors import Principal
from lorikeet_rpc.tokens import hash_token

# Of a name that is no name at all; it may have any length.
_SHOWN_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class CatalogAdapter:
    """A name and what it points at. `current_digest` is empty while no revision is ready."""

    name: AdapterName
    current_digest: str
    aliases: Mapping[str, str]
    digests: frozenset[str]


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """One generation of everything. `principals` are keyed by their token's sha256."""

    generation: int
    principals: Mapping[str, Principal]
    tenants: tuple[TenantShare, ...] = ()
    adapters: Mapping[AdapterName, CatalogAdapter] = field(default_factory=dict[AdapterName, CatalogAdapter])
    desired: tuple[DesiredAdapter, ...] = ()
    store_url: str = ""


class Catalog:
    """The current snapshot, and the questions that requests ask of it.

    Args:
        static_principals: tokens known without any manager, by sha256; for benches and tests.
    """

    def __init__(self, static_principals: Mapping[str, Principal] | None = None) -> None:
        self._static = dict(static_principals or {})
        self._snapshot: CatalogSnapshot | None = None

    @property
    def snapshot(self) -> CatalogSnapshot | None:
        """The whole of it; None before the first."""
        return self._snapshot

    @property
    def generation(self) -> int:
        """The snapshot's generation; 0 before the first."""
        return self._snapshot.generation if self._snapshot else 0

    @property
    def has_arrived(self) -> bool:
        """Whether there was a first catalog."""
        return self._snapshot is not None

    def check_generation(self, generation: int) -> None:
        """Raise StaleGenerationError if `replace` would; an equal generation is a repeated push and fine."""
        if generation < self.generation:
            raise StaleGenerationError(
                f"catalog generation {generation} is older than {self.generation}, which this node has",
                metadata={"generation": str(generation), "current": str(self.generation)},
            )

    def replace(self, snapshot: CatalogSnapshot) -> None:
        """Swap the whole catalog in."""
        self.check_generation(snapshot.generation)
        self._snapshot = snapshot

    def principal(self, token: str) -> Principal | None:
        """The owner of a bearer token."""
        sha256 = hash_token(token)
        known = self._snapshot.principals.get(sha256) if self._snapshot else None
        return known or self._static.get(sha256)

    def resolve(self, reference: str, principal: Principal) -> ServedAdapter:
        """The revision that a name stands for now.

        Raises:
            AdapterNotFoundError: nothing of that name is ready for this tenant. Names outside the grammar,
                such as a wrong case or a space at the end, are nobody's; none ever means the base model.
        """
        try:
            wanted = parse_reference(reference, principal.tenant or None)
        except InvalidNameError as error:
            raise AdapterNotFoundError(
                f"{error}; leave adapter out for the base model",
                metadata={"field": "adapter", "value": reference[:_SHOWN_CHARACTERS]},
            ) from error
        is_visible = principal.is_admin or wanted.name.tenant == principal.tenant
        entry = self._snapshot.adapters.get(wanted.name) if self._snapshot and is_visible else None
        if entry is None:
            # The same words whether it is another tenant's or nobody's.
            raise _not_found(f"no adapter {wanted.name.short!r}", wanted.name)
        digest = wanted.digest or (
            entry.aliases.get(wanted.alias, "") if wanted.alias else entry.current_digest
        )
        if digest not in entry.digests:
            what = (
                f"alias {wanted.alias!r}" if wanted.alias else f"revision {wanted.digest or 'that is ready'}"
            )
            raise _not_found(f"adapter {wanted.name.short!r} has no {what}", wanted.name)
        return ServedAdapter(entry.name, digest)


def _not_found(what: str, name: AdapterName) -> AdapterNotFoundError:
    return AdapterNotFoundError(
        f"{what}; `lorikeet adapters list` shows what there is",
        metadata={"field": "adapter", "value": name.short, "adapter": name.short},
    )
