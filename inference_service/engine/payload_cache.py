"""The node's disk cache of canonical payloads: `<directory>/<digest>/{manifest.json,payload}`.

A revision appears under its digest by one rename, whole or not at all. The engine process reads, trims and
fetches; the front end only adds what the manager streams to it. Layers' checksums are for the host pool.
"""

import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from inference_service.domain.errors import DiskCacheError, PayloadError
from lorikeet_contract.manifest import Manifest

MANIFEST_NAME = "manifest.json"
PAYLOAD_NAME = "payload"
_INCOMING = ".incoming"
# Longer than any upload takes; what is left there after it belongs to a process that died.
_STALE_S = 3600.0
_FULL_RETRY_S = 5.0
_DIGEST_RE = re.compile(r"[0-9a-f]{64}")

log = structlog.get_logger(__name__)


def parse_manifest(digest: str, data: bytes) -> Manifest:
    """Read a manifest that must be the named revision's.

    Raises:
        PayloadError: its sha256 is not the digest, or it is no manifest of a format known here.
    """
    if not _DIGEST_RE.fullmatch(digest):
        raise PayloadError(f"digest {digest[:80]!r} is not 64 characters of lower-case hex")
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise PayloadError(f"the manifest's sha256 is {found}, not {digest}")
    try:
        return Manifest.from_json(data)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PayloadError(f"the manifest of {digest} cannot be read: {error}") from error


def read_revision(digest: str, directory: Path) -> tuple[Manifest, str]:
    """The manifest and the payload's path of a revision that lies in `directory`.

    Raises:
        FileNotFoundError: it is not there.
        PayloadError: it is not what the digest says, as far as the manifest and the size show.
    """
    manifest = parse_manifest(digest, (directory / MANIFEST_NAME).read_bytes())
    payload = directory / PAYLOAD_NAME
    size = payload.stat().st_size
    if size != manifest.payload_bytes:
        wanted = manifest.payload_bytes
        raise PayloadError(f"the payload of {digest} has {size} bytes, its manifest says {wanted}")
    return manifest, str(payload)


class PayloadReceiver:
    """Takes one revision into the cache, chunk by chunk. Ends with `commit` or `discard`."""

    def __init__(self, cache_directory: str, digest: str, manifest: bytes) -> None:
        """Begin.

        Raises:
            PayloadError: the manifest is not the digest's.
            DiskCacheError: the disk is full, or cannot be written; so do `write` and `commit`.
        """
        self.manifest = parse_manifest(digest, manifest)
        self._final = Path(cache_directory) / digest
        self._temporary = Path(cache_directory) / _INCOMING / f"{digest}.{uuid.uuid4().hex}"
        try:
            with _disk_errors_named():
                self._temporary.mkdir(parents=True)
                (self._temporary / MANIFEST_NAME).write_bytes(manifest)
                # Unbuffered: a full disk is told by the write that it fails, and never by `close`.
                self._file = (self._temporary / PAYLOAD_NAME).open("wb", buffering=0)
        except DiskCacheError:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        self._num_bytes = 0

    def write(self, offset: int, data: bytes) -> None:
        """Append a chunk; raises PayloadError if it does not follow the one before or is one too many."""
        if offset != self._num_bytes:
            raise PayloadError(
                f"a chunk at offset {offset} came where {self._num_bytes} was due; send in order"
            )
        if offset + len(data) > self.manifest.payload_bytes:
            raise PayloadError(
                f"more than the {self.manifest.payload_bytes} bytes that the manifest says came"
            )
        view = memoryview(data)
        with _disk_errors_named():
            while view:
                view = view[self._file.write(view) :]
        self._num_bytes += len(data)

    def commit(self) -> None:
        """Make the revision appear in the cache; raises PayloadError if bytes are missing."""
        if self._num_bytes != self.manifest.payload_bytes:
            self.discard()
            wanted = self.manifest.payload_bytes
            raise PayloadError(f"the payload ended after {self._num_bytes} of {wanted} bytes; send it again")
        with _disk_errors_named():
            os.fsync(self._file.fileno())
            self._file.close()
            if not _is_whole(self.manifest.digest, self._final):
                # Damaged ones that could not be removed when that was found out: aside, then away.
                aside = self._temporary.with_name(f"{self._temporary.name}.damaged")
                with suppress(FileNotFoundError):
                    self._final.rename(aside)
                self._temporary.rename(self._final)
                _delete(aside)
        # Somebody else was faster, or it is in place: content of one digest is one content.
        self.discard()

    def discard(self) -> None:
        """Forget what came. Safe to call twice, and after `commit`."""
        self._file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


