"""Rules of dense FP8 projections: what torch, lanes and tensor cores take; no GPU."""

import pytest

from lorikeet_kernels.dense.fp8_few_rows import MAX_ROWS
from lorikeet_kernels.tiling.dense_tiles import (
    MAX_LANE_ROWS,
    MAX_OWN_ROWS,
    select_dense,
    select_lanes,
    uses_torch,
)

# outputs and inputs: Llama-3.3-70B's, Qwen3-30B-A3B's, ragged ones
SIZES = ((57344, 8192), (10240, 8192), (8192, 28672), (5120, 2048), (2048, 4096), (300, 208), (1, 16))


@pytest.mark.parametrize("size", SIZES)
def test_tiles_are_what_the_kernels_take(size: tuple[int, int]) -> None:
    """Powers of two, a step within a block of scales, no split without columns of its own."""
    for num_rows in (1, 2, 16, 17, 32, 33, 64, 65, 700, 20_000):
        tiles = select_dense(num_rows, *size)
        assert all(n & (n - 1) == 0 for n in (tiles.block_m, tiles.block_n, tiles.step, tiles.num_warps))
        assert 128 % tiles.step == 0
        assert tiles.stages >= 2
        assert tiles.splits == 1 or num_rows <= MAX_OWN_ROWS
        steps = -(-size[1] // tiles.step)
        assert (tiles.splits - 1) * -(-steps // tiles.splits) < steps


def test_splits_make_enough_programs() -> None:
    """Of few rows, where the matrix's rows alone do not; many rows are not split."""
    assert select_dense(16, 57344, 8192).splits == 1
    assert select_dense(16, 8192, 8192).splits > 1
    assert select_dense(16, 8192, 28672).splits > 1
    assert select_dense(65, 8192, 8192).splits == 1


def test_more_rows_have_more_steps_on_their_way_where_there_are_many() -> None:
    """Not of splits too short to have been measured."""
    assert select_dense(32, 8192, 8192).stages == 4
    assert select_dense(33, 8192, 8192).stages == 6
    assert select_dense(64, 5120, 2048).stages == 4


@pytest.mark.parametrize("size", SIZES)
def test_batch_invariant_tiles_ignore_the_rows(size: tuple[int, int]) -> None:
    """One choice, and no parts of all rows in memory."""
    chosen = {select_dense(rows, *size, batch_invariant=True) for rows in (1, 40, 64, 65, 4096)}
    assert len(chosen) == 1
    assert chosen.pop().splits == 1


def test_lanes_take_very_few_rows_whose_bytes_they_load_at_once() -> None:
    """No more rows than the kernel has sums for, and columns by 16."""
    assert MAX_LANE_ROWS <= MAX_ROWS
    for size in SIZES:
        assert select_lanes(1, *size) is not None
        assert (select_lanes(MAX_LANE_ROWS, *size) is not None) == (size[1] <= 2048)
        assert select_lanes(MAX_LANE_ROWS + 1, *size) is None
    assert select_lanes(1, 256, 200) is None
    assert select_lanes(1, 256, 1 << 20) is None


def test_torch_takes_many_rows_of_sizes_that_it_can() -> None:
    """By channels rows of 16 bytes, by blocks whole ones whose scales' rows are of 16 bytes."""
    assert not uses_torch(MAX_OWN_ROWS, 8192, 8192, "channel", on_hopper=True)
    assert uses_torch(MAX_OWN_ROWS + 1, 8192, 8192, "block", on_hopper=True)
    assert uses_torch(1000, 8192, 208, "channel", on_hopper=True)
    assert not uses_torch(1000, 8192, 200, "channel", on_hopper=True)
    assert not uses_torch(1000, 8192, 384, "block", on_hopper=True)
    assert not uses_torch(1000, 8200, 512, "block", on_hopper=True)
    assert not uses_torch(1000, 8192, 8192, "block", on_hopper=False)
    assert uses_torch(1000, 8192, 8192, "channel", on_hopper=False)
