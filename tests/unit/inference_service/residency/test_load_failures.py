"""Loads that fail, on fakes: who waits is told, who does not goes on, and nothing is tried for ever."""

from typing import Any

import pytest

from inference_service.domain.adapter import ResidencyTier, ResidentAdapter
from inference_service.domain.request import FinishReason
from inference_service.residency.config import ResidencyConfig
from tests.support.engine_builders import Rig, desire, load, make_request, tier, unload, with_adapters

ACTIVE, HOST = ResidencyTier.ACTIVE, ResidencyTier.HOST


@pytest.mark.parametrize("limit", ["host_bytes", "arena_bytes"])
def test_adapter_too_large_fails_at_once(limit: str) -> None:
    """What can never fit is told so; nothing is evicted for it, and others are served."""
    rig, (small,) = with_adapters(1, **{limit: 250})
    rig.add(make_request("small", digest=small))
    rig.run()
    huge = rig.source.add("huge", 300)
    rig.residency.set_desired([desire(small), desire(huge, num_bytes=300)])
    rig.add(make_request("huge", digest=huge))
    rig.run(20)
    assert rig.finish("huge").error_reason == "ADAPTER_TOO_LARGE"
    assert tier(rig, small) is ACTIVE
    ends = load(rig, huge)
    for _ in range(4):
        rig.turn()
    assert ends[0].reason == "ADAPTER_TOO_LARGE"


def test_failed_load_fails_those_who_wait_and_is_retried_after_the_cool_down() -> None:
    """Not before: requests in between fail at once, without another read."""
    rig, (bad, good) = with_adapters(2)
    rig.pool.bad.add(bad)
    for index in range(3):
        rig.add(make_request(f"bad{index}", digest=bad))
    rig.add(make_request("good", digest=good))
    rig.run(20)
    assert all(rig.finish(f"bad{i}").error_reason == "ADAPTER_UNAVAILABLE" for i in range(3))
    assert "sha256" in rig.finish("bad0").error_message
    assert rig.finish("good").reason is FinishReason.LENGTH
    rig.add(make_request("soon", digest=bad))
    rig.run(3)
    assert rig.pool.reads.count(bad) == 1
    rig.pool.bad.clear()
    rig.source.add("a0")
    rig.now_s += 6
    rig.add(make_request("later", digest=bad))
    rig.run(20)
    assert rig.finish("later").reason is FinishReason.LENGTH
    assert rig.residency.stats().leases == 0


def test_background_load_that_fails_is_not_retried_for_ever() -> None:
    """Five tries, then it waits to be asked."""
    rig, (bad,) = with_adapters(1)
    rig.pool.bad.add(bad)
    rig.source.remove = lambda digest: None  # type: ignore[method-assign]
    rig.residency.set_desired([desire(bad, HOST)])
    for _ in range(100):
        rig.turn(seconds=50)
    assert len(rig.pool.reads) == 5


def test_missing_payload_is_asked_of_the_manager_and_the_wait_is_bounded() -> None:
    """Demand is told; after the payload came by a load call the request runs. Without it, it ends."""
    rig = Rig(residency=ResidencyConfig(max_wait_s=10))
    digest, never = rig.source.add("a"), "f" * 64
    manifest = rig.source.manifests.pop(digest)
    rig.residency.set_desired([desire(digest), desire(never)])
    rig.add(make_request("a", digest=digest))
    rig.add(make_request("never", digest=never))
    for _ in range(3):
        rig.turn()
    assert {demand.digest: demand.waiting_requests for demand in rig.residency.take_demands()} == {
        digest: 1,
        never: 1,
    }
    rig.source.manifests[digest] = manifest
    ends = load(rig, digest)
    for _ in range(10):
        rig.turn()
    assert isinstance(ends[0], ResidentAdapter)
    assert rig.finish("a").reason is FinishReason.LENGTH
    rig.turn(seconds=11)
    assert rig.finish("never").error_reason == "ADAPTER_UNAVAILABLE"