class PayloadCache:
    """The engine process's view of the cache; any thread."""

    def __init__(self, directory: str, max_bytes: int) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_stale()

    def find(self, digest: str) -> tuple[Manifest, str] | None:
        """A cached revision; one that is damaged is removed and counts as absent."""
        directory = self.directory / digest
        # Asked before, not after: what appears meanwhile appears whole, and must not be taken for damaged.
        if not os.path.lexists(directory):
            return None
        try:
            found = read_revision(digest, directory)
        except (PayloadError, OSError) as error:
            log.warning("payload.damaged", digest=digest, error=str(error))
            self.remove(digest)
            return None
        with suppress(OSError):  # a cache that cannot be written can be read
            os.utime(directory)
        return found

    def digests(self) -> Sequence[str]:
        """Revisions in the cache."""
        return [entry.name for entry in os.scandir(self.directory) if _DIGEST_RE.fullmatch(entry.name)]

    def remove(self, digest: str) -> bool:
        """Delete a revision, whatever lies there under its name. False: nothing was there, or it is still."""
        path = self.directory / digest
        if not _DIGEST_RE.fullmatch(digest) or not os.path.lexists(path):
            return False
        _delete(path)
        if os.path.lexists(path):
            log.error("payload.not_removed", digest=digest)
            return False
        return True

    def trim(self, keep: str) -> None:
        """Delete the revisions used least recently until the bound is kept; `keep` stays."""
        found = self._by_age()
        self._delete_oldest(found, sum(size for _, size, _ in found) - self.max_bytes, keep)

    def make_room(self, num_bytes: int, keep: str = "") -> bool:
        """Delete the revisions used least recently until this much was freed, as far as there is as much."""
        return self._delete_oldest(self._by_age(), num_bytes, keep) <= 0

    def _by_age(self) -> list[tuple[float, int, str]]:
        found: list[tuple[float, int, str]] = []
        for digest in self.digests():
            directory = self.directory / digest
            with suppress(OSError):  # another thread removed it meanwhile, or it is no directory
                found.append((directory.stat().st_mtime, (directory / PAYLOAD_NAME).stat().st_size, digest))
        return sorted(found)

    def _delete_oldest(self, found: list[tuple[float, int, str]], excess: int, keep: str) -> int:
        """Returns what is left of `excess`."""
        for _, size, digest in found:
            if excess <= 0:
                break
            if digest != keep and self.remove(digest):
                excess -= size
        return excess

    def _remove_stale(self) -> None:
        incoming = self.directory / _INCOMING
        if incoming.is_dir():
            for entry in os.scandir(incoming):
                if time.time() - entry.stat().st_mtime > _STALE_S:
                    shutil.rmtree(entry.path, ignore_errors=True)


def _is_whole(digest: str, directory: Path) -> bool:
    """Whether a revision is there, every byte as its manifest says."""
    try:
        manifest, path = read_revision(digest, directory)
        with Path(path).open("rb") as file:
            for layer in manifest.layers:
                file.seek(layer.offset)
                if hashlib.sha256(file.read(layer.num_bytes)).hexdigest() != layer.sha256:
                    return False
    except (PayloadError, OSError):
        return False
    return True


def _delete(path: Path) -> None:
    """Whatever lies there, as far as it can be deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def _disk_errors_named() -> Generator[None]:
    try:
        yield
    except OSError as error:
        log.error("payload.not_written", error=str(error))  # noqa: TRY400 (the words say what to mend)
        # No path: this text reaches the tenant.
        raise DiskCacheError(
            f"this node's disk cache cannot take it: {error.strerror}", retry_after_s=_FULL_RETRY_S
        ) from error
