"""The choice of path and tiles: pure functions of shape and device, the measured table first, else a rule."""

import math
from functools import cache

from lorikeet_kernels.tiling.tile_config import ExpandTiles, OpShape, PairTiles, ShrinkTiles
from lorikeet_kernels.tiling.tile_table import load

ALWAYS_UNGROUPED_PAIRS = 256
MAX_UNGROUPED_PAIRS = 1536
MAX_REUSE = 2.0
# measured on an H200: above a few hundred programs the early read of the slot column costs more than it hides
MAX_SCAN_PAIRS = 64
MIN_GROUPED_TOKENS = 64  # dense sites: below, every token reads its adapter's weights by itself


def is_ungrouped(num_pairs: int, num_experts: int, num_slots: int) -> bool:
    """Whether pairs go to the one-launch kernel, each reading its own weights, rather than being grouped.

    L2 absorbs pairs that share weights up to about two readers each. Measured on an H200: gpt-oss-120b's
    1,024 pairs over 1,024 groups take 122 us ungrouped and 163 grouped, DeepSeek-V3's 2,048 over 2,048 take
    338 and 302.
    """
    if num_pairs <= ALWAYS_UNGROUPED_PAIRS:
        return True
    groups = num_experts * num_slots
    distinct = groups * -math.expm1(-num_pairs / groups)
    return num_pairs <= MAX_UNGROUPED_PAIRS and num_pairs / distinct <= MAX_REUSE


def _power_of_two(value: float, low: int, high: int) -> int:
    return min(high, max(low, 1 << max(0, round(math.log2(max(1.0, value))))))


@cache
def select_pair(shape: OpShape, device: str) -> PairTiles:
    """Tiles of the one-launch kernel."""
    entry = load(device).nearest("pair", shape)
    scan = shape.num_pairs <= MAX_SCAN_PAIRS
    if entry is not None:
        return PairTiles(slot_scan=scan, **entry.tiles)
    full = max(16, 1 << (shape.max_rank - 1).bit_length())
    rows = 32 if full >= 32 else 16
    block_k = _power_of_two(shape.in_features / 28, 256, 512)
    many = shape.num_pairs * shape.out_features * full > 1 << 24
    block_n = max(32, (4096 if many else 8192) // full)
    return PairTiles(rows, block_k, min(block_n, 512), 2 if many and block_k == 256 else 4, scan)


@cache
def select_block_m(num_pairs: int, num_experts: int, num_slots: int) -> int:
    """Rows of a grouped block: 16 until groups hold several blocks, since a block never spans two groups."""
    per_group = num_pairs / (num_experts * num_slots)
    if per_group < 40:
        return 16
    return 32 if per_group < 512 else 64


@cache
def select_shrink(shape: OpShape, block_m: int, device: str) -> ShrinkTiles:
    """Tiles of a grouped shrink over blocks of `block_m`."""
    entry = load(device).nearest("shrink", shape, block_m)
    if entry is not None:
        return ShrinkTiles(**entry.tiles)
    splits = 1 if shape.in_features <= 4096 or shape.num_pairs >= 16384 else 2
    return ShrinkTiles(64 if block_m >= 64 else 128, splits, 4, 5 if block_m >= 64 else 3)


@cache
def select_expand(shape: OpShape, block_m: int, device: str) -> ExpandTiles:
    """Tiles of a grouped expand over blocks of `block_m`."""
    entry = load(device).nearest("expand", shape, block_m)
    if entry is not None:
        return ExpandTiles(**entry.tiles)
    programs = shape.num_pairs / block_m * shape.out_features / 128
    return ExpandTiles(128, _power_of_two(programs / 4000, 1, 8), 4, 1)
