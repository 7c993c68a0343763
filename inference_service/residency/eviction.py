"""Who goes first when room is needed: pure choices over entries."""

from collections.abc import Iterable

from inference_service.domain.adapter import ResidencyTier
from inference_service.residency.entry import AdapterEntry, Urgency

# Weights that the manager merely wants may push out only what nobody used for this long: else an adapter that
# requests keep asking for and one that the manager wants would evict each other for ever.
BACKGROUND_IDLE_S = 10.0


def slot_victims(entries: Iterable[AdapterEntry], wanted: AdapterEntry, now_s: float) -> list[AdapterEntry]:
    """Active revisions whose slot `wanted` may take, first choice first."""
    urgency, _ = wanted.urgency()
    victims = [
        entry
        for entry in entries
        if entry.is_idle
        and not entry.is_slot_pinned
        and _may_evict(urgency, entry, ResidencyTier.ACTIVE, now_s)
    ]
    return sorted(victims, key=_slot_order)


def host_victims(entries: Iterable[AdapterEntry], wanted: AdapterEntry, now_s: float) -> list[AdapterEntry]:
    """Revisions whose host copy may go for `wanted`, first choice first.

    A copy whose weights are also in a slot goes after one that is of less use, for it costs a read once the
    slot is lost; but before one that the manager wants, which would be pushed back.
    """
    urgency, _ = wanted.urgency()
    victims = [
        entry
        for entry in entries
        if entry is not wanted
        and entry.has_host
        and entry.tier is not ResidencyTier.COPYING
        and not _needs_host_copy(entry)
        and _may_evict(urgency, entry, ResidencyTier.HOST, now_s)
    ]
    return sorted(victims, key=_host_order)


def _needs_host_copy(entry: AdapterEntry) -> bool:
    if entry.is_active:
        return entry.pinned and entry.desired is ResidencyTier.HOST
    return bool(entry.waiters or entry.calls) or entry.pinned


def _may_evict(urgency: Urgency, entry: AdapterEntry, tier: ResidencyTier, now_s: float) -> bool:
    if urgency is Urgency.REQUEST:
        return True
    is_desired = entry.desired is ResidencyTier.ACTIVE or entry.desired is tier
    if urgency is Urgency.CALL:
        # Of two host copies that the manager wants none may push the other out: it would come back as the
        # next call, and so on for ever.
        return tier is ResidencyTier.ACTIVE or not is_desired
    if is_desired and not (urgency is Urgency.PINNED and not entry.pinned):
        return False
    return now_s - entry.touched_s >= BACKGROUND_IDLE_S


def _host_order(entry: AdapterEntry) -> tuple[bool, bool, bool, float]:
    is_named, is_desired, touched_s = _slot_order(entry)
    return is_named, is_desired, entry.is_active, touched_s


def _slot_order(entry: AdapterEntry) -> tuple[bool, bool, float]:
    is_desired = entry.desired in {ResidencyTier.HOST, ResidencyTier.ACTIVE}
    return entry.is_named, is_desired, entry.touched_s
