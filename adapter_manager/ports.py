"""The adapter manager's seams. Fakes for each stand in tests/support."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from adapter_manager.domain.adapter import Adapter, DigestUse, UploadReceipt
from adapter_manager.domain.built_revision import BuiltRevision
from adapter_manager.domain.catalog import NodeCatalog, RegistryView
from adapter_manager.domain.node import (
    BaseModel,
    NodeEvent,
    NodeModel,
    ResidencySnapshot,
    ResidencyTier,
    ResidentAdapter,
)
from adapter_manager.domain.probe import ProbeFindings
from adapter_manager.domain.revision_report import RevisionReport
from adapter_manager.domain.tenant import Tenant, TenantUsage, TokenOwner
from lorikeet_contract.names import AdapterName

Record = Tenant | TenantUsage | TokenOwner | Adapter | DigestUse | BaseModel | UploadReceipt | RevisionReport
RecordT = TypeVar("RecordT", bound=Record)

Clock = Callable[[], float]


class NewToken(Protocol):
    """A fresh bearer token and what may be kept of it."""

    @property
    def token(self) -> str:
        """Shown once."""
        ...

    @property
    def token_id(self) -> str:
        """Its public name."""
        ...

    @property
    def sha256(self) -> str:
        """What it is looked up by."""
        ...


MintToken = Callable[[], NewToken]


@dataclass(frozen=True, slots=True)
class Stored(Generic[RecordT]):
    """A record as read; `etag` changes with every write of it."""

    value: RecordT
    etag: str


@dataclass(frozen=True, slots=True)
class Page(Generic[RecordT]):
    """A part of a list. `next_after` is where the next page begins behind; "" after the last one."""

    items: tuple[Stored[RecordT], ...]
    next_after: str


class ChangeKind(StrEnum):
    """What a change does to its record."""

    PUT = "put"
    DELETE = "delete"
    CHECK = "check"


@dataclass(frozen=True, slots=True)
class Change:
    """One record's part in an atomic commit.

    `expected_etag`: the record must still have this etag; "" means it must not exist; None means that
    whatever is there is overwritten. `ttl_s` makes the record expire.
    """

    kind: ChangeKind
    record: Record
    expected_etag: str | None
    ttl_s: float | None = None


def create(record: Record) -> Change:
    """Write a record that must not exist yet."""
    return Change(ChangeKind.PUT, record, "")


def update(stored: Stored[RecordT], record: RecordT) -> Change:
    """Replace a record that must be as it was read."""
    return Change(ChangeKind.PUT, record, stored.etag)


def overwrite(record: Record, ttl_s: float | None = None) -> Change:
    """Write a record, whatever was there."""
    return Change(ChangeKind.PUT, record, None, ttl_s)


def delete(stored: Stored[RecordT]) -> Change:
    """Delete a record that must be as it was read."""
    return Change(ChangeKind.DELETE, stored.value, stored.etag)


def forget(record: Record) -> Change:
    """Delete a record of this identity if there is one."""
    return Change(ChangeKind.DELETE, record, None)


def check(stored: Stored[RecordT]) -> Change:
    """Write nothing, but fail the commit if this record changed."""
    return Change(ChangeKind.CHECK, stored.value, stored.etag)


class Registry(Protocol):
    """What is registered: the one source of truth, durable before it is acknowledged.

    Every method raises RegistryUnavailableError where the store is away. Reads see every acknowledged write.
    """

    async def commit(self, changes: Sequence[Change]) -> int:
        """Apply all changes or none, durably; returns the generation, which grows with every commit.

        Raises:
            ConcurrentChangeError: an expectation did not hold; nothing was changed.
            RegistryUnavailableError: also where the outcome is unknown; the changes may have been applied.
        """
        ...

    async def tenant(self, tenant_id: str) -> Stored[Tenant] | None:
        """A tenant's record."""
        ...

    async def usage(self, tenant_id: str) -> Stored[TenantUsage] | None:
        """What a tenant has; None means that there is no such tenant."""
        ...

    async def tenants(self, after: str, limit: int) -> Page[Tenant]:
        """Tenants in order of id, behind `after`."""
        ...

    async def token(self, sha256: str) -> Stored[TokenOwner] | None:
        """Whose token it is."""
        ...

    async def adapter(self, name: AdapterName) -> Stored[Adapter] | None:
        """An adapter's record."""
        ...

    async def adapters(self, tenant_id: str | None, after: str, limit: int) -> Page[Adapter]:
        """Adapters in order of "t/a", behind `after`; of one tenant, or of all."""
        ...

    async def use(self, digest: str) -> Stored[DigestUse] | None:
        """Who holds a digest's files."""
        ...

    async def receipt(self, tenant_id: str, request_id: str) -> Stored[UploadReceipt] | None:
        """How an upload with this request id ended."""
        ...

    async def report(self, name: AdapterName, digest: str) -> Stored[RevisionReport] | None:
        """What the upload of a revision found in its files."""
        ...

    async def refresh(self, view: RegistryView) -> RegistryView:
        """The whole registry as of now, starting from an older view; the same object if nothing changed.

        Raises:
            RegistryBehindError: the store lacks commits that `view` has seen; see `restore`.
            RegistryReplacedError: it holds nothing or another registry, and nothing was read before.
        """
        ...

    async def restore(self, view: RegistryView) -> RegistryView:
        """Write a view into a store that lacks commits which the view has, and read what is there then.

        Where somebody else restored it from an older view, only what nobody changed since is written.
        """
        ...

    async def raise_generation(self, minimum: int) -> None:
        """Make the generation greater than `minimum`: nodes refuse catalogs older than theirs."""
        ...


