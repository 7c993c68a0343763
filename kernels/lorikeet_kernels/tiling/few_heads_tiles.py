"""Projections of heads of few rows: which the own kernel takes, and with what tiles. Pure functions."""

from dataclasses import dataclass

from lorikeet_kernels.tiling.measured import MEASURED

TILE_NUMBERS = 8192  # of a weight: 16 heads of 128 x 512 give an H200's 132 multiprocessors 128 programs
RANK_NUMBERS = 16384  # of the matrices that make a program's rank vectors: beyond, they spill
MAX_PROGRAM_ROWS = 4

FASTER_FEW_HEADS: dict[str, int] = {"NVIDIA H200": 4}
"""Up to how many rows the own kernel takes, by the device's name. Predicted, see docs/performance.md."""


@dataclass(frozen=True, slots=True)
class FewHeadsTiles:
    """A program takes `columns` of a head's outputs and `rows` rows of x."""

    columns: int
    rows: int
    num_warps: int = 4


def takes_few_heads(num_rows: int, device: str) -> bool:
    """Whether the own kernel takes so many rows."""
    return 1 <= num_rows <= FASTER_FEW_HEADS.get(MEASURED.name(device), 0)


def select_few_heads(num_rows: int, in_features: int, out_features: int, rank: int = 0) -> FewHeadsTiles:
    """Tiles; with adapters of up to `rank`, whose matrices a program keeps for each of its rows.

    A row's bits do not depend on `rows`, and `columns` are the same with adapters and without.
    """
    width = 1 << (in_features - 1).bit_length()
    columns = min(max(1, TILE_NUMBERS // width), 1 << (out_features - 1).bit_length())
    rows = min(MAX_PROGRAM_ROWS, 1 << (num_rows - 1).bit_length())
    if rank:
        rows = min(rows, max(1, RANK_NUMBERS // (rank * width)))
    return FewHeadsTiles(columns, rows)
