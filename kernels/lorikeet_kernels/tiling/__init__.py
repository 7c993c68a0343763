"""Tile sizes of the LoRA kernels, chosen apart from them: measured tables per device, else a heuristic."""

from lorikeet_kernels.tiling.select import (
    MAX_SEGMENT_BLOCKS,
    is_alone,
    is_segmented,
    is_ungrouped,
    select_block_m,
    select_expand,
    select_pair,
    select_segment,
    select_shrink,
    select_tiles,
    select_wide_segment,
)
from lorikeet_kernels.tiling.tile_config import ExpandTiles, OpShape, PairTiles, RegisterTiles, ShrinkTiles

__all__ = [
    "MAX_SEGMENT_BLOCKS",
    "ExpandTiles",
    "OpShape",
    "PairTiles",
    "RegisterTiles",
    "ShrinkTiles",
    "is_alone",
    "is_segmented",
    "is_ungrouped",
    "select_block_m",
    "select_expand",
    "select_pair",
    "select_segment",
    "select_shrink",
    "select_tiles",
    "select_wide_segment",
]
