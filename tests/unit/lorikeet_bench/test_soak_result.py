"""PASS means something: each broken promise, and a load too easy, is a reason to fail."""

from dataclasses import replace

import pytest

from lorikeet_bench.machine import describe_machine
from lorikeet_bench.process_memory import MemoryTrend
from lorikeet_bench.soak import SoakResult

GOOD = SoakResult(
    machine=describe_machine(),
    duration_s=360,
    seed=1,
    streams_wanted=64,
    streams_open_at_most=64,
    adapters=32,
    streams={"finished: length": 100},
    tokens=1000,
    wrong=0,
    lost=0,
    faults=(),
    churn={
        kind: {"done": 1}
        for kind in ("create", "replace", "delete", "unload", "pin", "unpin", "move an alias")
    },
    memory=(MemoryTrend("engine", 100, 101, 110, 0.01, is_flat=True),),
    levels_before={"adapter leases": 0},
    levels_after={"adapter leases": 0},
    growth={"adapter loads": 1, "adapter evictions": 1, "prefix hit tokens": 1, "compilations": 0},
    restarts=(),
)


def test_a_good_soak_passes() -> None:
    """Nothing to say against it; a short one need not have met everything."""
    assert GOOD.has_passed
    assert replace(GOOD, duration_s=8, churn={}, streams_open_at_most=3).has_passed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"wrong": 1}, "1 wrong"),
        ({"lost": 2}, "2 lost"),
        ({"restarts": ("the engine",)}, "the engine restarted or ended"),
        ({"memory": (MemoryTrend("engine", 100, 103, 110, 0.03, is_flat=False),)}, "engine is not flat"),
        ({"levels_after": {"adapter leases": 1}}, "adapter leases did not return: 0 before, 1 after"),
        ({"churn": {}}, "too easy: no create"),
        ({"streams_open_at_most": 63}, "too easy: never more than 63 streams"),
        ({"growth": {**GOOD.growth, "adapter evictions": 0}}, "too easy: no adapter evictions"),
        ({"growth": {**GOOD.growth, "compilations": 1}}, "1 kernels were compiled"),
    ],
)
def test_each_reason_fails_it(changes: dict[str, object], reason: str) -> None:
    """And is named."""
    result = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert not result.has_passed
    assert any(reason in failure for failure in result.failures)
