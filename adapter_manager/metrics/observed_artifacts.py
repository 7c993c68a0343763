"""An ArtifactStore that times another and counts its errors."""

import time
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram

from adapter_manager.domain.built_revision import BuiltRevision
from adapter_manager.domain.errors import ArtifactStoreError
from adapter_manager.ports import ArtifactStore

_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_OPERATIONS = ("put", "is_intact", "contains", "manifest", "payload", "delete", "digests")


class ObservedArtifacts:
    """Implements `ports.ArtifactStore`. A payload's time is that of its reader, too."""

    def __init__(self, store: ArtifactStore, registry: CollectorRegistry) -> None:
        self._store = store
        self._seconds = Histogram(
            "lorikeet_artifact_store_duration_seconds",
            "Operations that succeeded; payload: from its first byte to its last, as its reader took them.",
            ("operation",),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._errors = Counter(
            "lorikeet_artifact_store_errors",
            "Operations that failed, by the error's reason.",
            ("operation", "reason"),
            registry=registry,
        )
        for operation in _OPERATIONS:
            self._seconds.labels(operation)

    @property
    def url(self) -> str:
        """See ports.ArtifactStore."""
        return self._store.url

    async def put(self, built: BuiltRevision) -> bool:
        """See ports.ArtifactStore."""
        with self._observed("put"):
            return await self._store.put(built)

    async def is_intact(self, digest: str) -> bool:
        """See ports.ArtifactStore."""
        with self._observed("is_intact"):
            return await self._store.is_intact(digest)

    async def contains(self, digest: str) -> bool:
        """See ports.ArtifactStore."""
        with self._observed("contains"):
            return await self._store.contains(digest)

    async def manifest(self, digest: str) -> bytes:
        """See ports.ArtifactStore."""
        with self._observed("manifest"):
            return await self._store.manifest(digest)

    async def payload(self, digest: str, offset: int = 0) -> AsyncIterator[bytes]:
        """See ports.ArtifactStore."""
        with self._observed("payload"):
            async for chunk in self._store.payload(digest, offset):
                yield chunk

    async def delete(self, digest: str) -> None:
        """See ports.ArtifactStore."""
        with self._observed("delete"):
            await self._store.delete(digest)

    async def digests(self) -> AsyncIterator[str]:
        """See ports.ArtifactStore."""
        with self._observed("digests"):
            async for digest in self._store.digests():
                yield digest

    @contextmanager
    def _observed(self, operation: str) -> Generator[None]:
        begun_s = time.perf_counter()
        try:
            yield
        except ArtifactStoreError as error:
            self._errors.labels(operation, error.reason).inc()
            raise
        self._seconds.labels(operation).observe(time.perf_counter() - begun_s)
