"""Residency on fakes: tiers, leases, eviction, and everything happening at the wrong moment."""

import pytest

from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.request import FinishReason
from inference_service.residency.config import ResidencyConfig
from tests.support.engine_builders import desire, load, make_request, tier, unload, with_adapters
from tests.support.fake_device import expected_tokens

ACTIVE, HOST, DISK = ResidencyTier.ACTIVE, ResidencyTier.HOST, ResidencyTier.DISK


def test_request_loads_its_adapter_while_others_run() -> None:
    """Base tokens flow in every step of the wait; then the adapter answers, and says how cold it was."""
    rig, (digest,) = with_adapters(1, polls_per_copy=3)
    rig.add(make_request("base", max_tokens=30))
    rig.turn(jobs=0)
    rig.add(make_request("a", digest=digest))
    for _ in range(5):
        rig.turn(jobs=0)
    assert len(rig.tokens("base")) == 6
    assert rig.tokens("a") == []
    rig.run()
    assert rig.tokens("a") == expected_tokens(digest, (1, 2, 3), 4)
    end = rig.finish("a")
    assert end.tier_hit is ResidencyTier.ABSENT
    assert end.timings.adapter_wait_ms > 4
    rig.add(make_request("b", digest=digest))
    rig.run()
    assert rig.finish("b").tier_hit is ACTIVE
    assert rig.finish("b").timings.adapter_wait_ms == 0


def test_every_tier_is_told_in_order() -> None:
    """Observers hear of disk, host, copying and active."""
    rig, (digest,) = with_adapters(1, polls_per_copy=2)
    load(rig, digest)
    told: list[ResidencyTier] = []
    for _ in range(8):
        rig.turn(jobs=1)
        told += [news.tier for news in rig.residency.take_changed()]
    assert list(dict.fromkeys(told)) == [DISK, HOST, ResidencyTier.COPYING, ACTIVE] or told[-1] is ACTIVE


def test_distinct_adapters_of_a_step_never_exceed_the_slots() -> None:
    """Six adapters want two slots; the runner asserts the bound, and all get their turn."""
    rig, digests = with_adapters(6)
    for index, digest in enumerate(digests):
        rig.add(make_request(f"r{index}", digest=digest, max_tokens=5))
    rig.run()
    for index, digest in enumerate(digests):
        assert rig.tokens(f"r{index}") == expected_tokens(digest, (1, 2, 3), 5)
    assert rig.residency.stats().leases == 0


def test_busy_adapters_make_room_for_one_that_waits_too_long() -> None:
    """A slot whose requests never pause is given up after the patience: waits are bounded."""
    rig, (hot, cold) = with_adapters(2, num_slots=1, residency=ResidencyConfig(slot_patience_s=0.02))
    for index in range(3):
        rig.add(make_request(f"h{index}", digest=hot, max_tokens=10))
    rig.turn()
    rig.add(make_request("cold", digest=cold, max_tokens=2))
    for index in range(3, 60):
        rig.add(make_request(f"h{index}", digest=hot, max_tokens=10))
        rig.turn(seconds=0.01)
    assert rig.finish("cold").output_tokens == 2
    rig.run()


def test_least_recently_used_idle_adapter_is_evicted() -> None:
    """Of two idle ones the older goes, to host memory."""
    rig, (a, b, c) = with_adapters(3)
    for digest in (a, b, a, c):
        rig.add(make_request(f"{digest}{rig.now_s}", digest=digest))
        rig.run()
    assert [tier(rig, digest) for digest in (a, b, c)] == [ACTIVE, HOST, ACTIVE]


def test_pinned_adapter_keeps_its_slot() -> None:
    """With one of two slots pinned the others share the other; with both pinned a request ends in time."""
    rig, (a, b, c) = with_adapters(3, residency=ResidencyConfig(max_wait_s=1.0))
    pinned = load(rig, a, pinned=True)
    for _ in range(6):
        rig.turn()
    assert pinned[0].tier is ACTIVE
    for digest in (b, c, b):
        rig.add(make_request(f"{digest}{rig.now_s}", digest=digest))
        rig.run()
    assert tier(rig, a) is ACTIVE
    load(rig, b, pinned=True)
    rig.add(make_request("stuck", digest=c))
    for _ in range(30):
        rig.turn(seconds=0.1)
    end = rig.finish("stuck")
    assert (end.reason, end.error_reason) == (FinishReason.FAILED, "ADAPTER_UNAVAILABLE")


