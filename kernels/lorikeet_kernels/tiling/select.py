"""The choice of path and tiles: pure functions of shape and device, the measured table first, else a rule."""

import math
from functools import cache

from lorikeet_kernels.tiling.measured import MEASURED
from lorikeet_kernels.tiling.tile_config import (
    ExpandTiles,
    OpShape,
    PairTiles,
    RegisterTiles,
    ShrinkTiles,
)
from lorikeet_kernels.tiling.tile_table import load

ALWAYS_UNGROUPED_PAIRS = 256
MAX_UNGROUPED_PAIRS = 1536
MAX_REUSE = 2.0
MIN_ROWS_OF_WIDE_BLOCKS = 12
# measured on an H200: above a few hundred programs the early read of the slot column costs more than it hides
MAX_SCAN_PAIRS = 64
# dense sites, measured likewise: below, every token reads its adapter's weights by itself
MIN_SHARED_TOKENS = 17
MIN_SHARING = 3.0
MAX_ALONE_TOKENS = 256
MAX_SEGMENT_TOKENS = 512
MAX_SEGMENT_RANK = 32
MAX_SEGMENT_BLOCKS = 128
MAX_REGISTER_TOKENS = 64  # beyond, blocks tend to have 32 rows, where the other kernel is faster
MIN_JOINED_PAIRS = 8192
MIN_JOINED_TOKENS = 1024
MIN_SHRINK_BLOCKS = 160  # below, a program a block leaves multiprocessors idle
MAX_STAGED_BYTES = 160_000  # of shared memory, by the tiles that an expand loads ahead


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


def is_alone(num_tokens: int, num_slots: int) -> bool:
    """Whether a dense site's tokens each read their adapter's weights by themselves, without blocks."""
    few = num_tokens < MIN_SHARED_TOKENS or num_tokens < MIN_SHARING * num_slots
    return few and num_tokens <= MAX_ALONE_TOKENS


def is_segmented(num_tokens: int, num_blocks: int, max_rank: int) -> bool:
    """Whether a dense site whose tokens are in blocks takes one launch, or else a shrink and an expand."""
    few = num_tokens <= MAX_SEGMENT_TOKENS and num_blocks <= MAX_SEGMENT_BLOCKS
    return few and max_rank <= MAX_SEGMENT_RANK


def _power_of_two(value: float, low: int, high: int) -> int:
    return min(high, max(low, 1 << max(0, round(math.log2(max(1.0, value))))))


@MEASURED.decide
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


@MEASURED.decide
@cache
def select_segment(shape: OpShape, device: str) -> PairTiles | RegisterTiles:
    """Tiles of a one-launch kernel over blocks of tokens, whose type says which of the two."""
    entry = load(device).nearest("segment", shape)
    if entry is not None:
        return PairTiles(**entry.tiles) if "rows" in entry.tiles else RegisterTiles(**entry.tiles)
    if shape.num_pairs <= MAX_REGISTER_TOKENS:
        return RegisterTiles(512, 256, 4)
    return _segment_rule(shape)


@MEASURED.decide
@cache
def select_wide_segment(shape: OpShape, device: str) -> PairTiles:
    """The same for dtypes wider than 16 bits: one of the two kernels can."""
    tiles = select_segment(shape, device)
    return tiles if isinstance(tiles, PairTiles) else _segment_rule(shape)


def _segment_rule(shape: OpShape) -> PairTiles:
    rows = 16 if shape.max_rank <= 16 else 32
    if shape.num_pairs > MAX_REGISTER_TOKENS:
        return PairTiles(rows, 512, 256, 4)
    return PairTiles(rows, _power_of_two(shape.in_features / 8, 256, 512), 128, 2)


@cache
def select_block_m(num_pairs: int, num_experts: int, num_slots: int) -> int:
    """Rows of a grouped block: 16 until most groups fill that, since a block never spans two groups."""
    return 16 if num_pairs / (num_experts * num_slots) < MIN_ROWS_OF_WIDE_BLOCKS else 32


@MEASURED.decide
@cache
def select_shrink(shape: OpShape, block_m: int, device: str) -> ShrinkTiles:
    """Tiles of a grouped shrink over blocks of `block_m`."""
    entry = load(device).nearest("shrink", shape, block_m)
    if entry is not None:
        return ShrinkTiles(**entry.tiles)
    # an adapter has more rows where no experts share them out
    enough = MIN_JOINED_TOKENS if shape.op == "linear" else MIN_JOINED_PAIRS
    joined = 2 if block_m >= 32 and shape.num_pairs >= enough else 1
    blocks = shape.num_pairs / (block_m * joined)
    splits = 1
    if blocks < MIN_SHRINK_BLOCKS and shape.in_features > 2048:
        splits = 4 if block_m == 16 and shape.in_features > 4096 else 2
    if joined == 2 and shape.in_features < 4096:
        return ShrinkTiles(64, splits, 4, 5, joined)
    if joined == 2:
        return ShrinkTiles(128, splits, 4, 3, joined)
    return ShrinkTiles(256 if shape.in_features >= 8192 else 128, splits, 4, 3)


@MEASURED.decide
@cache
def select_expand(shape: OpShape, block_m: int, device: str) -> ExpandTiles:
    """Tiles of a grouped expand over blocks of `block_m`."""
    entry = load(device).nearest("expand", shape, block_m)
    if entry is not None:
        return ExpandTiles(**entry.tiles)
    span = min(8 if shape.out_features >= 5760 else 4, max(1, shape.out_features // 256))
    step_bytes = 2 * 128 * (block_m + max(16, shape.max_rank))
    stages = min(3, span, max(1, MAX_STAGED_BYTES // step_bytes))
    return ExpandTiles(128, span, 4, stages)


def select_tiles(
    stage: str, shape: OpShape, block_m: int, device: str
) -> PairTiles | RegisterTiles | ShrinkTiles | ExpandTiles:
    """The choice for a stage of the table: "pair", "segment", "shrink" or "expand"."""
    if stage == "pair":
        return select_pair(shape, device)
    if stage == "segment":
        return select_segment(shape, device)
    if stage == "shrink":
        return select_shrink(shape, block_m, device)
    return select_expand(shape, block_m, device)