def test_a_refused_demand_ends_who_waits_and_nobody_else() -> None:
    """At once, with the manager's words; a request after the cool-down asks the manager again."""
    rig, (other,) = with_adapters(1)
    lost = "f" * 64
    rig.residency.set_desired([desire(other), desire(lost)])
    assert not rig.residency.refuse_demand(lost, "early", rig.now_s)
    rig.add(make_request("lost", digest=lost))
    rig.add(make_request("other", digest=other))
    ends: list[Any] = []
    for _ in range(3):
        rig.turn()
    rig.residency.load(desire(lost, HOST), rig.now_s, ends.append)
    rig.turn()
    rig.turn()
    assert rig.residency.take_demands()
    assert rig.residency.refuse_demand(lost, "its files are gone", rig.now_s)
    assert not rig.residency.refuse_demand(lost, "twice", rig.now_s)
    rig.run()
    end = rig.finish("lost")
    assert end.error_reason == "ADAPTER_UNAVAILABLE"
    assert "its files are gone" in end.error_message
    assert rig.finish("other").reason is FinishReason.LENGTH
    rig.add(make_request("soon", digest=lost))
    rig.run(2)
    assert rig.finish("soon").error_reason == "ADAPTER_UNAVAILABLE"
    rig.turn(seconds=6)
    rig.add(make_request("later", digest=lost))
    for _ in range(3):
        rig.turn()
    assert [demand.digest for demand in rig.residency.take_demands()] == [lost]


def test_a_damaged_copy_on_disk_is_fetched_once_more_before_anybody_hears_of_it() -> None:
    """Where the store's copy is whole the request only waits longer; damaged again, it fails."""
    rig, (healed, lost) = with_adapters(2)
    rig.source.damaged |= {healed, lost}
    rig.pool.bad |= {healed, lost}
    for name, digest in (("healed", healed), ("lost", lost)):
        rig.add(make_request(name, digest=digest))
    while healed in rig.source.damaged or lost in rig.source.damaged:
        rig.turn()
    rig.pool.bad.remove(healed)
    rig.source.damaged.add(lost)
    rig.run(50)
    assert rig.finish("healed").reason is FinishReason.LENGTH
    assert rig.finish("lost").error_reason == "ADAPTER_UNAVAILABLE"
    assert (rig.pool.reads.count(healed), rig.pool.reads.count(lost)) == (2, 2)
    # After a good load the next damage is a new one.
    unload(rig, healed)
    rig.turn()
    rig.source.damaged.add(healed)
    rig.pool.bad.add(healed)
    rig.add(make_request("again", digest=healed))
    while healed in rig.source.damaged:
        rig.turn()
    rig.pool.bad.remove(healed)
    rig.run(50)
    assert rig.finish("again").reason is FinishReason.LENGTH


def test_room_on_disk_is_made_off_the_loop() -> None:
    """And its end is told, also where it failed."""
    rig, _ = with_adapters(0)
    ends: list[bool] = []
    rig.residency.make_disk_room(100, ends.append)
    rig.turn(jobs=0)
    assert ends == []
    rig.turn()
    rig.source.make_room = lambda _: 1 / 0  # type: ignore[method-assign]
    rig.residency.make_disk_room(100, ends.append)
    rig.turn()
    assert ends == [True, False]


def test_a_reader_that_crashes_tells_the_tenant_no_paths() -> None:
    """Whatever it raised: the request ends, others go on."""
    rig, (odd,) = with_adapters(1)

    def crash(*_: object) -> int:
        raise PermissionError(13, "Permission denied", "/secret/place")

    rig.pool.read = crash  # type: ignore[method-assign]
    rig.add(make_request("odd", digest=odd))
    rig.run(20)
    assert rig.finish("odd").error_reason == "ADAPTER_UNAVAILABLE"
    assert "/secret" not in rig.finish("odd").error_message