def test_free_bytes_in_pieces_are_moved_together() -> None:
    """Neither the request nor those behind it wait for a pin to go, and nobody else loses a slot for it."""
    rig, (pinned, idle, large, small) = with_adapters(4, num_slots=4)
    load(rig, pinned, pinned=True)
    rig.add(make_request("idle", digest=idle))
    rig.run()
    rig.arena.fragmented.add(large)
    rig.add(make_request("large", digest=large))
    rig.add(make_request("small", digest=small))
    rig.run()
    assert rig.arena.num_compactions == 1
    assert [tier(rig, digest) for digest in (pinned, idle, large, small)] == [ACTIVE] * 4
    assert rig.tokens("large") == expected_tokens(large, (1, 2, 3), 4)


def test_host_copy_goes_oldest_first_and_pool_is_never_exceeded() -> None:
    """Room for three of five; the bound is the pool's own assertion."""
    rig, digests = with_adapters(5, host_bytes=300, num_slots=2)
    for digest in (*digests, *digests):
        rig.add(make_request(f"{digest}{rig.now_s}", digest=digest))
        rig.run()
    assert rig.residency.stats().host_used_bytes <= 300


def test_host_copies_that_the_manager_wants_do_not_push_each_other_out() -> None:
    """A call takes the room of what nobody wants, and ends where there is none; a request finds some."""
    rig, (a, b, c, d, used) = with_adapters(5, host_bytes=300, residency=ResidencyConfig(max_wait_s=5))
    rig.add(make_request("used", digest=used))
    rig.run()
    ends = {digest: load(rig, digest, HOST) for digest in (a, b, c)}
    rig.turn()
    for _ in range(10):
        rig.turn(seconds=0.1)
    assert [tier(rig, digest) for digest in (a, b, c)] == [HOST, HOST, HOST]
    ends[d] = load(rig, d, HOST)
    for _ in range(60):
        rig.turn(seconds=0.1)
    assert rig.pool.reads == [used, a, b, c]
    assert [ends[digest][0].tier for digest in (a, b, c)] == [HOST, HOST, HOST]
    assert ends[d][0].reason == "ADAPTER_UNAVAILABLE"
    rig.add(make_request("after", digest=d))
    rig.run()
    assert rig.finish("after").reason is FinishReason.LENGTH


def test_arena_bytes_bound_what_is_active() -> None:
    """Two slots, but bytes for one: the adapters take turns."""
    rig, (a, b) = with_adapters(2, arena_bytes=150)
    rig.add(make_request("a", digest=a, max_tokens=6))
    rig.add(make_request("b", digest=b, max_tokens=6))
    rig.run()
    assert rig.tokens("b") == expected_tokens(b, (1, 2, 3), 6)


def test_adapter_that_the_catalog_does_not_name_is_not_loaded() -> None:
    """Never named, or unloaded and then deleted: NOT_FOUND, no read."""
    rig, (digest,) = with_adapters(1)
    rig.add(make_request("a", digest=digest))
    rig.run()
    rig.residency.set_desired([])
    rig.add(make_request("resolved before", digest=digest))
    rig.run()
    assert rig.finish("resolved before").reason is FinishReason.LENGTH
    ends = unload(rig, digest)
    rig.turn()
    assert ends == [True]
    for request_id, wanted in (("b", digest), ("c", "e" * 64)):
        rig.add(make_request(request_id, digest=wanted))
        rig.turn()
        assert rig.finish(request_id).error_reason == "ADAPTER_NOT_FOUND"


def test_unload_waits_for_leases_and_gives_everything_back() -> None:
    """New requests wait meanwhile; it ends within a turn of the last release; a later one reloads."""
    rig, (digest,) = with_adapters(1)
    rig.add(make_request("a", digest=digest, max_tokens=10))
    for _ in range(4):
        rig.turn()
    ends, twice = unload(rig, digest), unload(rig, digest)
    rig.add(make_request("b", digest=digest))
    rig.turn()
    assert (ends, rig.residency.stats().leases) == ([], 1)
    rig.abort("a")
    rig.turn()
    assert (ends, twice) == ([True], [True])
    stats = rig.residency.stats()
    assert (stats.active_adapters, stats.host_used_bytes, stats.arena_used_bytes) == (0, 0, 0)
    rig.run()
    assert rig.finish("b").reason is FinishReason.LENGTH


