"""Tile sizes of the LoRA kernels, chosen apart from them: measured tables per device, else a heuristic."""

from lorikeet_kernels.tiling.select import (
    is_ungrouped,
    select_block_m,
    select_expand,
    select_pair,
    select_shrink,
)
from lorikeet_kernels.tiling.tile_config import ExpandTiles, OpShape, PairTiles, ShrinkTiles

__all__ = [
    "ExpandTiles",
    "OpShape",
    "PairTiles",
    "ShrinkTiles",
    "is_ungrouped",
    "select_block_m",
    "select_expand",
    "select_pair",
    "select_shrink",
]
