"""Implements `ports.PayloadSource`: the disk cache, and behind it a local store or an object store."""

import threading
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlparse

import obstore
import structlog
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from inference_service.domain.errors import (
    AdapterTooLargeError,
    DiskCacheError,
    PayloadError,
    PayloadMissingError,
)
from inference_service.engine.payload_cache import (
    MANIFEST_NAME,
    PAYLOAD_NAME,
    PayloadCache,
    PayloadReceiver,
    parse_manifest,
    read_revision,
)
from lorikeet_contract.manifest import Manifest

_CHUNK_BYTES = 8 << 20

log = structlog.get_logger(__name__)


class CachedPayloadSource:
    """Finds revisions by digest. `set_store_url` is the engine loop's; everything else is for any thread."""

    def __init__(self, cache: PayloadCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._store_url = ""
        self._store: ObjectStore | None = None

    def set_store_url(self, store_url: str) -> None:
        """Where revisions lie that are not in the cache; "" for nowhere."""
        with self._lock:
            if store_url != self._store_url:
                self._store_url, self._store = store_url, None

    def fetch(self, digest: str, store_path: str) -> tuple[Manifest, str]:
        """See `ports.PayloadSource`."""
        if found := self._cache.find(digest):
            self._cache.trim(keep=digest)
            return found
        store_url = self._store_url
        if not store_url or not store_path:
            raise PayloadMissingError(f"revision {digest} is not on this node, and it knows no store to read")
        if ".." in PurePosixPath(store_path).parts or store_path.startswith("/"):
            raise PayloadError(f"store path {store_path!r} leaves the store")
        try:
            if store_url.startswith("file://"):
                return _read_shared(digest, Path(unquote(urlparse(store_url).path)), store_path)
            return self._copy(digest, store_path)
        except FileNotFoundError as error:
            log.warning("payload.missing", store_path=store_path, store_url=store_url, error=str(error))
            raise PayloadError(f"revision {digest} is missing in the artifact store") from error
        except (BaseError, OSError) as error:
            # The text may hold the operator's URLs and paths, and this one reaches the tenant.
            log.warning("payload.unreadable", store_path=store_path, store_url=store_url, error=str(error))
            raise PayloadError(f"revision {digest} cannot be read from the artifact store") from error

    def cached(self) -> Sequence[str]:
        """See `ports.PayloadSource`."""
        return self._cache.digests()

    def remove(self, digest: str) -> bool:
        """See `ports.PayloadSource`; a store is never touched."""
        return self._cache.remove(digest)

    def make_room(self, num_bytes: int) -> bool:
        """See `ports.PayloadSource`."""
        return self._cache.make_room(num_bytes)

    def _copy(self, digest: str, store_path: str) -> tuple[Manifest, str]:
        store = self._open_store()
        data = bytes(obstore.get(store, f"{store_path}/{MANIFEST_NAME}").bytes())
        num_bytes = parse_manifest(digest, data).payload_bytes
        if num_bytes > self._cache.max_bytes:
            raise AdapterTooLargeError(
                f"adapter {digest} has {num_bytes} bytes, the disk cache at most {self._cache.max_bytes}"
            )
        try:
            self._receive(store, digest, store_path, data)
        except DiskCacheError:
            if not self._cache.make_room(num_bytes):
                raise
            self._receive(store, digest, store_path, data)
        self._cache.trim(keep=digest)
        return read_revision(digest, self._cache.directory / digest)

    def _receive(self, store: ObjectStore, digest: str, store_path: str, manifest: bytes) -> None:
        receiver = PayloadReceiver(str(self._cache.directory), digest, manifest)
        try:
            offset = 0
            payload = obstore.get(store, f"{store_path}/{PAYLOAD_NAME}")
            for chunk in payload.stream(min_chunk_size=_CHUNK_BYTES):
                receiver.write(offset, bytes(chunk))
                offset += len(chunk)
            receiver.commit()
        finally:
            receiver.discard()

    def _open_store(self) -> ObjectStore:
        with self._lock:
            if self._store is None:
                # Credentials come from the environment, as the store's own tools read them.
                self._store = from_url(self._store_url)
            return self._store


def _read_shared(digest: str, root: Path, store_path: str) -> tuple[Manifest, str]:
    """Read a local store in place. One whose directory is not here is another machine's: ask for a stream."""
    directory = root / store_path
    if not directory.parent.is_dir():
        raise PayloadMissingError(f"revision {digest} is not on this node, and the store is not mounted here")
    return read_revision(digest, directory)
