"""Uploads from their first message to a READY revision: who may, against which model, once and only once."""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from adapter_manager.application.adapters import check_alias, check_digest
from adapter_manager.application.background import on_thread
from adapter_manager.application.ingest import IngestTarget, UploadFile, UploadSession, UploadStaging
from adapter_manager.application.models import ModelDirectory
from adapter_manager.application.naming import whole_adapter
from adapter_manager.application.registration import Registration, UploadIdentity
from adapter_manager.domain.adapter import Revision, RevisionState, check_num_aliases
from adapter_manager.domain.built_revision import BuiltRevision
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.errors import (
    InvalidAdapterError,
    InvalidRequestError,
    LimitExceededError,
    RequestIdReusedError,
    UploadNotFoundError,
)
from adapter_manager.domain.layout_options import LayoutOptions
from adapter_manager.domain.report import UploadReport
from adapter_manager.ports import ArtifactStore, Clock, IngestStage, Registry, UploadObserver
from lorikeet_contract.names import AdapterName

log = structlog.get_logger(__name__)

_MAX_REQUEST_ID = 128


@dataclass(frozen=True, slots=True)
class UploadHeader:
    """An upload's first message."""

    adapter: str
    aliases: tuple[str, ...]
    is_validate_only: bool
    request_id: str
    files: tuple[UploadFile, ...]
    options: LayoutOptions
    base_digest: str = ""


@dataclass(frozen=True, slots=True)
class UploadResult:
    """What an upload came to. A validate_only one's revision is PENDING: it was never stored.

    `is_mended`: the revision was there, but its files were damaged or lost, and were written again.
    """

    name: AdapterName
    revision: Revision
    report: UploadReport | None
    is_created: bool
    is_mended: bool = False


class Upload:
    """One stream's upload. `result` is set from the start where an earlier one was the same."""

    def __init__(self, service: "UploadService", identity: UploadIdentity, header: UploadHeader) -> None:
        self.result: UploadResult | None = None
        self.identity = identity
        self.header = header
        self.session: UploadSession | None = None
        self.must_discard = header.is_validate_only
        self._service = service

    async def write(self, file_name: str, offset: int, data: bytes) -> None:
        """Take the next chunk; it must follow the last one of its file."""
        if self.session:
            await on_thread(self.session.write, file_name, offset, data)
            self._service.observer.received(len(data))

    async def finish(self) -> UploadResult:
        """All chunks are here: check, convert, store and register."""
        if self.result is None:
            self.result = await self._service.complete(self)
        return self.result


