"""Adapters on this node: what the scheduler leases, what the manager wants, and the moves between tiers.

The engine loop calls `poll` between steps; nothing here blocks, and nobody else touches pool or arena.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import structlog

from inference_service.domain.adapter import (
    AdapterDemand,
    AdapterStanding,
    DesiredAdapter,
    ResidencyTier,
    ResidentAdapter,
)
from inference_service.domain.engine_report import LoadStage, ResidencyCounts
from inference_service.domain.errors import (
    AdapterNotFoundError,
    AdapterUnavailableError,
    PayloadMissingError,
)
from inference_service.ports import DeviceArena, HostPool, PayloadSource
from inference_service.residency.config import ResidencyConfig
from inference_service.residency.entry import AdapterEntry, LoadCall
from inference_service.residency.host_loads import HostLoads
from inference_service.residency.slots import Slots
from inference_service.residency.table import AdapterTable
from lorikeet_contract.status import ServiceError

# While something waits, time alone can change what may be done: patience, cool-downs, bounds on waits.
_LOOK_AGAIN_S = 0.05
_BACKGROUND_S = 1.0
# A monitor is told this many revisions by digest, and of the others how many they are.
_MAX_LISTED = 64
_LISTED_TIERS = (ResidencyTier.HOST, ResidencyTier.COPYING, ResidencyTier.ACTIVE)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ResidencyStats:
    """Counters of the residency room."""

    leases: int
    active_adapters: int
    host_adapters: int
    arena_used_bytes: int
    host_used_bytes: int
    loads: int
    evictions: int


class Residency:
    """Implements `ports.AdapterGate` for the scheduler, and the manager's wishes for the engine loop.

    `wake` is called from worker threads when they finish something. `now_s + unix_offset_s` is a date.
    """

    def __init__(
        self,
        config: ResidencyConfig,
        pool: HostPool,
        arena: DeviceArena,
        source: PayloadSource,
        executor: Executor,
        wake: Callable[[], None],
        unix_offset_s: float = 0.0,
    ) -> None:
        self._config = config
        self._pool = pool
        self._arena = arena
        self._source = source
        self._table = AdapterTable(config, unix_offset_s)
        self._loads = HostLoads(self._table, pool, source, executor, wake, config, arena.total_bytes)
        self._slots = Slots(self._table, arena, config)
        self._look_again_s = 0.0

    def demand(self, digest: str, request_id: str, now_s: float) -> AdapterStanding:
        """See `ports.AdapterGate`. Requests that wait past the bound or for a failed load are told to end."""
        entry = self._table.entry(digest)
        if entry is None or not (entry.is_named or entry.has_host or entry.slot is not None):
            gone = AdapterNotFoundError(f"adapter revision {digest} is not in the catalog any more")
            return AdapterStanding(ResidencyTier.ABSENT, error_reason=gone.reason, error_message=gone.message)
        if entry.can_lease:
            return AdapterStanding(entry.tier, can_lease=True, ready_since_s=entry.activated_s)
        if entry.failure is not None and not entry.may_retry(now_s):
            return _failed(entry.tier, entry.failure)
        if request_id not in entry.waiters:
            entry.waiters[request_id] = now_s
            self._table.is_dirty = True
        if now_s - entry.waiters[request_id] > self._config.max_wait_s:
            return _failed(entry.tier, self._waited_too_long(entry))
        return AdapterStanding(entry.tier)

    def is_ready(self, digest: str) -> bool:
        """See `ports.AdapterGate`."""
        entry = self._table.entries.get(digest)
        return entry is not None and entry.can_lease

    def withdraw(self, digest: str, request_id: str) -> None:
        """See `ports.AdapterGate`."""
        entry = self._table.entries.get(digest)
        if entry is not None and entry.waiters.pop(request_id, None) is not None:
            self._table.is_dirty = True

    def acquire(self, digest: str, request_id: str, now_s: float) -> int:
        """See `ports.AdapterGate`."""
        entry = self._table.entries[digest]
        assert entry.can_lease, digest
        assert entry.slot is not None, digest
        assert request_id not in entry.leases, request_id
        entry.leases.add(request_id)
        entry.last_used_s = now_s
        self.withdraw(digest, request_id)
        return entry.slot

    def release(self, digest: str, request_id: str, now_s: float) -> None:
        """See `ports.AdapterGate`."""
        entry = self._table.entries[digest]
        entry.leases.remove(request_id)
        entry.last_used_s = now_s
        self._table.is_dirty = True

    def set_desired(self, desired: Iterable[DesiredAdapter]) -> None:
        """Replace what the manager wants; every revision of the catalog is to be among it."""
        self._table.set_catalog(desired)

    def load(
        self, wanted: DesiredAdapter, now_s: float, on_done: Callable[[ResidentAdapter | ServiceError], None]
    ) -> None:
        """Bring a revision to HOST or ACTIVE; an earlier failure does not count, and its wait is bounded."""
        entry = self._table.entry(wanted.source.digest) or self._table.make(wanted.source)
        entry.is_named = True
        entry.source = wanted.source
        entry.pinned = entry.pinned or wanted.pinned
        if entry.desired is not ResidencyTier.ACTIVE:
            entry.desired = wanted.tier
        entry.failure, entry.retry_at_s, entry.awaits_stream = None, 0.0, False
        entry.damage = ""
        entry.calls.append(LoadCall(wanted.tier, now_s, on_done))
        self._table.changed(entry)

    def unload(self, digest: str, *, keep_on_disk: bool, on_done: Callable[[bool], None]) -> None:
        """Take a revision off device and host once nobody has a lease; no new lease is given until then.

        Whatever wanted it until now does so no more: its pin, its desired tier, calls that wait for its load.
        """
        entry = self._table.entries.get(digest)
        if entry is None or not (entry.has_host or entry.slot is not None or entry.is_loading):
            if not keep_on_disk:
                self._loads.remove_from_disk(digest)
            if entry is not None:
                self._cancel_wishes(entry)
            was_there = False
            on_done(was_there)
            return
        self._cancel_wishes(entry)
        entry.keep_on_disk = entry.keep_on_disk and keep_on_disk
        entry.unloads.append(on_done)
        self._table.changed(entry)

    def refuse_demand(self, digest: str, reason: str, now_s: float) -> bool:
        """The manager cannot stream a revision: who waits for it fails as after any other failed load.

        False: it is not waited for, or came by itself meanwhile.
        """
        entry = self._table.entries.get(digest)
        if entry is None or not entry.awaits_stream:
            return False
        entry.awaits_stream = False
        log.warning("residency.demand_refused", adapter=digest, reason=reason)
        self._table.fail(entry, LoadStage.FETCH, PayloadMissingError(reason), now_s)
        return True

    def make_disk_room(self, num_bytes: int, on_done: Callable[[bool], None]) -> None:
        """Free this much of the disk cache; tells whether there was as much."""
        self._loads.make_disk_room(num_bytes, on_done)

    def poll(self, now_s: float) -> None:
        """Take in what ended and begin what can begin. Between steps only."""
        self._loads.collect(now_s)
        self._slots.collect(now_s)
        if not self._table.is_dirty and now_s < self._look_again_s:
            return
        self._table.is_dirty = False
        self._finish_unloads()
        self._finish_calls(now_s)
        self._slots.start(now_s)
        self._loads.start(now_s)
        self._loads.tell_demands(now_s)
        self._table.forget_idle()
        self._look_again_s = now_s + _LOOK_AGAIN_S

    def next_poll_in_s(self) -> float | None:
        """How soon `poll` is worth a call with nothing else going on; None: when something wakes the loop."""
        if self._table.is_dirty:
            return 0.0
        if self._slots.is_copying:
            return 0.001
        if any(entry.waiters or entry.calls for entry in self._table.entries.values()):
            return _LOOK_AGAIN_S
        return _BACKGROUND_S if any(_wants_more(e) for e in self._table.entries.values()) else None

    def resident(self) -> Sequence[ResidentAdapter]:
        """Every revision on this node, those on disk included."""
        known = dict.fromkeys((*self._table.entries, *self._source.cached()))
        on_disk = frozenset(self._source.cached())
        return [
            self._table.describe(digest)
            if digest in self._table.entries
            else ResidentAdapter(digest, ResidencyTier.DISK if digest in on_disk else ResidencyTier.ABSENT)
            for digest in known
        ]

    def take_changed(self) -> Sequence[ResidentAdapter]:
        """Changes since the last call."""
        return self._table.take_changed()

    def take_demands(self) -> Sequence[AdapterDemand]:
        """Payloads the manager is asked for since the last call."""
        demands, self._table.demands = self._table.demands, []
        return demands

    def stats(self) -> ResidencyStats:
        """Counters as of now."""
        entries = self._table.entries.values()
        return ResidencyStats(
            leases=sum(len(entry.leases) for entry in entries),
            active_adapters=sum(entry.is_active for entry in entries),
            host_adapters=sum(entry.has_host for entry in entries),
            arena_used_bytes=self._arena.used_bytes,
            host_used_bytes=self._pool.used_bytes,
            loads=self._loads.num_loads,
            evictions=self._slots.num_evictions + self._loads.num_evictions,
        )

    def counts(self) -> ResidencyCounts:
        """What a monitor wants to know, as of now."""
        held = [entry for entry in self._table.entries.values() if entry.tier in _LISTED_TIERS]
        recent = heapq.nlargest(
            _MAX_LISTED, held, key=lambda entry: (entry.slot is not None, entry.touched_s)
        )
        numbers = Counter(entry.tier for entry in held)
        return ResidencyCounts(
            listed=tuple((entry.digest, entry.tier) for entry in recent),
            num_by_tier=tuple((tier, numbers[tier]) for tier in _LISTED_TIERS),
            slot_evictions=self._slots.num_evictions,
            host_evictions=self._loads.num_evictions,
            stages=self._table.load_stats.counts(),
        )

    def _finish_unloads(self) -> None:
        for entry in self._table.entries.values():
            # A worker thread still reads into the pool: what it brings is dropped when it ends.
            if not entry.unloads or entry.leases or entry.is_loading:
                continue
            self._slots.release(entry)
            self._loads.drop(entry)
            entry.fetched = None
            if not entry.keep_on_disk:
                self._loads.remove_from_disk(entry.digest)
            unloads, entry.unloads, entry.keep_on_disk = entry.unloads, [], True
            self._table.changed(entry)
            was_there = True
            for on_done in unloads:
                on_done(was_there)

    def _finish_calls(self, now_s: float) -> None:
        for entry in self._table.entries.values():
            for call in tuple(entry.calls):
                if entry.is_active or (entry.has_host and call.tier is ResidencyTier.HOST):
                    entry.calls.remove(call)
                    call.on_done(self._table.describe(entry.digest))
                elif now_s - call.since_s > self._config.max_wait_s:
                    entry.calls.remove(call)
                    call.on_done(self._waited_too_long(entry))

    def _cancel_wishes(self, entry: AdapterEntry) -> None:
        entry.pinned = False
        entry.desired = ResidencyTier.ABSENT
        gone = AdapterUnavailableError(f"adapter {entry.digest} was unloaded meanwhile")
        self._table.end_calls(entry, gone)

    def _waited_too_long(self, entry: AdapterEntry) -> AdapterUnavailableError:
        return AdapterUnavailableError(
            f"adapter {entry.digest} was not ready within {self._config.max_wait_s:g} s (it is {entry.tier}"
            f"{', the manager has not streamed it' if entry.awaits_stream else ''}); "
            "try again, or free slots by unpinning adapters"
        )


def _wants_more(entry: AdapterEntry) -> bool:
    """Whether a retry in the background may come."""
    wanted = entry.wanted_tier()
    is_there = entry.is_active or (entry.has_host and wanted is ResidencyTier.HOST)
    return wanted is not None and not is_there


def _failed(tier: ResidencyTier, error: ServiceError) -> AdapterStanding:
    return AdapterStanding(tier, error_reason=error.reason, error_message=error.message)
