"""Small revisions as ingest would build them, and an artifact store that keeps them in memory."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

from adapter_manager.domain.built_revision import BuiltRevision
from adapter_manager.domain.errors import ArtifactMissingError, ArtifactStoreError
from adapter_manager.domain.report import MatchedSite, UploadReport
from lorikeet_contract.manifest import Manifest, PayloadDtype, PayloadLayer

BASE_DIGEST = "b" * 64


def make_built(
    directory: Path,
    seed: str = "one",
    *,
    base_digest: str = BASE_DIGEST,
    payload_bytes: int = 4096,
    dtype: PayloadDtype = PayloadDtype.FLOAT32,
) -> BuiltRevision:
    """A revision whose content follows from `seed`; the same seed gives the same digest."""
    block = hashlib.sha256(seed.encode()).digest()
    payload = (block * (payload_bytes // len(block) + 1))[:payload_bytes]
    path = directory / f"{hashlib.sha256(seed.encode()).hexdigest()[:16]}.payload"
    path.write_bytes(payload)
    layer = PayloadLayer(0, 0, payload_bytes, hashlib.sha256(payload).hexdigest(), ())
    manifest = Manifest(base_digest, "5" * 64, dtype, payload_bytes, (layer,))
    site = MatchedSite("q", 0, 4, (2.0,), "linear", 2, payload_bytes)
    return BuiltRevision(manifest, path, UploadReport(2, 2, 0, (site,), ()))


class MemoryArtifacts:
    """Implements adapter_manager.ports.ArtifactStore."""

    url = "memory://artifacts"

    def __init__(self) -> None:
        self.stored: dict[str, tuple[bytes, bytes]] = {}
        self.is_away = False

    async def put(self, built: BuiltRevision) -> bool:
        self._check_away()
        is_new = built.digest not in self.stored
        self.stored[built.digest] = (built.manifest.to_json(), built.payload_path.read_bytes())
        return is_new

    async def is_intact(self, digest: str) -> bool:
        return await self.contains(digest)

    async def contains(self, digest: str) -> bool:
        self._check_away()
        return digest in self.stored

    async def manifest(self, digest: str) -> bytes:
        self._check_away()
        if digest not in self.stored:
            raise ArtifactMissingError(f"revision {digest} is not in the store")
        return self.stored[digest][0]

    async def payload(self, digest: str, offset: int = 0) -> AsyncIterator[bytes]:
        payload = self.stored[digest][1]
        for start in range(offset, len(payload), 1000):
            yield payload[start : start + 1000]

    async def delete(self, digest: str) -> None:
        self._check_away()
        self.stored.pop(digest, None)

    async def digests(self) -> AsyncIterator[str]:
        for digest in tuple(self.stored):
            yield digest

    def _check_away(self) -> None:
        if self.is_away:
            raise ArtifactStoreError("the store is away", retry_after_s=1)
