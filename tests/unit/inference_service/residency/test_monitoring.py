"""What the rooms of the engine tell a monitor, on fakes and a clock that the test turns."""

from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.engine_report import AdapterUse, LoadStage, ResidencyCounts, StageCounts
from tests.support.engine_builders import Rig, desire, make_request

ACTIVE, HOST, COPYING = ResidencyTier.ACTIVE, ResidencyTier.HOST, ResidencyTier.COPYING


def with_adapters(count: int, **changes: int) -> tuple[Rig, list[str]]:
    """A rig whose catalog names `count` adapters of 100 bytes."""
    rig = Rig(**changes)
    digests = [rig.source.add(f"a{index}") for index in range(count)]
    rig.residency.set_desired([desire(digest) for digest in digests])
    return rig, digests


def stage(counts: ResidencyCounts, wanted: LoadStage) -> StageCounts:
    """One stage's counts."""
    return next(s for s in counts.stages if s.stage is wanted)


def test_stages_are_timed_and_places_listed() -> None:
    """A copy takes the turns from its begin to its end; what is on the device comes first."""
    rig, digests = with_adapters(4, num_slots=2, polls_per_copy=4)
    for digest in digests[:3]:
        rig.add(make_request(digest[:4], digest=digest))
        rig.run()
    counts = rig.residency.counts()
    assert counts.listed == ((digests[2], ACTIVE), (digests[1], ACTIVE), (digests[0], HOST))
    assert dict(counts.num_by_tier) == {HOST: 1, COPYING: 0, ACTIVE: 2}
    assert (counts.slot_evictions, counts.host_evictions) == (1, 0)
    for wanted in LoadStage:
        assert stage(counts, wanted).durations.num == 3
        assert stage(counts, wanted).failures == ()
    # Three copies, each polled four times, a millisecond apart.
    assert 0.009 <= stage(counts, LoadStage.COPY).durations.sum_s <= 0.016


def test_the_list_is_bounded_and_keeps_the_device() -> None:
    """Of 100 in host memory and two on the device both are listed, whoever was used last."""
    rig, digests = with_adapters(102, num_slots=2, host_bytes=100_000)
    for digest in digests[:2]:
        rig.add(make_request(digest[:6], digest=digest))
        rig.run()
    rig.residency.set_desired([desire(digest, HOST) for digest in digests])
    for _ in range(300):
        rig.turn()
    counts = rig.residency.counts()
    assert len(counts.listed) == 64
    assert {digest for digest, tier in counts.listed if tier is ACTIVE} == set(digests[:2])
    assert dict(counts.num_by_tier) == {HOST: 100, COPYING: 0, ACTIVE: 2}


def test_failures_by_stage_and_reason() -> None:
    """Damaged bytes fail when they are read, what is too large once its manifest is known."""
    rig, (damaged,) = with_adapters(1)
    large = rig.source.add("large", 100_000)
    rig.residency.set_desired([desire(damaged), desire(large)])
    rig.pool.bad.add(damaged)
    for digest in (damaged, large):
        rig.add(make_request(digest[:4], digest=digest))
        rig.run()
    counts = rig.residency.counts()
    assert stage(counts, LoadStage.READ).failures == (("ADAPTER_PAYLOAD", 1),)
    assert stage(counts, LoadStage.FETCH).failures == (("ADAPTER_TOO_LARGE", 1),)
    assert stage(counts, LoadStage.COPY).failures == ()
    assert stage(counts, LoadStage.READ).durations.num == 0


def test_use_of_adapters() -> None:
    """Running and waiting digests once each; only what lacks its adapter waits for it."""
    rig, (first, second) = with_adapters(2, num_slots=1, max_running_requests=2)
    assert rig.scheduler.adapter_use() == AdapterUse()
    for name, digest in (("a", first), ("b", first), ("c", first), ("base", None)):
        rig.add(make_request(name, digest=digest, max_tokens=50))
    for _ in range(8):
        rig.turn()
    rig.add(make_request("d", digest=second, max_tokens=1))
    rig.add(make_request("e", digest=second, max_tokens=1))
    rig.turn()
    use = rig.scheduler.adapter_use()
    assert use.running == (first,)
    assert set(use.waiting) == {first, second}
    assert len(use.waiting) == 2
    assert use.num_waiting_for_adapter == 2
    rig.run(2000)
    assert rig.scheduler.adapter_use() == AdapterUse()


def test_time_in_a_full_batch_is_the_queues() -> None:
    """A request whose adapter came while it waited for a place waited for the place, not for the adapter."""
    rig, (digest,) = with_adapters(1, max_running_requests=1, polls_per_copy=3)
    rig.add(make_request("long", max_tokens=50))
    rig.turn()
    rig.add(make_request("late", digest=digest, max_tokens=1))
    rig.run()
    timings = rig.finish("late").timings
    assert 2 <= timings.adapter_wait_ms <= 8
    assert 40 <= timings.queue_ms <= 50


def test_prefix_lookups_are_counted() -> None:
    """In tokens, hit or not; without the cache nothing is looked up."""
    for prefix_cache, expected in ((True, (18, 8)), (False, (0, 0))):
        rig = Rig(prefix_cache=prefix_cache)
        for name in ("a", "b"):
            rig.add(make_request(name, range(9), max_tokens=1))
            rig.run()
        stats = rig.scheduler.stats()
        assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == expected
