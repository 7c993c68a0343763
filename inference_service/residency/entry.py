"""What residency knows of one revision."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from inference_service.domain.adapter import AdapterSource, ResidencyTier, ResidentAdapter
from inference_service.domain.errors import AdapterTooLargeError
from lorikeet_contract.manifest import Manifest
from lorikeet_contract.status import ServiceError

# A background load that failed this often waits for a request or the manager to ask again.
MAX_BACKGROUND_FAILURES = 5


class Urgency(IntEnum):
    """Why a revision is wanted; lower comes first."""

    REQUEST = 0
    CALL = 1
    PINNED = 2
    DESIRED = 3


@dataclass(frozen=True, slots=True)
class LoadCall:
    """Someone waits for the revision to reach `tier`."""

    tier: ResidencyTier
    since_s: float
    on_done: Callable[[ResidentAdapter | ServiceError], None]


@dataclass(slots=True, eq=False)
class AdapterEntry:
    """Owned and changed by the residency room alone.

    `is_named`: the catalog or a load call names the revision, so it may be loaded. `num_bytes` is what it
    takes in the host pool and in the arena, 0 until its manifest was read. `is_loading`: a worker thread is
    at it. `is_draining`: the slot takes no new leases, because others waited too long for one.
    `damage`: what was wrong with the disk cache's copy, thrown away for another; "" after a good load.
    """

    digest: str
    source: AdapterSource
    is_named: bool = True
    desired: ResidencyTier = ResidencyTier.ABSENT
    pinned: bool = False
    on_disk: bool = False
    has_host: bool = False
    slot: int | None = None
    is_active: bool = False
    is_draining: bool = False
    is_loading: bool = False
    awaits_stream: bool = False
    damage: str = ""
    demand_told_s: float = float("-inf")
    fetched: tuple[Manifest, str] | None = None
    num_bytes: int = 0
    leases: set[str] = field(default_factory=set[str])
    waiters: dict[str, float] = field(default_factory=dict[str, float])
    calls: list[LoadCall] = field(default_factory=list[LoadCall])
    unloads: list[Callable[[bool], None]] = field(default_factory=list[Callable[[bool], None]])
    keep_on_disk: bool = True
    last_used_s: float = 0.0
    copy_begun_s: float = 0.0
    activated_s: float = 0.0
    failure: ServiceError | None = None
    num_failures: int = 0
    retry_at_s: float = 0.0

    @property
    def tier(self) -> ResidencyTier:
        """Where the weights are, as far up as they are whole."""
        if self.slot is not None:
            return ResidencyTier.ACTIVE if self.is_active else ResidencyTier.COPYING
        if self.has_host:
            return ResidencyTier.HOST
        return ResidencyTier.DISK if self.on_disk else ResidencyTier.ABSENT

    @property
    def can_lease(self) -> bool:
        """Whether a request may take the slot now."""
        return self.is_active and not self.is_draining and not self.unloads

    @property
    def is_slot_pinned(self) -> bool:
        """Whether the slot may not be taken away."""
        return self.pinned and self.desired is ResidencyTier.ACTIVE

    @property
    def touched_s(self) -> float:
        """When the revision was last of use, or came to be."""
        return max(self.last_used_s, self.activated_s)

    @property
    def is_idle(self) -> bool:
        """Whether the slot is used by nobody and wanted by nobody whose turn it is."""
        return self.is_active and not self.leases and (self.is_draining or not self.waiters)

    def wanted_tier(self) -> ResidencyTier | None:
        """How far up the revision is wanted now, if at all."""
        tiers = {call.tier for call in self.calls} | {self.desired}
        if self.waiters or ResidencyTier.ACTIVE in tiers:
            return ResidencyTier.ACTIVE
        return ResidencyTier.HOST if ResidencyTier.HOST in tiers else None

    def urgency(self) -> tuple[Urgency, float]:
        """The order among wanted revisions: urgency, then how long it lasts."""
        if self.waiters:
            return Urgency.REQUEST, min(self.waiters.values())
        if self.calls:
            return Urgency.CALL, self.calls[0].since_s
        return (Urgency.PINNED if self.pinned else Urgency.DESIRED), 0.0

    def may_retry(self, now_s: float) -> bool:
        """Whether a failed load may be tried again: not if it is too large, nor before the cool-down."""
        return now_s >= self.retry_at_s and not isinstance(self.failure, AdapterTooLargeError)

    def may_load(self, now_s: float) -> bool:
        """Whether a load may start: not refused for good, not cooling down, not on its way out."""
        if self.unloads or self.is_loading or self.awaits_stream or not self.is_named:
            return False
        if not self.may_retry(now_s):
            return False
        if self.failure is None:
            return True
        is_asked_for = bool(self.waiters or self.calls)
        return is_asked_for or self.num_failures < MAX_BACKGROUND_FAILURES

    @property
    def is_forgettable(self) -> bool:
        """Whether nothing here is worth remembering."""
        is_held = self.has_host or self.slot is not None or self.is_loading
        is_wanted = self.waiters or self.calls or self.unloads or self.wanted_tier() is not None
        return not (is_held or is_wanted or (self.failure and self.is_named))
