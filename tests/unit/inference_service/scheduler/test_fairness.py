"""Virtual token counters: shares of tenants that all want more than there is."""

from collections import Counter

import pytest

from inference_service.domain.tenant import TenantShare
from inference_service.scheduler.fairness import TokenCounters
from tests.support.engine_builders import Rig, make_request


def served(rig: Rig, turns: int) -> Counter[str]:
    """Tokens computed per tenant (the first letter of the request's id) over some turns."""
    start = len(rig.runner.steps)
    for _ in range(turns):
        rig.turn()
    return Counter(
        {
            tenant: sum(
                s.num_scheduled_tokens
                for step in rig.runner.steps[start:]
                for s in step.scheduled
                if s.request_id[0] == tenant
            )
            for tenant in {r[0] for r in rig.outputs}
        }
    )


def flood(rig: Rig, tenant: str, count: int, length: int = 12) -> None:
    """Many equal requests of one tenant, no two with a common prefix."""
    for index in range(count):
        prompt = tuple(range(index * 20, index * 20 + length))
        rig.add(make_request(f"{tenant}{index}", prompt, tenant=tenant, max_tokens=6))


def test_one_tenants_flood_does_not_delay_another() -> None:
    """Sixty requests wait; another tenant's single one is next."""
    rig = Rig(max_running_requests=2)
    flood(rig, "f", 60)
    for _ in range(20):
        rig.turn()
    rig.add(make_request("b", tenant="b"))
    for _ in range(12):
        rig.turn()
    assert rig.finish("b").output_tokens == 4


def test_equal_tenants_are_served_equally_whatever_their_requests_size() -> None:
    """Long prompts against short ones: tokens count, not requests."""
    rig = Rig(max_running_requests=2, max_waiting_requests=1000, prefix_cache=False)
    flood(rig, "a", 200, length=24)
    flood(rig, "b", 200, length=4)
    count = served(rig, 300)
    assert count["a"] / count["b"] == pytest.approx(1, rel=0.35)


def test_weights_set_the_ratio() -> None:
    """Three times the weight, three times the tokens."""
    rig = Rig(max_running_requests=2, max_waiting_requests=1000, prefix_cache=False)
    rig.scheduler.set_tenants([TenantShare("a", 3.0), TenantShare("b", 1.0)])
    flood(rig, "a", 200)
    flood(rig, "b", 200)
    count = served(rig, 300)
    assert count["a"] / count["b"] == pytest.approx(3, rel=0.2)


def test_idleness_earns_nothing() -> None:
    """A tenant that comes back starts level with the busy ones, not with a credit."""
    counters = TokenCounters()
    counters.arrive("a")
    counters.charge("a", 1000, 0)
    counters.arrive("late")
    assert counters.counter("late") == 1000


def test_leaving_does_not_clear_a_debt() -> None:
    """A known tenant that left while ahead of the others is still ahead when it returns."""
    counters = TokenCounters()
    counters.set_shares([TenantShare("a"), TenantShare("b")])
    counters.arrive("a")
    counters.arrive("b")
    counters.charge("a", 500, 0)
    counters.leave("a")
    counters.charge("b", 100, 0)
    counters.arrive("a")
    assert (counters.counter("a"), counters.counter("b")) == (500, 100)


def test_all_idle_then_new() -> None:
    """With nobody busy a newcomer takes the level at which the last one left."""
    counters = TokenCounters()
    counters.arrive("a")
    counters.charge("a", 0, 10)
    counters.leave("a")
    counters.arrive("b")
    assert counters.counter("b") == 20


def test_recomputation_after_preemption_is_not_charged() -> None:
    """A tenant pays once for each token, however often we compute it."""
    tight, roomy = Rig(num_blocks=12, prefix_cache=False), Rig(prefix_cache=False)
    totals = []
    for rig in (tight, roomy):
        for index in range(6):
            rig.add(make_request(f"r{index}", (index, 1, 2), max_tokens=20))
        rig.run()
        totals.append(rig.scheduler._counters._last_idle)
    assert tight.scheduler.stats().preemptions > 0
    assert totals[0] == totals[1]
