"""Tiles of dense FP8 projections, and which of them torch computes: pure rules of shapes and scales."""

from dataclasses import dataclass
from functools import cache

MULTIPROCESSORS = 132
MAX_OWN_ROWS = 64
"""Up to so many rows a projection is bound by its matrix's bytes, and computed by the own kernel."""

TORCH_TAKES_BLOCKS = False
"""Whether block scales go to torch's product too: not before it is measured."""


@dataclass(frozen=True, slots=True)
class DenseTiles:
    """A program takes `block_m` rows of x and `block_n` of the matrix, `step` columns at once."""

    block_m: int
    block_n: int
    step: int
    stages: int
    num_warps: int


@cache
def select_dense(num_rows: int, out_features: int, in_features: int) -> DenseTiles:
    """The own kernel's tiles.

    For few rows a matrix must be on its way everywhere at once: tiles are narrow enough for a program on
    every multiprocessor, if the matrix has so many rows.
    """
    stages = max(2, min(5, -(-in_features // 128)))
    if num_rows <= MAX_OWN_ROWS:
        block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
        block_n = 64 if out_features >= 64 * 2 * MULTIPROCESSORS else 32
        if block_n == 32 and out_features < 32 * MULTIPROCESSORS:
            block_n = 16
        return DenseTiles(block_m, block_n, 128, stages, 4)
    if num_rows <= 512:
        return DenseTiles(64, 128, 128, min(4, stages), 4)
    return DenseTiles(128, 128, 128, min(4, stages), 8)


def uses_torch(num_rows: int, out_features: int, in_features: int, kind: str) -> bool:
    """Whether torch's scaled product computes it: many rows, and sizes that it takes."""
    if num_rows <= MAX_OWN_ROWS:
        return False
    if kind == "channel":
        return out_features % 16 == 0 and in_features % 16 == 0
    # block scales whose rows begin at multiples of 16 bytes
    return TORCH_TAKES_BLOCKS and out_features % 128 == 0 and in_features % 512 == 0
