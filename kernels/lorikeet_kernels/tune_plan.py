"""What tune measures and in which order: pure values, tested without a GPU."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from lorikeet_kernels.tiling import ExpandTiles, OpShape, PairTiles, ShrinkTiles
from lorikeet_kernels.tiling.tile_table import TileEntry, TileTable

MAX_ELEMENTS = 128  # of a tile a thread: more spill
MIN_ELEMENTS = 32


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


def shrink_candidates(shape: OpShape, block_m: int) -> Iterator[ShrinkTiles]:
    """Tiles of a grouped shrink worth timing at `shape`."""
    for block_k in (64, 128, 256):
        for splits in (1, 2, 4):
            for stages in (3, 5):
                fits = block_k * (block_m + 64) * 2 * stages < 200_000
                if fits and splits * block_k <= shape.in_features:
                    yield ShrinkTiles(block_k, splits, 4, stages)


def expand_candidates(shape: OpShape, block_m: int) -> Iterator[ExpandTiles]:
    """Tiles of a grouped expand worth timing at `shape`."""
    for block_n in (128, 256):
        if block_m * block_n > 8192:
            continue
        for span in (1, 2, 3, 4, 8):
            for stages in (1, 2):
                if span * block_n < 2 * shape.out_features and (span > 1 or stages == 1):
                    yield ExpandTiles(block_n, span, 4, stages)


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
