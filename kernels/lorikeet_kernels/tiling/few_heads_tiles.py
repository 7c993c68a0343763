"""Projections of heads of few rows: which the own kernel takes, and with what tiles. Pure functions."""

from dataclasses import dataclass

from lorikeet_kernels.tiling.measured import MEASURED

TILE_NUMBERS = 8192  # of a weight: 16 heads of 128 x 512 give an H200's 132 multiprocessors 128 programs

FASTER_FEW_HEADS: dict[str, int] = {"NVIDIA H200": 4}
"""Up to how many rows the own kernel takes, by the device's name: what was measured to be faster."""


@dataclass(frozen=True, slots=True)
class FewHeadsTiles:
    """A program takes `columns` of a head's outputs, of one row of x."""

    columns: int
    num_warps: int = 4


def takes_few_heads(num_rows: int, device: str) -> bool:
    """Whether the own kernel takes so many rows."""
    return 1 <= num_rows <= FASTER_FEW_HEADS.get(MEASURED.name(device), 0)


def select_few_heads(in_features: int, out_features: int) -> FewHeadsTiles:
    """Tiles, the same with adapters and without."""
    width = 1 << (in_features - 1).bit_length()
    return FewHeadsTiles(min(max(1, TILE_NUMBERS // width), 1 << (out_features - 1).bit_length()))