def test_unload_of_what_is_not_there() -> None:
    """False, at once; with keep_on_disk off the disk copy goes."""
    rig, (digest,) = with_adapters(1)
    assert unload(rig, digest) == [False]
    assert unload(rig, digest, keep_on_disk=False) == [False]
    rig.executor.run_all()
    assert digest not in rig.source.manifests


@pytest.mark.parametrize("moment", range(8))
def test_unload_at_any_moment_of_a_load(moment: int) -> None:
    """Fetching, read, copying or active: the load call hears of it, nothing stays behind."""
    rig, (digest,) = with_adapters(1, polls_per_copy=3)
    ends = load(rig, digest)
    for _ in range(moment):
        rig.turn(jobs=1)
    undone = unload(rig, digest)
    for _ in range(4):
        rig.turn()
    assert len(undone) == len(ends) == 1
    stats = rig.residency.stats()
    assert (stats.active_adapters, stats.host_used_bytes, stats.arena_used_bytes) == (0, 0, 0)
    assert rig.residency._slots._free == [1, 0]


@pytest.mark.parametrize("moment", range(8))
def test_desired_set_changes_at_any_moment_of_a_load(moment: int) -> None:
    """A prefetch no longer wanted ends where it ends; its slot is free for others at once."""
    rig, digests = with_adapters(3, polls_per_copy=3)
    rig.residency.set_desired(
        [desire(digests[0], ACTIVE, pinned=True), desire(digests[1], ACTIVE, pinned=True)]
    )
    for _ in range(moment):
        rig.turn(jobs=1)
    rig.residency.set_desired([desire(digests[2])])
    rig.add(make_request("a", digest=digests[2]))
    rig.run(40)
    assert rig.finish("a").reason is FinishReason.LENGTH


@pytest.mark.parametrize("moment", range(8))
def test_cancel_at_any_moment_of_an_adapter_wait(moment: int) -> None:
    """No lease, no waiter, no request is left; the adapter may finish its way up."""
    rig, (digest,) = with_adapters(1, polls_per_copy=3)
    rig.add(make_request("a", digest=digest))
    for _ in range(moment):
        rig.turn(jobs=1)
    rig.abort("a")
    rig.abort("a")
    for _ in range(8):
        rig.turn()
    rig.finish("a")
    assert rig.residency.stats().leases == 0
    entry = rig.residency._table.entries.get(digest)
    assert entry is None or not entry.waiters
    assert rig.residency.next_poll_in_s() is None


def test_manager_prefetches_and_pins() -> None:
    """Desired HOST stops at host memory, ACTIVE goes on; a larger desired set than slots does not thrash."""
    rig, digests = with_adapters(4)
    rig.residency.set_desired([desire(digests[0], HOST), *(desire(d, ACTIVE) for d in digests[1:])])
    for _ in range(60):
        rig.turn(seconds=1)
    assert tier(rig, digests[0]) is HOST
    assert sorted(tier(rig, d) for d in digests[1:]) == [ACTIVE, ACTIVE, HOST]
    assert rig.residency.stats().evictions == 0
    assert rig.residency.stats().loads == 4


def test_load_calls_of_both_tiers() -> None:
    """Each returns when its tier is reached; asking again returns at once."""
    rig, (digest,) = with_adapters(1)
    host, active = load(rig, digest, HOST), load(rig, digest, ACTIVE)
    for _ in range(6):
        rig.turn()
    assert host[0].tier in {HOST, ACTIVE}
    assert active[0].tier is ACTIVE
    again = load(rig, digest, HOST)
    rig.turn()
    assert again[0].tier is ACTIVE


def test_no_room_in_pool_by_its_own_count() -> None:
    """A pool that refuses although the bytes would do gets one revision less, then the read again."""
    rig, (a, b) = with_adapters(2, host_bytes=250)
    rig.add(make_request("a", digest=a))
    rig.run()
    rig.pool.total_bytes = 250
    rig.pool.held["fragment"] = 100
    rig.add(make_request("b", digest=b))
    for _ in range(20):
        rig.turn(seconds=0.05)
    assert rig.finish("b").reason is FinishReason.LENGTH
