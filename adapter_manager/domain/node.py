"""A node (one inference service) as the manager knows it: its model and what it reports as resident."""

from dataclasses import dataclass
from enum import StrEnum

from lorikeet_contract.schema import LoraSchema


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """What the node's own settings allow."""

    max_rank: int
    max_active_adapters: int
    arena_bytes: int
    host_pool_bytes: int


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model that some node serves or served; uploads are checked against its schema."""

    name: str
    architecture: str
    base_digest: str
    dtype: str
    max_rank: int
    schema: LoraSchema
    last_seen_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeModel:
    """What one running node says of itself; `instance_id` changes when it restarts."""

    instance_id: str
    model: BaseModel
    limits: NodeLimits


class ResidencyTier(StrEnum):
    """Where an adapter's weights are on a node."""

    ABSENT = "absent"
    DISK = "disk"
    HOST = "host"
    COPYING = "copying"
    ACTIVE = "active"

    @property
    def rank(self) -> int:
        """Grows towards the device."""
        return tuple(ResidencyTier).index(self)


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """Observed state of one revision on one node."""

    digest: str
    tier: ResidencyTier
    is_pinned: bool = False
    leases: int = 0
    payload_bytes: int = 0
    arena_bytes: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ResidencySnapshot:
    """All that a node holds, and the catalog that it works by."""

    instance_id: str
    catalog_generation: int
    adapters: tuple[ResidentAdapter, ...]


@dataclass(frozen=True, slots=True)
class ResidencyChanged:
    """One revision moved, or failed to."""

    adapter: ResidentAdapter


@dataclass(frozen=True, slots=True)
class Demanded:
    """Requests wait for a revision that the node cannot fetch by itself."""

    digest: str
    waiting_requests: int


@dataclass(frozen=True, slots=True)
class Used:
    """What requests used of a revision since the last such event."""

    digest: str
    requests: int
    prompt_tokens: int
    output_tokens: int


NodeEvent = ResidencySnapshot | ResidencyChanged | Demanded | Used
