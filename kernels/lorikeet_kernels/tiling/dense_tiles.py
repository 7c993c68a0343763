"""Tiles of dense FP8 projections, and which of them torch computes: pure rules of shapes and scales."""

from dataclasses import dataclass, replace
from functools import cache

from lorikeet_kernels.tiling.few_rows_tiles import VECTOR_BYTES, WARP_BYTES, FewRowsTiles

MULTIPROCESSORS = 132
MAX_OWN_ROWS = 64
"""Up to so many rows a projection is bound by its matrix's bytes, and computed by the own kernels."""
MAX_LANE_ROWS = 2
"""Up to so many rows lanes multiply by themselves (`fp8_few_rows`): two where columns are few."""
LANE_LOADS = 8
"""Of 16 bytes, that a lane has on its way at most."""
LINE_BYTES = 128
AHEAD_BYTES = 9_000_000
"""Of a matrix, that come to L2 while the launch before, some 2 us, still runs."""


@dataclass(frozen=True, slots=True)
class DenseTiles:
    """A program takes `block_m` rows of x and `block_n` of the matrix, `step` columns at once.

    `splits` > 1 splits the columns; a launch more adds the parts up. Of few rows `ahead` lines of each of the
    matrix's rows are fetched to L2 before the launch before has ended. `is_matrix_first`: the matrix's rows
    are the MMA's rows and x's its columns.
    """

    block_m: int
    block_n: int
    step: int
    stages: int
    num_warps: int
    splits: int = 1
    ahead: int = 4
    is_matrix_first: bool = False


@cache
def select_dense(
    num_rows: int, out_features: int, in_features: int, kind: str, *, batch_invariant: bool = False
) -> DenseTiles:
    """The tensor cores' tiles. With `batch_invariant` they do not depend on the number of rows.

    For few rows a matrix must be on its way everywhere at once: a program has 64 kB of it on its way. A
    multiprocessor takes two such programs, of more than 32 rows one; matrices that need more places then have
    programs of 128 of their rows and half the steps, and those that leave places free split columns. Steps of
    256 columns, which blocks of scales do not allow, are up to 4 % faster than of 128 up to 32 rows on an
    H200, and up to 2 % slower of 64. Of many rows 64 a program are 13 to 17 % faster there than 128, which
    leave room for one program a multiprocessor (4,096 rows, block scales).
    """
    if batch_invariant:
        return replace(select_dense(1, out_features, in_features, kind), splits=1)
    if num_rows > MAX_OWN_ROWS:
        return DenseTiles(64, 128, 128, max(2, min(4, -(-in_features // 128))), 4)
    block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    is_wide = block_m == 64 and out_features > 64 * MULTIPROCESSORS
    block_n, num_warps = (128, 8) if is_wide else (64, 4)
    step = 256 if block_m < 64 and kind == "channel" else 128
    stages = max(2, min((512 if is_wide else 1024) // step, -(-in_features // step)))
    programs = -(-out_features // block_n)
    places = MULTIPROCESSORS if block_m == 64 and not is_wide else 2 * MULTIPROCESSORS
    splits = 1
    # parts of few columns pay where most multiprocessors would be idle
    while (
        splits < 8
        and 2 * splits * programs <= places
        and in_features >= 2 * splits * (1024 if 2 * splits * programs < MULTIPROCESSORS else 4096)
    ):
        splits *= 2
    ahead = lines_ahead(splits * programs, block_n)
    return DenseTiles(block_m, block_n, step, stages, num_warps, splits, ahead, is_matrix_first=True)


def lines_ahead(programs: int, block_n: int) -> int:
    """A power of two: AHEAD_BYTES of all programs that run at once, at most four a multiprocessor."""
    lines = AHEAD_BYTES // (LINE_BYTES * block_n * min(programs, 4 * MULTIPROCESSORS))
    return 1 << max(1, min(4, lines.bit_length() - 1))


@cache
def select_lanes(num_rows: int, out_features: int, in_features: int) -> FewRowsTiles | None:
    """The tiles of lanes' own multiplications where these serve, else None.

    Warps are as many as leave a lane up to 8 loads along a row, rows as many as make up LANE_LOADS; of more
    rows of x the sums take registers. Measured on an H200: for two rows of x the tensor cores take 5 to 19 %
    less than the best of lanes' tiles from 8,192 columns on, which take 7 % less with 2,048.
    """
    if not 1 <= num_rows <= MAX_LANE_ROWS or in_features % VECTOR_BYTES:
        return None
    num_warps = 4 if in_features <= 8 * WARP_BYTES else 8 if in_features <= 64 * WARP_BYTES else 16
    chunks = -(-in_features // (WARP_BYTES * num_warps))
    if chunks > (LANE_LOADS if num_rows == 1 else 1):
        return None
    rows = 8
    while rows > 1 and (rows * chunks > LANE_LOADS // num_rows or out_features < rows * 2 * MULTIPROCESSORS):
        rows //= 2
    return FewRowsTiles(rows, num_warps)


def uses_torch(num_rows: int, out_features: int, in_features: int, kind: str, *, on_hopper: bool) -> bool:
    """Whether torch's scaled product computes it: many rows, and sizes and scales that it takes there.

    Measured on an H200 for block scales: 256 rows take 32 us instead of 44 (8192 x 8192) and 11.7 instead of
    12.8 (5120 x 2048), 4,096 rows 467 instead of 652 and 84 instead of 106.
    """
    if num_rows <= MAX_OWN_ROWS:
        return False
    if kind == "channel":
        return out_features % 16 == 0 and in_features % 16 == 0
    # cuBLAS takes groups by blocks on Hopper alone, and scales whose rows begin at multiples of 16 bytes
    return on_hopper and out_features % 128 == 0 and in_features % 512 == 0
