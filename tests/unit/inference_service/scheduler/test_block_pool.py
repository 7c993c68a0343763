"""The block pool's states."""

import pytest

from inference_service.scheduler.block_pool import BlockPool


def test_allocate_gives_distinct_blocks_or_nothing() -> None:
    """A request for more than there is changes nothing."""
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert first is not None
    assert len(set(first)) == 3
    assert pool.allocate(2) is None
    assert pool.num_available == 1


def test_shared_block_is_free_after_its_last_release() -> None:
    """Two holders, two releases."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.retain(blocks)
    pool.release(blocks)
    assert pool.num_available == 1
    pool.release(blocks)
    assert pool.num_available == 2


def test_releasing_once_too_often_fails() -> None:
    """Counts never go below zero."""
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_published_block_is_found_until_it_is_given_away() -> None:
    """A cached block counts as available, and its key goes with it."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], b"key")
    pool.release(blocks)
    assert pool.find(b"key") == blocks[0]
    assert pool.num_available == 2
    pool.allocate(2)
    assert pool.find(b"key") is None


def test_oldest_cached_block_goes_first_and_a_sequence_from_its_end() -> None:
    """The head of a sequence outlives its tail; an older release goes before a newer one."""
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    assert old is not None
    assert new is not None
    for block in (*old, *new):
        pool.publish(block, bytes([block]))
    pool.release(old)
    pool.release(new)
    taken = [block for _ in range(4) for block in pool.allocate(1) or ()]
    assert taken == [old[1], old[0], new[1], new[0]]


def test_free_blocks_are_taken_before_cached_ones() -> None:
    """A prefix is kept as long as something else can be given."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], b"key")
    pool.release(blocks)
    pool.allocate(1)
    assert pool.find(b"key") == blocks[0]


def test_second_block_of_a_key_stays_unpublished() -> None:
    """One block per key; the other returns to the free list."""
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], b"key")
    pool.publish(blocks[1], b"key")
    assert pool.find(b"key") == blocks[0]
    pool.release([blocks[1]])
    assert pool.allocate(1) == [blocks[1]]
