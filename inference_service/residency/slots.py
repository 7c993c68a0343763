"""The device's slots: which revision takes which, whose turn it is, and who must make room."""

import structlog

from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.engine_report import LoadStage
from inference_service.domain.errors import AdapterTooLargeError
from inference_service.ports import DeviceArena
from inference_service.residency.config import ResidencyConfig
from inference_service.residency.entry import AdapterEntry
from inference_service.residency.eviction import slot_victims
from inference_service.residency.table import AdapterTable

# How many times longer than others a revision keeps its slot while its first request has yet to come.
_UNSERVED_TURNS = 10

log = structlog.get_logger()


class Slots:
    """Moves revisions from host memory into slots and out again. The arena's only user.

    A slot is released only while nobody has a lease on it, and leases outlive the steps that use them.
    """

    def __init__(self, table: AdapterTable, arena: DeviceArena, config: ResidencyConfig) -> None:
        self.num_evictions = 0
        self._table = table
        self._arena = arena
        self._config = config
        self._free = list(reversed(range(arena.num_slots)))
        self._by_slot: dict[int, AdapterEntry] = {}

    @property
    def is_copying(self) -> bool:
        """Whether the arena must be polled."""
        return any(not entry.is_active for entry in self._by_slot.values())

    def collect(self, now_s: float) -> None:
        """Take in the copies that ended."""
        for slot in self._arena.poll():
            entry = self._by_slot[slot]
            entry.is_active = True
            entry.activated_s = now_s
            self._table.load_stats.took(LoadStage.COPY, now_s - entry.copy_begun_s)
            self._table.changed(entry)
            log.info("residency.activated", adapter=entry.digest, slot=slot)

    def start(self, now_s: float) -> None:
        """Give slots to revisions in host memory, the most urgent first."""
        wanted = [
            entry
            for entry in self._table.entries.values()
            if entry.has_host
            and entry.slot is None
            and not entry.unloads
            and entry.wanted_tier() is ResidencyTier.ACTIVE
        ]
        for entry in sorted(wanted, key=AdapterEntry.urgency):
            if self._activate(entry, now_s) or entry.failure or not self._fits_beside_pinned(entry):
                continue
            # In turn: were smaller or later ones let past, this one might never find room.
            if entry.waiters:
                break
        self._ask_for_slots(now_s)

    def release(self, entry: AdapterEntry) -> None:
        """Empty a revision's slot, cancelling its copy if that still runs; nobody has a lease on it."""
        assert not entry.leases, entry.digest
        if entry.slot is None:
            return
        self._arena.release(entry.slot)
        del self._by_slot[entry.slot]
        self._free.append(entry.slot)
        entry.slot = None
        entry.is_active = entry.is_draining = False
        self._table.changed(entry)

    def _activate(self, entry: AdapterEntry, now_s: float) -> bool:
        victims = slot_victims(self._by_slot.values(), entry, now_s)
        room = self._arena.total_bytes - self._held_bytes()
        if not (self._free or victims):
            return False
        if room + sum(victim.num_bytes for victim in victims) < entry.num_bytes:
            return False
        while True:
            if self._free and room >= entry.num_bytes and self._begin_copy(entry):
                entry.slot = self._free.pop()
                entry.copy_begun_s = now_s
                self._by_slot[entry.slot] = entry
                self._table.changed(entry)
                return True
            if not victims:
                break
            # Also where the bytes would do: copies in progress may lie between the free ones.
            room += victims[0].num_bytes
            self._evict(victims.pop(0))
        if not self._by_slot:
            error = _cannot_place(entry, self._arena.total_bytes)
            self._table.fail(entry, LoadStage.COPY, error, now_s)
        return False

    def _begin_copy(self, entry: AdapterEntry) -> bool:
        """Into a free slot. Free bytes that do not lie side by side are moved together first.

        Pinned adapters never leave by themselves: one that lies in the middle would else keep out all that
        are larger than the gaps beside it, and those who wait behind them, for as long as it is pinned.
        """
        slot = self._free[-1]
        if self._arena.begin_copy(entry.digest, slot):
            return True
        if not self._arena.compact():
            return False
        log.info("residency.compacted", adapter=entry.digest)
        return self._arena.begin_copy(entry.digest, slot)

    def _evict(self, victim: AdapterEntry) -> None:
        slot = victim.slot
        self.release(victim)
        self.num_evictions += 1
        log.info("residency.evicted_from_slot", adapter=victim.digest, slot=slot)

    def _ask_for_slots(self, now_s: float) -> None:
        """Where requests wait too long for a slot, let the slots that were longest active fall idle."""
        starving = [
            entry
            for entry in self._table.entries.values()
            if entry.waiters
            and entry.has_host
            and entry.slot is None
            and now_s - entry.urgency()[1] >= self._config.slot_patience_s
            and self._fits_beside_pinned(entry)
        ]
        holders = sorted(
            (entry for entry in self._by_slot.values() if self._may_be_asked(entry, now_s)),
            key=lambda entry: entry.activated_s,
        )
        need_bytes = max((entry.num_bytes for entry in starving), default=0)
        freed_bytes = self._arena.total_bytes - self._held_bytes()
        num_freed = len(self._free)
        for entry in self._by_slot.values():
            entry.is_draining = False
        for holder in holders:
            if num_freed >= len(starving) and freed_bytes >= need_bytes:
                break
            holder.is_draining = True
            num_freed += 1
            freed_bytes += holder.num_bytes

    def _may_be_asked(self, entry: AdapterEntry, now_s: float) -> bool:
        """Whether a revision had its turn; else two that both starve would only swap the slot.

        One that nobody has leased yet, though requests wait for it, gets longer: they may be held up by
        limits of their own, but not for ever at the cost of others.
        """
        if not entry.is_active or entry.is_slot_pinned:
            return False
        has_served = entry.last_used_s >= entry.activated_s or not entry.waiters
        turn_s = self._config.slot_patience_s * (1 if has_served else _UNSERVED_TURNS)
        return now_s - entry.activated_s >= turn_s

    def _fits_beside_pinned(self, entry: AdapterEntry) -> bool:
        """Whether the entry could have a slot if every lease ended."""
        pinned = [e for e in self._by_slot.values() if e.is_slot_pinned]
        pinned_bytes = sum(e.num_bytes for e in pinned)
        return len(pinned) < self._arena.num_slots and (
            pinned_bytes + entry.num_bytes <= self._arena.total_bytes
        )

    def _held_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._by_slot.values())


def _cannot_place(entry: AdapterEntry, total_bytes: int) -> AdapterTooLargeError:
    return AdapterTooLargeError(
        f"adapter {entry.digest} takes {entry.num_bytes} bytes, which the empty arena of {total_bytes} bytes "
        "could not place; give the node a larger arena or use a lower rank",
        metadata={"value": str(entry.num_bytes), "maximum": str(total_bytes)},
    )
