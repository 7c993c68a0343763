"""Where uploads wait until they are whole: a directory each, found by tenant, adapter and request id."""

import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from adapter_manager.application.ingest.limits import IngestLimits
from adapter_manager.application.ingest.upload_files import UploadFile, check_upload_files
from adapter_manager.application.ingest.upload_session import (
    FILES_DIRECTORY,
    PAYLOAD_PREFIX,
    UploadSession,
)
from adapter_manager.domain.errors import LimitExceededError, UploadConflictError, UploadNotFoundError

_ANNOUNCEMENT = "upload.json"


class _Announcement(msgspec.Struct):
    """What an upload's directory says of it, also to a later process."""

    tenant: str
    files: list[UploadFile]

    @property
    def num_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)


class UploadStaging:
    """Staged uploads below one directory that this process alone uses. Thread-safe."""

    def __init__(self, directory: Path, limits: IngestLimits | None = None) -> None:
        """Use `directory`, made if need be; what an earlier process left there can be resumed."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._limits = limits or IngestLimits()
        self._lock = threading.Lock()
        self._holders: dict[str, UploadSession] = {}
        self._staged: dict[str, _Announcement] = {}
        for path in directory.iterdir():
            announcement = _read_announcement(path)
            if announcement is None:
                shutil.rmtree(path, ignore_errors=True)
                continue
            self._staged[path.name] = announcement
            for payload in path.glob(f"{PAYLOAD_PREFIX}*"):  # a resumed upload is built anew
                payload.unlink(missing_ok=True)

    def open(self, tenant: str, adapter: str, request_id: str, files: Sequence[UploadFile]) -> UploadSession:
        """Begin an upload, or go on with the one of this request id; its former stream is cut off.

        Args:
            tenant: the owner.
            adapter: the adapter's id.
            request_id: names the upload among the tenant's; "" for one that cannot be resumed.
            files: what will be sent.

        Raises:
            InvalidAdapterError, InvalidRequestError, LimitExceededError: see `check_upload_files`; and where
                the disk takes no more.
            UploadConflictError: the request id was begun with other files.
        """
        check_upload_files(files, self._limits)
        key = _key(tenant, adapter, request_id)
        with self._lock:
            path = self._directory / key
            former = self._holders.pop(key, None)
            if former is not None:
                former.take_over()
            earlier = _read_announcement(path)
            if earlier is None:
                try:
                    self._begin(path, _Announcement(tenant, list(files)))
                except OSError as error:
                    shutil.rmtree(path, ignore_errors=True)
                    raise _no_disk(error) from error
            elif sorted(earlier.files, key=_by_name) != sorted(files, key=_by_name):
                raise UploadConflictError(
                    "request_id belongs to an upload of other files: use a new request_id",
                    metadata={"field": "header.request_id"},
                )
            try:
                session = UploadSession(
                    path, files, self._limits, partial(self._closed, key), is_resumable=bool(request_id)
                )
            except OSError as error:
                raise _no_disk(error) from error
            self._holders[key] = session
            return session

    def received_bytes(self, tenant: str, adapter: str, request_id: str) -> Mapping[str, int]:
        """Where each file of a broken upload goes on.

        Raises:
            UploadNotFoundError: there is none.
        """
        path = self._directory / _key(tenant, adapter, request_id)
        announcement = _read_announcement(path) if request_id else None
        if announcement is None:
            raise UploadNotFoundError(
                "no upload of this request_id waits to be resumed: begin anew",
                metadata={"field": "request_id"},
            )
        return _received(path, announcement)

    def discard(self, tenant: str, adapter: str, request_id: str) -> None:
        """Remove what is kept of an upload that was completed, unless a stream holds it."""
        key = _key(tenant, adapter, request_id)
        with self._lock:
            if key not in self._holders:
                shutil.rmtree(self._directory / key, ignore_errors=True)
                self._staged.pop(key, None)

    def expire(self, older_than_s: float) -> int:
        """Remove uploads that no stream holds and nothing was written to for that long; returns how many."""
        oldest = time.time() - older_than_s
        with self._lock:
            idle = [
                path
                for path in self._directory.iterdir()
                if path.name not in self._holders and _last_change(path) < oldest
            ]
            for path in idle:
                shutil.rmtree(path, ignore_errors=True)
                self._staged.pop(path.name, None)
        return len(idle)

    def _begin(self, path: Path, announcement: _Announcement) -> None:
        """Make an upload's directory if there is room for it.

        A tenant is held to what its streams announce, so that announcing costs nobody else; all together are
        held to what lies on the disk.
        """
        new = announcement.num_bytes
        own = sum(self._held_bytes(k) for k, a in self._staged.items() if a.tenant == announcement.tenant)
        _check_room("max_tenant_staged_bytes", own + new, self._limits.max_tenant_staged_bytes)
        received = sum(self._received_bytes(key) for key in self._staged)
        _check_room("max_staged_bytes", received + new, self._limits.max_staged_bytes)
        (path / FILES_DIRECTORY).mkdir(parents=True, mode=0o700)
        written = path / f"{_ANNOUNCEMENT}.new"
        written.write_bytes(msgspec.json.encode(announcement))
        written.rename(path / _ANNOUNCEMENT)
        self._staged[path.name] = announcement

    def _held_bytes(self, key: str) -> int:
        """What an upload may still become while a stream holds it; what it is once none does."""
        return self._staged[key].num_bytes if key in self._holders else self._received_bytes(key)

    def _received_bytes(self, key: str) -> int:
        return sum(_received(self._directory / key, self._staged[key]).values())

    def _closed(self, key: str, session: UploadSession, keep: bool) -> None:
        with self._lock:
            if self._holders.get(key) is session:
                del self._holders[key]
                if not keep:
                    self._staged.pop(key, None)


def _key(tenant: str, adapter: str, request_id: str) -> str:
    if not request_id:
        return f"once-{secrets.token_hex(16)}"
    return hashlib.sha256(json.dumps([tenant, adapter, request_id]).encode()).hexdigest()


def _read_announcement(path: Path) -> _Announcement | None:
    try:
        return msgspec.json.decode((path / _ANNOUNCEMENT).read_bytes(), type=_Announcement)
    except (OSError, msgspec.DecodeError):
        return None


def _received(path: Path, announcement: _Announcement) -> dict[str, int]:
    return {f.name: _size(path / FILES_DIRECTORY / f.name) for f in announcement.files}


def _check_room(limit: str, value: int, maximum: int) -> None:
    if value > maximum:
        raise LimitExceededError(
            f"with this upload {value} bytes would be staged, {limit} is {maximum}: try again later",
            metadata={"limit": limit, "value": str(value), "maximum": str(maximum)},
            retry_after_s=30.0,
        )


def _no_disk(error: OSError) -> LimitExceededError:
    return LimitExceededError(
        f"the upload could not be staged: {error.strerror}",
        metadata={"limit": "staging disk"},
        retry_after_s=30.0,
    )


def _by_name(file: UploadFile) -> str:
    return file.name


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _last_change(path: Path) -> float:
    newest = 0.0
    for directory, _, names in os.walk(path):
        for name in [*names, "."]:
            try:
                newest = max(newest, (Path(directory) / name).stat().st_mtime)
            except FileNotFoundError:
                continue
    return newest
