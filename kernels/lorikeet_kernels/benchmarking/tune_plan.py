"""What tune measures and in which order: pure values, tested without a GPU."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from lorikeet_kernels.tiling import ExpandTiles, OpShape, PairTiles, RegisterTiles, ShrinkTiles
from lorikeet_kernels.tiling.tile_table import TileEntry, TileTable

MAX_ELEMENTS = 128  # of a tile a thread: more spill
MIN_ELEMENTS = 32
MAX_SHARED_BYTES = 200_000
MAX_SHRINK_ROWS = 64
MAX_SPLITS = {16: 4, 32: 2, 64: 2}  # by rows a program: long columns of wide programs have enough of them


@dataclass(frozen=True, slots=True)
class TunePoint:
    """A batch to tune for: tokens of one rank; `weight` is its share of the traffic."""

    num_tokens: int
    rank: int
    weight: float


def points_of(tokens: Sequence[int], ranks: Sequence[int]) -> list[TunePoint]:
    """Every rank at every number of tokens, alike in weight."""
    count = len(tokens) * len(ranks)
    return [TunePoint(t, r, 1.0 / count) for r in ranks for t in tokens]


def points_of_trace(text: str) -> list[TunePoint]:
    """Points of recorded traffic, heaviest first.

    The trace is JSON with two histograms, {"tokens": {"16": 1200, …}, "ranks": {"8": 3, …}}: steps by their
    number of tokens, adapters by their rank. Raises ValueError where one is missing or empty.
    """
    raw = json.loads(text)
    for name in ("tokens", "ranks"):
        if not isinstance(raw.get(name), dict) or not raw[name]:
            raise ValueError(f"trace has no histogram {name!r}: pass an object of value to count")
    tokens = {int(k): float(v) for k, v in raw["tokens"].items()}
    ranks = {int(k): float(v) for k, v in raw["ranks"].items()}
    total = sum(tokens.values()) * sum(ranks.values())
    points = [TunePoint(t, r, a * b / total) for t, a in tokens.items() for r, b in ranks.items()]
    return sorted(points, key=lambda point: -point.weight)


def pair_candidates(shape: OpShape) -> Iterator[PairTiles]:
    """Tiles of the decode kernel worth timing at `shape`."""
    full = max(16, 1 << (shape.max_rank - 1).bit_length())
    for rows in (16, 32, 64):
        if rows > 2 * shape.max_rank:
            continue
        for block_k in (256, 512, 1024):
            if block_k >= 2 * shape.in_features or shape.in_features > 32 * block_k:
                continue
            for block_n in (32, 64, 128, 256, 512, 1024):
                for warps in (1, 2, 4):
                    shrink, expand = rows * block_k // (32 * warps), block_n * full // (32 * warps)
                    if min(shrink, expand) >= MIN_ELEMENTS and max(shrink, expand) <= MAX_ELEMENTS:
                        yield PairTiles(rows, block_k, block_n, warps, shape.num_pairs <= 64)


def segment_candidates(shape: OpShape) -> Iterator[PairTiles | RegisterTiles]:
    """Tiles of both kernels over blocks of tokens worth timing at `shape`."""
    rows = 16 if shape.max_rank <= 16 else 32
    for block_k in (256, 512, 1024):
        if block_k < 2 * shape.in_features and shape.in_features <= 32 * block_k:
            for block_n, warps in ((64, 2), (128, 2), (128, 4), (256, 4)):
                yield PairTiles(rows, block_k, block_n, warps)
            for warps in (2, 4, 8):
                for block_n in (128, 256, 512):
                    elements = block_n * rows // (32 * warps), rows * block_k // (32 * warps)
                    if block_k >= 64 * warps and max(elements) <= MAX_ELEMENTS:
                        yield RegisterTiles(block_k, block_n, warps)
                        if warps == 8:  # which doubles the programs that are resident
                            yield RegisterTiles(block_k, block_n, warps, 64)


def shrink_candidates(shape: OpShape, block_m: int) -> Iterator[ShrinkTiles]:
    """Tiles of a grouped shrink worth timing at `shape`."""
    for joined in (1, 2, 4):
        if joined * block_m > MAX_SHRINK_ROWS:
            continue
        for block_k, stages in ((64, 5), (128, 3), (256, 3)):
            for splits in (1, 2, 4):
                fits = block_k * (joined * block_m + 64) * 2 * stages < MAX_SHARED_BYTES
                if fits and splits * block_k <= shape.in_features and splits <= MAX_SPLITS[joined * block_m]:
                    yield ShrinkTiles(block_k, splits, 4, stages, joined)


def expand_candidates(shape: OpShape, block_m: int) -> Iterator[ExpandTiles]:
    """Tiles of a grouped expand worth timing at `shape`."""
    for block_n in (128, 256):
        if block_m * block_n > 8192:
            continue
        for span in (1, 2, 4, 8):
            for stages in (1,) if span == 1 else (2, 3, 4):
                fits = 2 * stages * block_n * (block_m + max(16, shape.max_rank)) < MAX_SHARED_BYTES
                if fits and span * block_n < 2 * shape.out_features and stages <= span:
                    yield ExpandTiles(block_n, span, 4, stages)


def candidates(
    stage: str, shape: OpShape, block_m: int
) -> Iterator[PairTiles | RegisterTiles | ShrinkTiles | ExpandTiles]:
    """What tune times for a stage of the table."""
    if stage == "pair":
        yield from pair_candidates(shape)
    elif stage == "segment":
        yield from segment_candidates(shape)
    elif stage == "shrink":
        yield from shrink_candidates(shape, block_m)
    else:
        yield from expand_candidates(shape, block_m)


def is_done(table: TileTable, stage: str, shape: OpShape, block_m: int) -> bool:
    """Whether an earlier run, interrupted or not, measured this stage at exactly this shape."""
    return any(e.stage == stage and e.shape == shape and e.block_m == block_m for e in table.entries)


def to_json(table: TileTable) -> str:
    """The table as `tile_table.parse` reads it, one entry a line."""
    entries = ",\n".join("    " + json.dumps(_plain(entry)) for entry in table.entries)
    head = f'{{\n  "device": {json.dumps(table.device)},\n  "measured": {json.dumps(table.measured)},\n'
    return f'{head}  "entries": [\n{entries}\n  ]\n}}\n'


def _plain(entry: TileEntry) -> dict[str, object]:
    return {**asdict(entry), "tiles": dict(entry.tiles)}
