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


class TensorRole(StrEnum):
    """A tensor's part in its pair, as its name in the file says."""

    UNSPECIFIED = "unspecified"
    LORA_A = "lora_A"
    LORA_B = "lora_B"
    BASE_WEIGHT = "base_weight"


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of the files that were read alike, and whose names differ in numbers alone.

    `key` has "*" for each number, `indices` the numbers as ranges ("0-3,5") for each "*": the group holds a
    tensor for every combination. `shape` is of each, `bytes` of all. Without a `site` they are not used;
    `neutral` says why they change nothing. `scaling` is how `scale` came about, e.g. "16/8".
    """

    key: str
    indices: tuple[str, ...]
    count: int
    role: TensorRole
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    site: str
    slice: str
    layout: str
    rank: int
    scale: float
    scaling: str
    neutral: str


@dataclass(frozen=True, slots=True)
class SiteCoverage:
    """What an adapter has for one kind of site over all layers; layers as ranges. No tensors: nothing."""

    site: str
    layers: str
    layers_without: str
    tensors: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    layouts: tuple[str, ...]
    slices: tuple[str, ...]
    min_experts: int
    max_experts: int
    num_experts: int
    bytes: int


@dataclass(frozen=True, slots=True)
class UploadReport:
    """Every tensor of the files accounted for; neutral ones are provably without effect.

    `tensors` name all but `tensors_not_listed` of them. `coverage` has each kind of site of the base model.
    """

    tensors_total: int
    tensors_used: int
    tensors_neutral: int
    sites: tuple[MatchedSite, ...]
    warnings: tuple[str, ...]
    tensors: tuple[TensorGroup, ...] = ()
    tensors_not_listed: int = 0
    coverage: tuple[SiteCoverage, ...] = ()
    file_bytes: int = 0


class ProbeVerdict(StrEnum):
    """What an adapter does to the model's output, as far as one prompt tells."""

    UNSPECIFIED = "unspecified"
    CHANGES = "changes"
    CHANGES_NOTHING = "changes_nothing"
    NOT_FINITE = "not_finite"


@dataclass(frozen=True, slots=True)
class Probe:
    """A comparison of an adapter with the base model on a node, in log-probabilities.

    `noise` is what two runs of the base model differed by; `top1_changes` of `positions` have another most
    likely token.
    """

    verdict: ProbeVerdict
    max_difference: float
    noise: float
    top1_changes: int
    positions: int
    node: str
    time: datetime | None


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
    probe: Probe | None = None


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
    base_digest: the base model that it is for (`Model.base_digest`), where nodes serve several.
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
    base_digest: str
    request_id: str
    resume: bool
    progress: Callable[[UploadProgress], None]
    on_retry: OnRetry
