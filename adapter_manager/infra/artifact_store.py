"""The artifact store on obstore: a local directory, S3, GCS or Azure, by the URL's scheme.

    revisions/<digest>/payload          written first
    revisions/<digest>/manifest.json    written last, deleted first: what has none is not there

Credentials come from the cloud's own environment variables or from `config`, never from the URL.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, MemoryStore, ObjectStore, from_url

from adapter_manager.domain.built_revision import BuiltRevision
from adapter_manager.domain.errors import ArtifactMissingError, ArtifactStoreError
from adapter_manager.infra.durable_files import place_file, remove_directory, remove_folder, sync_file
from adapter_manager.infra.intact_files import IntactFiles
from lorikeet_contract.manifest import Manifest

_CLOUD_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
_CHUNK_BYTES = 1 << 20
# With 4 parts of 8 MiB on the way an upload's memory stays small beside what ingest takes.
_PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 4
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RETRY_AFTER_S = 5.0
# A payload streams for as long as it takes: the bound is on silence, not on the whole request. Plain HTTP is
# spoken only to an endpoint that the operator wrote with http://.
_CLIENT: Any = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "24h", "allow_http": True}
_RETRY: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
_PREFIX = "revisions"


class InvalidStoreUrlError(ValueError):
    """A store URL that names no store; raised at start."""


def open_artifact_store(url: str, config: Mapping[str, str] | None = None) -> "ObstoreArtifactStore":
    """Open the store at `url`; nothing is connected yet.

    Args:
        url: file:///dir, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, or memory://.
        config: options of the cloud's client, beside its environment variables (AWS_ENDPOINT_URL, ...).

    Raises:
        InvalidStoreUrlError: another scheme, no absolute directory, or credentials in the URL.
    """
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        raise InvalidStoreUrlError(
            "the store URL may hold neither credentials nor options: use environment variables"
        )
    if parts.scheme == "memory":
        return ObstoreArtifactStore("", MemoryStore(), None)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidStoreUrlError(f"store URL {url!r} names no absolute directory: write file:///dir")
        root = Path(unquote(parts.path))
        # Its absence tells later that the volume is not there.
        (root / _PREFIX).mkdir(parents=True, exist_ok=True)
        return ObstoreArtifactStore(root.as_uri(), LocalStore(root), root)
    if parts.scheme not in _CLOUD_SCHEMES or not parts.netloc:
        raise InvalidStoreUrlError(
            f"store URL {url!r} is not of the form file:///dir, s3://bucket/prefix, gs:// or az://"
        )
    options: Any = dict(config or {})
    store = from_url(url, config=options, client_options=_CLIENT, retry_config=_RETRY)
    return ObstoreArtifactStore(url, store, None)


class ObstoreArtifactStore:
    """Implements `ports.ArtifactStore`."""

    def __init__(self, url: str, store: ObjectStore, root: Path | None) -> None:
        """Use `store`.

        Args:
            url: what nodes get; empty where they cannot open it.
            store: where objects go.
            root: its directory if it is a local one, so that writes can be made durable.
        """
        self.url = url
        self._store = store
        self._root = root
        self._files = None if root is None else IntactFiles()

    async def put(self, built: BuiltRevision) -> bool:
        """Store a revision durably; False where it was there already, whole."""
        digest, manifest = built.digest, built.manifest
        if await self.is_intact(digest):
            return False
        payload, document = _payload(digest), _manifest(digest)
        try:
            await self._clear_way(payload, document)
            if not await self._placed(built.payload_path, payload):
                await obstore.put_async(
                    self._store, payload, built.payload_path,
                    chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE,
                )  # fmt: skip
            size = (await obstore.head_async(self._store, payload))["size"]
            if size != manifest.payload_bytes:
                raise ArtifactStoreError(
                    f"revision {digest}: {size} of {manifest.payload_bytes} payload bytes were stored",
                    retry_after_s=_RETRY_AFTER_S,
                )
            await self._sync(payload)
            await obstore.put_async(self._store, document, manifest.to_json())
            await self._sync(document)
        except (BaseError, OSError) as error:
            raise _unavailable(digest, "stored", error) from error
        return True

    async def is_intact(self, digest: str) -> bool:
        """Whether the revision is there and its content right, so that a push repairs a damaged local file.

        The clouds keep checksums of their own, and reading everything back from there costs money: for them
        sizes are all that is compared.
        """
        if self._root is None or self._files is None:
            return await self.contains(digest)
        if await self._files.are_whole(self._root / _directory(digest), digest):
            return True
        self._check_there(digest, None)
        return False

    async def contains(self, digest: str) -> bool:
        """Whether the revision is there, whole as far as its sizes tell."""
        try:
            manifest = Manifest.from_json(await self.manifest(digest))
            size = (await obstore.head_async(self._store, _payload(digest)))["size"]
        except ArtifactMissingError:
            return False
        except FileNotFoundError as error:
            self._check_there(digest, error)
            return False
        except (BaseError, OSError) as error:
            raise _unavailable(digest, "looked up", error) from error
        return size == manifest.payload_bytes

    async def manifest(self, digest: str) -> bytes:
        """The manifest's exact bytes; their sha256 has been compared with `digest`."""
        try:
            result = await obstore.get_async(self._store, _manifest(digest))
            data = bytes(await result.bytes_async())
        except FileNotFoundError as error:
            self._check_there(digest, error)
            raise _missing(digest) from None
        except (BaseError, OSError) as error:
            raise _unavailable(digest, "read", error) from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise _missing(digest)
        return data

    async def payload(self, digest: str, offset: int = 0) -> AsyncIterator[bytes]:
        """The payload from `offset` to its end, in chunks of at most 1 MiB."""
        try:
            size = (await obstore.head_async(self._store, _payload(digest)))["size"]
            if offset >= size:
                return
            result = await obstore.get_async(
                self._store, _payload(digest), options={"range": {"offset": offset}}
            )
            async for data in result.stream(min_chunk_size=_CHUNK_BYTES):
                view = memoryview(data)
                for start in range(0, len(view), _CHUNK_BYTES):
                    yield bytes(view[start : start + _CHUNK_BYTES])
        except FileNotFoundError as error:
            self._check_there(digest, error)
            raise _missing(digest) from None
        except (BaseError, OSError) as error:
            raise _unavailable(digest, "read", error) from error

    async def delete(self, digest: str) -> None:
        """Remove a revision; nothing happens where there is none."""
        for path in (_manifest(digest), _payload(digest)):
            try:
                await obstore.delete_async(self._store, path)
            except FileNotFoundError:
                continue
            except (BaseError, OSError) as error:
                raise _unavailable(digest, "deleted", error) from error
        if self._root is not None:
            await asyncio.to_thread(remove_directory, self._root / _PREFIX / digest)

    async def digests(self) -> AsyncIterator[str]:
        """All revisions that are there, whole or not, in no order."""
        try:
            listed = await obstore.list_with_delimiter_async(self._store, _PREFIX)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise _unavailable("", "listed", error) from error
        for prefix in listed["common_prefixes"]:
            name = prefix.rstrip("/").rpartition("/")[2]
            if _DIGEST.fullmatch(name):
                yield name

    def _check_there(self, digest: str, error: FileNotFoundError | None) -> None:
        """A local store whose directory is gone (a volume that dropped) is away, and nothing is lost."""
        if self._root is not None and not (self._root / _PREFIX).is_dir():
            error = error or FileNotFoundError(_PREFIX)
            raise _unavailable(digest, "found", error) from error

    async def _clear_way(self, *paths: str) -> None:
        """A folder where a file should be is damage, too, and nothing can be renamed over it."""
        if self._root is not None:
            for path in paths:
                await asyncio.to_thread(remove_folder, self._root / path)

    async def _placed(self, source: Path, path: str) -> bool:
        return self._root is not None and await asyncio.to_thread(place_file, source, self._root / path)

    async def _sync(self, path: str) -> None:
        if self._root is not None:
            await asyncio.to_thread(sync_file, self._root / path, self._root)


def _payload(digest: str) -> str:
    return f"{_directory(digest)}/payload"


def _manifest(digest: str) -> str:
    return f"{_directory(digest)}/manifest.json"


def _directory(digest: str) -> str:
    assert _DIGEST.fullmatch(digest), "digests are checked where they enter"
    return f"{_PREFIX}/{digest}"


def _missing(digest: str) -> ArtifactMissingError:
    return ArtifactMissingError(
        f"revision {digest} is not in the artifact store, or not whole: upload the adapter again",
        metadata={"digest": digest},
    )


def _unavailable(digest: str, what: str, error: Exception) -> ArtifactStoreError:
    # The cause's text may hold URLs and paths of the operator: it goes to the log with the traceback only.
    return ArtifactStoreError(
        f"the artifact store failed ({type(error).__name__}): revision {digest or 'list'} was not {what}",
        metadata={"digest": digest},
        retry_after_s=_RETRY_AFTER_S,
    )
