"""Digests back to the names that clients use."""

from collections.abc import Iterable

from inference_service.api.catalog import Catalog, CatalogAdapter, CatalogSnapshot

# Of one list; the names of one adapter's aliases may be many.
_MAX_NAMES = 256
_SHORT_DIGEST = 12


class AdapterNames:
    """For one reader at a time: keeps what it worked out of the catalog until that changes."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._snapshot: CatalogSnapshot | None = None
        self._by_digest: dict[str, tuple[str, ...]] = {}

    def of(self, digests: Iterable[str]) -> list[str]:
        """Every name that stands for one of the revisions: tenant/name, tenant/name@alias.

        A revision that only its resource name reaches has that one. At most 256 names.
        """
        snapshot = self._catalog.snapshot
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._by_digest = _names_by_digest(snapshot.adapters.values() if snapshot else ())
        names = [name for digest in digests for name in self._by_digest.get(digest, ())]
        return names[:_MAX_NAMES]


def short_digest(digest: str) -> str:
    """As much of a digest as people read."""
    return digest[:_SHORT_DIGEST]


def _names_by_digest(adapters: Iterable[CatalogAdapter]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for adapter in adapters:
        short = adapter.name.short
        if adapter.current_digest:
            found.setdefault(adapter.current_digest, []).append(short)
        for alias, digest in sorted(adapter.aliases.items()):
            found.setdefault(digest, []).append(f"{short}@{alias}")
        for digest in adapter.digests - {adapter.current_digest, *adapter.aliases.values()}:
            found.setdefault(digest, []).append(adapter.name.revision(digest))
    return {digest: tuple(names) for digest, names in found.items()}
