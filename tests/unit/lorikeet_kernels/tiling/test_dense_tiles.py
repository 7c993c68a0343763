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
SHARED_BYTES = 220_000


@pytest.mark.parametrize("kind", ["channel", "block"])
@pytest.mark.parametrize("size", SIZES)
def test_tiles_are_what_the_kernels_take(size: tuple[int, int], kind: str) -> None:
    """Powers of two, a step within a block of scales, no split without columns; few rows fit a tile."""
    for num_rows in (1, 2, 16, 17, 32, 33, 64, 65, 700, 20_000):
        tiles = select_dense(num_rows, *size, kind)
        powers = tiles.block_m, tiles.block_n, tiles.step, tiles.num_warps, tiles.ahead
        assert all(n & (n - 1) == 0 for n in powers)
        assert kind == "channel" or 128 % tiles.step == 0
        assert tiles.stages >= 2
        assert tiles.is_matrix_first == (num_rows <= MAX_OWN_ROWS)
        assert not tiles.is_matrix_first or (tiles.block_m >= num_rows and tiles.block_n % 64 == 0)
        assert tiles.splits == 1 or tiles.is_matrix_first
        steps = -(-size[1] // tiles.step)
        assert (tiles.splits - 1) * -(-steps // tiles.splits) < steps
        assert tiles.stages * tiles.step * (tiles.block_m + tiles.block_n) <= SHARED_BYTES


@pytest.mark.parametrize("num_rows", [16, 64])
def test_programs_of_few_rows_run_at_once_where_they_can(num_rows: int) -> None:
    """Columns are split for that, and a matrix whose programs would take two turns has fewer of them."""
    assert select_dense(num_rows, 57344, 8192, "channel").splits == 1
    assert select_dense(num_rows, 8192, 28672, "channel").splits == (2 if num_rows == 16 else 1)
    assert select_dense(num_rows, 2048, 4096, "block").splits == 4
    tiles = select_dense(num_rows, 10240, 8192, "channel")
    assert (tiles.block_n, tiles.splits) == ((64, 1) if num_rows == 16 else (128, 2))


@pytest.mark.parametrize("size", SIZES)
def test_batch_invariant_tiles_ignore_the_rows(size: tuple[int, int]) -> None:
    """One choice, and no parts of all rows in memory."""
    rows = (1, 40, 64, 65, 4096)
    chosen = {select_dense(count, *size, "channel", batch_invariant=True) for count in rows}
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
