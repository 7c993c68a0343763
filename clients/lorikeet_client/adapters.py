"""Values of the adapter registry: adapters, revisions, what an upload matched, where the weights are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypedDict

from lorikeet_client.retry import OnRetry


class RevisionState(StrEnum):
    """Life of a revision; READY ones can be asked for."""

    UNSPECIFIED = "unspecified"
    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    DELETING = "deleting"


class ResidencyState(StrEnum):
    """Where a revision's weights are on a node."""

    UNSPECIFIED = "unspecified"
    ABSENT = "absent"
    DISK = "disk"
    HOST = "host"
    COPYING = "copying"
    ACTIVE = "active"


class ExpertPacking(StrEnum):
    """Column order of a fused lora_B over E experts of rank r: column j*E + e (as PEFT) or e*r + j."""

    RANK_MAJOR = "rank-major"
    EXPERT_MAJOR = "expert-major"


class ExpertOrientation(StrEnum):
    """Which side of the experts' matrices lora_A stands on: the input's or the output's."""

    STANDARD = "standard"
    EXCHANGED = "exchanged"


@dataclass(frozen=True, slots=True)
class MatchedSite:
    """What was made of the tensors of one site."""

    site: str
    layer: int | None
    rank: int
    scales: tuple[float, ...]
    layout: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class UploadReport:
    """Every tensor of the files accounted for; neutral ones are provably without effect."""

    tensors_total: int
    tensors_used: int
    tensors_neutral: int
    sites: tuple[MatchedSite, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Revision:
    """Immutable, content-addressed weights."""

    name: str
    digest: str
    state: RevisionState
    failure: str
    create_time: datetime | None
    payload_bytes: int
    dtype: str
    max_rank: int
    base_digest: str
    report: UploadReport | None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A name that points at revisions. Pass `etag` back to change only what was read."""

    name: str
    current_digest: str
    aliases: dict[str, str]
    revisions: tuple[Revision, ...]
    pinned: bool
    create_time: datetime | None
    update_time: datetime | None
    etag: str


@dataclass(frozen=True, slots=True)
class UploadResult:
    """A finished upload; `created` is False where the same content was there already."""

    revision: Revision
    created: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """One revision on one node."""

    node: str
    instance_id: str
    revision: str
    state: ResidencyState
    desired: ResidencyState
    pinned: bool
    bytes: int
    leases: int
    failure: str


@dataclass(frozen=True, slots=True)
class UploadProgress:
    """How far an upload is, in bytes of its files; `sent_bytes` begins at what the server had already."""

    sent_bytes: int
    total_bytes: int
    file_name: str


class UploadOptions(TypedDict, total=False):
    """Keyword arguments of `upload_adapter`.

    aliases: names such as "prod" to point at the new revision.
    validate_only: check everything, store nothing.
    expert_packing, expert_orientation: for files that cannot be told apart by themselves.
    request_id: names the upload; by default made from the files and options, so that the same upload,
        started again after a break, goes on where it stopped.
    resume: ask the server how much it has before sending. Default true.
    progress: called after each chunk, from the thread that sends.
    on_retry: called with what failed and the pause in seconds before the upload is tried again.
    """

    aliases: Sequence[str]
    validate_only: bool
    expert_packing: ExpertPacking
    expert_orientation: ExpertOrientation
    request_id: str
    resume: bool
    progress: Callable[[UploadProgress], None]
    on_retry: OnRetry