class UploadService:
    """Opens uploads and completes them."""

    def __init__(
        self,
        registry: Registry,
        registration: Registration,
        store: ArtifactStore,
        models: ModelDirectory,
        staging: UploadStaging,
        clock: Clock,
        observer: UploadObserver,
        concurrent_builds: int = 2,
    ) -> None:
        self.observer = observer
        self._registry = registry
        self._registration = registration
        self._store = store
        self._models = models
        self._staging = staging
        self._clock = clock
        # A build reads and writes the adapter once; more at a time only fight for the disk.
        self._building = asyncio.Semaphore(concurrent_builds)

    @asynccontextmanager
    async def open(self, caller: Caller, header: UploadHeader) -> AsyncGenerator[Upload]:
        """Check the header and begin, or resume. What a broken stream sent is kept for its repeat.

        Raises:
            InvalidRequestError, AdapterNotFoundError, TenantNotFoundError, BaseModelUnknownError,
            BaseMismatchError, LimitExceededError, RequestIdReusedError: before any chunk is taken.
        """
        identity = _identify(caller, header)
        upload = Upload(self, identity, header)
        upload.result = await self._earlier(identity)
        if upload.result is not None:
            # Its process may have died between the registration and its own cleaning up.
            name = identity.name
            await on_thread(self._staging.discard, name.tenant, name.adapter, identity.request_id)
        else:
            self._models.current(header.base_digest)
            await self._registration.check_room(identity.name)
            # validate_only must not take over the bytes of a real upload with the same id.
            request_id = "" if header.is_validate_only else header.request_id
            name = identity.name
            upload.session = await on_thread(
                self._staging.open, name.tenant, name.adapter, request_id, header.files
            )
            log.info("adapter.upload_started", adapter=name.short, files=len(header.files))
        try:
            yield upload
        except InvalidAdapterError as error:
            upload.must_discard = True
            log.warning(
                "adapter.rejected", adapter=identity.name.short, reason=error.reason, error=error.message
            )
            raise
        finally:
            if upload.session:
                is_done = upload.must_discard or upload.result is not None
                await on_thread(upload.session.discard if is_done else upload.session.release)

    async def complete(self, upload: Upload) -> UploadResult:
        """Check, convert, store and register what the session holds."""
        session, identity = upload.session, upload.identity
        assert session is not None, "an upload without a session has its result already"
        model = self._models.current(upload.header.base_digest)
        target = IngestTarget(
            schema=model.schema,
            base_digest=model.base_digest,
            max_rank=model.max_rank,
            compute_dtype=model.dtype,
            model_name=model.name,
        )
        async with self._building:
            with self.observer.timed(IngestStage.VERIFY):
                await on_thread(session.finish)
            with self.observer.timed(IngestStage.BUILD):
                try:
                    built = await on_thread(session.build, target, upload.header.options)
                except LimitExceededError as error:
                    # A full disk says when to try again; of too high a rank nothing need be kept.
                    upload.must_discard = error.retry_after_s is None
                    raise
        if upload.header.is_validate_only:
            return self._validated(identity, built)
        with self.observer.timed(IngestStage.REGISTER):
            done = await self._registration.register(identity, built)
        return UploadResult(identity.name, done.revision, built.report, done.is_created, done.is_mended)

    async def received_bytes(self, caller: Caller, adapter: str, request_id: str) -> Mapping[str, int]:
        """Where each file of a broken upload goes on; whole files where it was completed.

        Raises:
            UploadNotFoundError: nothing of such an upload is kept, or its files were damaged or lost since;
                begin anew.
        """
        name = whole_adapter(caller, adapter, "adapter")
        _check_request_id(request_id)
        if not request_id:
            raise InvalidRequestError(
                "request_id is empty; only uploads that have one can be resumed",
                metadata={"field": "request_id"},
            )
        try:
            return await on_thread(self._staging.received_bytes, name.tenant, name.adapter, request_id)
        except UploadNotFoundError:
            receipt = await self._registry.receipt(name.tenant, request_id)
            if receipt is None or receipt.value.adapter != name.adapter:
                raise
            if not await self._is_standing(name, receipt.value.digest):
                raise
            return dict(receipt.value.files)

    async def _earlier(self, identity: UploadIdentity) -> UploadResult | None:
        """The result of the same upload, if it was completed and still stands; it is pushed last again.

        It was there already then, whatever the first answer said: pushing again is how damage is repaired,
        and whoever does it is to hear whether there was any.
        """
        if not identity.request_id:
            return None
        receipt = await self._registry.receipt(identity.name.tenant, identity.request_id)
        if receipt is None:
            return None
        digest = receipt.value.digest
        if not await self._is_standing(identity.name, digest):
            return None
        if receipt.value.fingerprint != identity.fingerprint:
            raise RequestIdReusedError(
                f"request_id {identity.request_id!r} belongs to another upload of this tenant; use a new id",
                metadata={"field": "request_id"},
            )
        revision = await self._registration.promote(identity, digest)
        if revision is None:
            return None
        report = await self._registry.report(identity.name, digest)
        return UploadResult(
            identity.name, revision, report.value.report if report else None, is_created=False
        )

    async def _is_standing(self, name: AdapterName, digest: str) -> bool:
        """Whether what an upload ended in was neither deleted nor damaged since: else it begins anew."""
        stored = await self._registry.adapter(name)
        revision = stored.value.revision(digest) if stored else None
        if revision is None or revision.state is not RevisionState.READY:
            return False
        return await self._store.is_intact(digest)

    def _validated(self, identity: UploadIdentity, built: BuiltRevision) -> UploadResult:
        manifest = built.manifest
        revision = Revision(
            digest=built.digest,
            state=RevisionState.PENDING,
            create_time_s=self._clock(),
            payload_bytes=manifest.payload_bytes,
            dtype=manifest.dtype.value,
            max_rank=manifest.max_rank,
            base_digest=manifest.base_digest,
        )
        return UploadResult(identity.name, revision, built.report, is_created=False)


def _identify(caller: Caller, header: UploadHeader) -> UploadIdentity:
    name = whole_adapter(caller, header.adapter, "header.adapter")
    check_num_aliases(len(set(header.aliases)))
    for alias in header.aliases:
        check_alias(alias, "header.aliases")
    _check_request_id(header.request_id)
    if header.base_digest:
        what = "a base model's digest, as `lorikeet model show` prints it"
        check_digest(header.base_digest, "header.base_digest", what)
    files = [(f.name, f.size_bytes, f.sha256) for f in header.files]
    facts: Sequence[object] = [
        str(name),
        sorted(header.aliases),
        sorted(files),
        header.options.packing,
        header.options.orientation,
        # Only where it was given, so that uploads of earlier releases are still known as the same.
        *([header.base_digest] if header.base_digest else []),
    ]
    return UploadIdentity(
        name=name,
        aliases=header.aliases,
        request_id="" if header.is_validate_only else header.request_id,
        fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        files=tuple((f.name, f.size_bytes) for f in header.files),
    )


def _check_request_id(request_id: str) -> None:
    if len(request_id) > _MAX_REQUEST_ID or not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequestError(
            f"request_id must have at most {_MAX_REQUEST_ID} printable ASCII characters",
            metadata={"field": "request_id"},
        )
