"""One stream's hold on a staged upload: it appends bytes, checks them, and has the payload built."""

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from adapter_manager.application.ingest.adapter_files import AdapterFiles
from adapter_manager.application.ingest.adapter_ingest import ingest_adapter
from adapter_manager.application.ingest.limits import IngestLimits, IngestTarget
from adapter_manager.application.ingest.upload_files import UploadFile
from adapter_manager.domain.built_revision import BuiltRevision
from adapter_manager.domain.errors import (
    InvalidAdapterError,
    InvalidRequestError,
    LimitExceededError,
    UploadConflictError,
)
from adapter_manager.domain.layout_options import LayoutOptions
from adapter_manager.domain.shown_text import shown

FILES_DIRECTORY = "files"
PAYLOAD_PREFIX = "payload-"
_REHASH_BYTES = 1 << 20


class _StagedFile:
    """A file that grows by appending. What an earlier stream left in it is hashed only when all is there."""

    def __init__(self, path: Path, announced: UploadFile) -> None:
        self.announced = announced
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._sha256 = hashlib.sha256()
        self._hashed = 0
        self.received = os.fstat(self._fd).st_size

    def append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, self.received)
            if self._hashed == self.received:
                self._sha256.update(view[:count])
                self._hashed += count
            self.received += count
            view = view[count:]

    def is_intact(self) -> bool:
        while data := os.pread(self._fd, _REHASH_BYTES, self._hashed):
            self._sha256.update(data)
            self._hashed += len(data)
        return self._sha256.hexdigest() == self.announced.sha256

    def close(self) -> None:
        os.close(self._fd)


class UploadSession:
    """The holder of a staged upload until it is discarded, released, or another stream takes it over.

    Methods may be called from any thread; they wait for each other. After a takeover all but `discard` and
    `release` raise UploadConflictError, and these two leave the files to the new holder.
    """

    def __init__(
        self,
        directory: Path,
        files: Sequence[UploadFile],
        limits: IngestLimits,
        on_close: Callable[["UploadSession", bool], None],
        *,
        is_resumable: bool,
    ) -> None:
        """Hold the upload in `directory`, which exists; `on_close(self, keep)` hears of its end once."""
        self._directory = directory
        self._limits = limits
        self._on_close = on_close
        self._is_resumable = is_resumable
        self._lock = threading.Lock()
        # Apart, so that a takeover need not wait for a build; an end of the hold does.
        self._build_lock = threading.Lock()
        self._is_taken_over = False
        self._is_closed = False
        # A stream that was taken over may still be building: each holder has a payload of its own.
        self._payload_path = directory / f"{PAYLOAD_PREFIX}{secrets.token_hex(8)}"
        self._files = {f.name: _StagedFile(directory / FILES_DIRECTORY / f.name, f) for f in files}

    @property
    def received_bytes(self) -> Mapping[str, int]:
        """Bytes of each file that are here; the next chunk begins there."""
        with self._lock:
            return {name: file.received for name, file in self._files.items()}

    def write(self, file_name: str, offset: int, data: bytes) -> None:
        """Append a chunk.

        Raises:
            UploadConflictError: it does not follow the last one, or another stream holds the upload.
            InvalidRequestError: no such file was announced, or it would become longer than announced.
            LimitExceededError: the disk takes no more.
        """
        with self._lock:
            self._check_held()
            file = self._files.get(file_name)
            if file is None:
                raise InvalidRequestError(
                    f"file {shown(file_name)} was not announced in the header",
                    metadata={"field": "chunk.file_name"},
                )
            if offset != file.received:
                raise UploadConflictError(
                    f"file {file_name} goes on at byte {file.received}, the chunk is for byte {offset}: "
                    "ask GetUpload where to go on",
                    metadata={"file": file_name, "received_bytes": str(file.received)},
                )
            if offset + len(data) > file.announced.size_bytes:
                raise InvalidRequestError(
                    f"file {file_name} was announced with {file.announced.size_bytes} bytes, the chunk ends "
                    f"at {offset + len(data)}",
                    metadata={"field": "chunk.data", "file": file_name},
                )
            try:
                file.append(data)
            except OSError as error:
                raise LimitExceededError(
                    f"the upload could not be staged: {error.strerror}",
                    metadata={"limit": "staging disk"},
                    retry_after_s=30.0,
                ) from error

    def finish(self) -> None:
        """All files must be complete and what their digests say.

        Raises:
            InvalidRequestError: bytes are missing.
            InvalidAdapterError: a digest differs; the upload is of no more use.
            UploadConflictError: another stream holds the upload.
        """
        with self._lock:
            self._check_held()
            for name, file in self._files.items():
                if file.received != file.announced.size_bytes:
                    raise InvalidRequestError(
                        f"file {name} has {file.received} of {file.announced.size_bytes} bytes: send more",
                        metadata={"field": "chunk", "file": name, "received_bytes": f"{file.received}"},
                    )
            for name, file in self._files.items():
                if not file.is_intact():
                    raise InvalidAdapterError(
                        f"file {name} does not have the sha256 that was announced: it changed on the way or "
                        "while it was read; upload it again",
                        metadata={"problem": "CHECKSUM", "file": name},
                    )

    def build(self, target: IngestTarget, options: LayoutOptions | None = None) -> BuiltRevision:
        """Check the adapter and write its payload beside the staged files, to be stored before `discard`.

        Raises:
            InvalidAdapterError, LimitExceededError: see `ingest_adapter`.
            UploadConflictError: another stream holds the upload.
        """
        with self._build_lock:
            with self._lock:
                self._check_held()
            with AdapterFiles.open(self._directory / FILES_DIRECTORY) as files:
                return ingest_adapter(files, target, self._payload_path, options, self._limits)

    def release(self) -> None:
        """End the hold and keep what was received, if there is any and the upload can be resumed."""
        self._close(keep=self._is_resumable and any(self.received_bytes.values()))

    def discard(self) -> None:
        """End the hold and remove everything."""
        self._close(keep=False)

    def take_over(self) -> None:
        """Called for the new holder, before it opens the files: later writes of this one are refused."""
        self._is_taken_over = True
        with self._lock:
            # Waits for a chunk that is being written; from here on this session writes nothing.
            pass

    def _check_held(self) -> None:
        if self._is_taken_over or self._is_closed:
            raise UploadConflictError("another stream has taken this upload over")

    def _close(self, *, keep: bool) -> None:
        with self._build_lock, self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for file in self._files.values():
                file.close()
            self._payload_path.unlink(missing_ok=True)
            if not keep and not self._is_taken_over:
                shutil.rmtree(self._directory, ignore_errors=True)
        self._on_close(self, keep)
