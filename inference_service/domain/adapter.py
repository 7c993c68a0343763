"""Adapters as the node sees them: by digest, somewhere between the store and the device."""

from dataclasses import dataclass
from enum import StrEnum

BASE_SLOT = -1


class ResidencyTier(StrEnum):
    """Where an adapter's weights are on this node."""

    ABSENT = "absent"
    DISK = "disk"
    HOST = "host"
    COPYING = "copying"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where a node reads a revision: `store_path` under the catalog's store, or its own disk cache ("")."""

    digest: str
    store_path: str = ""
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DesiredAdapter:
    """What the manager wants of this node for one revision.

    `tier` is HOST or ACTIVE; ABSENT or DISK only says that the catalog names the revision, so that a request
    may have it loaded.
    """

    source: AdapterSource
    tier: ResidencyTier
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """Observed state of one revision on this node."""

    digest: str
    tier: ResidencyTier
    pinned: bool = False
    leases: int = 0
    payload_bytes: int = 0
    arena_bytes: int = 0
    last_used_unix_s: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class AdapterDemand:
    """Requests wait for a revision that this node cannot fetch by itself: the manager is to stream it."""

    digest: str
    waiting_requests: int


@dataclass(frozen=True, slots=True)
class AdapterStanding:
    """What the scheduler hears when it asks for an adapter: lease it, wait, or (with a reason) give up.

    `ready_since_s` is when it came to the device, on the engine's clock, where it can be leased.
    """

    tier: ResidencyTier
    can_lease: bool = False
    ready_since_s: float = 0.0
    error_reason: str = ""
    error_message: str = ""