class IngestStage(StrEnum):
    """What is done with an upload once all of it is here."""

    VERIFY = "verify"
    BUILD = "build"
    REGISTER = "register"


class UploadObserver(Protocol):
    """Hears of uploads, for metrics. Never blocks, never raises."""

    def received(self, num_bytes: int) -> None:
        """A chunk was taken."""
        ...

    def timed(self, stage: IngestStage) -> AbstractContextManager[object]:
        """Around a stage: how long it took, also where it failed."""
        ...


class StoreObserver(Protocol):
    """Hears of the registry's store, for metrics. Never blocks, never raises."""

    def answered(self, command: str, seconds: float) -> None:
        """The store did what it was asked; `command` is "read" or "write"."""
        ...

    def failed(self, error: str) -> None:
        """It did not answer, or not as it must; `error` names the kind."""
        ...


class NodeClient(Protocol):
    """One node's RPCs. Each raises NodeCallError where the node refuses or is away."""

    address: str

    async def model(self) -> NodeModel:
        """What the node serves."""
        ...

    def watch(self) -> AsyncIterator[NodeEvent]:
        """A snapshot, then events as they happen; ends or raises when the node goes away."""
        ...

    async def resident(self) -> ResidencySnapshot:
        """What `watch` starts with, by itself: the periodic check that no event was missed."""
        ...

    async def sync_catalog(self, catalog: NodeCatalog) -> int:
        """Replace the node's catalog; returns the generation it works by now."""
        ...

    async def load(
        self, order: "LoadOrder", payload: AsyncIterator[bytes] | None, timeout_s: float
    ) -> ResidentAdapter:
        """Bring a revision to a tier; returns when it is there. `payload` None: the node reads the store."""
        ...

    async def unload(self, digest: str, *, keep_on_disk: bool, timeout_s: float) -> bool:
        """Take a revision off the node once no request holds it; False: it was not there."""
        ...

    async def refuse_demand(self, digest: str, reason: str) -> bool:
        """Let requests on the node that wait for a revision end, for tenants to read why. False: none did."""
        ...

    async def probe(self, digest: str, timeout_s: float) -> ProbeFindings:
        """Compare a revision with the base model; the node brings it to its device as for a request."""
        ...

    async def close(self) -> None:
        """Close the channel."""
        ...


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What a node is told to load. An empty `store_path` means that the payload is streamed to it."""

    digest: str
    manifest: bytes
    tier: ResidencyTier
    is_pinned: bool
    store_path: str


class ArtifactStore(Protocol):
    """Where revisions' files are kept: `revisions/<digest>/manifest.json` and `revisions/<digest>/payload`.

    A revision is visible only when it is whole: its manifest is written last and deleted first. Methods raise
    ArtifactStoreError where the store is away, ArtifactMissingError where a revision is not there or is cut.
    """

    @property
    def url(self) -> str:
        """The store's URL, as nodes that share it open it."""
        ...

    async def put(self, built: BuiltRevision) -> bool:
        """Store a revision durably; False where it was there already, whole. Idempotent."""
        ...

    async def is_intact(self, digest: str) -> bool:
        """Whether the revision is there and its content right, as far as it costs no more than a read."""
        ...

    async def contains(self, digest: str) -> bool:
        """Whether the revision is there, whole as far as its sizes tell."""
        ...

    async def manifest(self, digest: str) -> bytes:
        """The manifest's exact bytes; their sha256 has been compared with `digest`."""
        ...

    def payload(self, digest: str, offset: int = 0) -> AsyncIterator[bytes]:
        """The payload from `offset` to its end, in chunks of at most 1 MiB."""
        ...

    async def delete(self, digest: str) -> None:
        """Remove a revision; nothing happens where there is none."""
        ...

    def digests(self) -> AsyncIterator[str]:
        """All revisions that are there, whole or not, in no order."""
        ...
