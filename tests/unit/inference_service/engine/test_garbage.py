"""Cyclic garbage is collected when the loop says so, and at no other time."""

import gc
import weakref

import pytest

from inference_service.engine.garbage import StepCollector


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.myself = self


def make_garbage(count: int) -> weakref.ref[Node]:
    """Cycles that nobody holds; the last one's reference."""
    nodes = [Node() for _ in range(count)]
    return weakref.ref(nodes[-1])


@pytest.fixture
def collector() -> StepCollector:
    """One in charge, on a clock that stands still."""
    return StepCollector(lambda: 0.0)


def test_nothing_is_collected_in_a_step(collector: StepCollector) -> None:
    """Only between steps and only if there is much; when idle, whatever there is."""
    collector.take_over()
    try:
        assert not gc.isenabled()
        few = make_garbage(50)
        collector.between_steps()
        assert few() is not None
        many = make_garbage(20_000)
        assert many() is not None
        collector.between_steps()
        assert many() is None
        assert few() is None
        later = make_garbage(3_000)
        collector.between_steps()
        assert later() is not None
        collector.while_idle()
        assert later() is None
    finally:
        collector.give_back()
    assert gc.isenabled()


def test_a_busy_loop_looks_at_everything_once_a_minute() -> None:
    """What survived young collections, and then became garbage, goes too."""
    now_s = 0.0
    collector = StepCollector(lambda: now_s)
    collector.take_over()
    try:
        held = [Node()]
        old = weakref.ref(held[0])
        for _ in range(2):
            make_garbage(10_000)
            collector.between_steps()
        held.clear()
        make_garbage(10_000)
        collector.between_steps()
        assert old() is not None
        now_s = 61.0
        make_garbage(10_000)
        collector.between_steps()
        assert old() is None
    finally:
        collector.give_back()
