"""Which bytes of the arena are taken."""

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.execution.arena_allocator import ArenaAllocator


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_ranges_never_overlap_and_all_come_back(actions: list[tuple[bool, int]]) -> None:
    """Any order of taking and giving back, against a map of single bytes."""
    allocator = ArenaAllocator(100)
    owner = [0] * 100
    held: dict[int, tuple[int, int]] = {}
    for number, (takes, value) in enumerate(actions, start=1):
        if takes:
            begin = allocator.allocate(value)
            gaps = "".join("x" if o else " " for o in owner).split("x")
            if begin is None:
                assert max(map(len, gaps)) < value
                continue
            assert not any(owner[begin : begin + value])
            owner[begin : begin + value] = [number] * value
            held[number] = (begin, value)
        elif held:
            begin, size = held.pop(sorted(held)[value % len(held)])
            owner[begin : begin + size] = [0] * size
            allocator.release(begin, size)
        assert allocator.used_bytes == sum(map(bool, owner))
    for begin, size in held.values():
        allocator.release(begin, size)
    assert allocator.used_bytes == 0
    assert allocator.allocate(100) == 0


def test_best_fit() -> None:
    """The smallest gap that holds it, so that large gaps stay for large adapters."""
    allocator = ArenaAllocator(100)
    for size in (30, 10, 10, 10, 40):
        allocator.allocate(size)
    allocator.release(0, 30)
    allocator.release(40, 10)
    assert allocator.allocate(10) == 40
    assert allocator.allocate(20) == 0
    assert allocator.allocate(11) is None
    assert allocator.allocate(0) == 0


def test_replacing_all_ranges() -> None:
    """What lies between, before and after the given ranges is free."""
    allocator = ArenaAllocator(100)
    allocator.allocate(70)
    allocator.replace([(50, 10), (10, 20), (30, 5)])
    assert allocator.used_bytes == 35
    assert [allocator.allocate(size) for size in (41, 40, 15, 10, 1)] == [None, 60, 35, 0, None]
    allocator.replace([])
    assert (allocator.used_bytes, allocator.allocate(100)) == (0, 0)


def test_empty_arena() -> None:
    """A node without room for adapters still starts."""
    assert ArenaAllocator(0).allocate(1) is None
