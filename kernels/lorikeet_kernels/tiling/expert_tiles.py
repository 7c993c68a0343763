"""Tiles of the expert GEMMs, a pair for each layer: a measured table per device, else a rule.

The two GEMMs of a layer share one cut of the pairs into blocks, so their `block_rows` are equal.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from lorikeet_kernels.tiling.measured import MEASURED
from lorikeet_kernels.tiling.tile_table import FOLDER, NEAREST, read_table

FEW_PROGRAMS = 2 * 132
"""Fewer programs than twice an H200's multiprocessors leave some of them idle."""

SPECIALIZED_DEVICES = frozenset({"NVIDIA H200"})
"""Devices where kernel "specialized" was measured to be faster; it needs Hopper's warpgroup MMAs."""
MIN_SPECIALIZED_ROWS = 32
MIN_WIDE_ROWS = 96

Weights = Literal["bf16", "fp32", "mxfp4", "fp8_block", "fp8_interleaved", "fp8_channel"]
"""How experts are stored; "bf16" is any 16-bit type. "fp8_interleaved" has scales of blocks too, but gate's
and up's rows in turn: neighbouring rows do not share a block."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tiles of one expert GEMM.

    A program takes `block_rows` pairs and `block_n` of the matrix's rows; `step` chunks (mxfp4, 64 columns
    each) or columns (bf16, fp8) at once, `stages` of them in flight. `splits` > 1 splits the columns, whose
    parts the top-k sum adds up. `ahead` columns (bf16, a multiple of 8) are fetched to L2 while the launch
    before still runs. `kernel` "decode" is for few pairs (mxfp4: in the MMA's columns of 8), "prefill" for
    many; "specialized" is fp8's for many and whole blocks: a warpgroup loads, each other one multiplies 64 of
    the pairs.
    """

    kernel: Literal["decode", "prefill", "specialized"]
    block_rows: int
    block_n: int
    step: int
    stages: int
    num_warps: int
    splits: int = 1
    ahead: int = 0
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class RangedTiles:
    """Tiles of down and the top-k sum in one launch: see `fp8_ranged_down`.

    A range is `columns` of the result, of which the rows of `buffers` ranges are kept: a range is summed
    `lag` ranges after it was multiplied. A slot, of `stages`, holds 128 x 128 weights.
    """

    columns: int
    stages: int
    lag: int
    buffers: int


@dataclass(frozen=True, slots=True)
class MoeTiles:
    """Tiles of a layer's two GEMMs, and of down and the sum as one launch where no adapter comes between.

    `ranged` takes the GEMMs' cut, and gives the bits of `down` and a sum.
    """

    gate_up: ExpertTiles
    down: ExpertTiles
    ranged: RangedTiles | None = None

    def __post_init__(self) -> None:
        if self.gate_up.block_rows != self.down.block_rows or self.gate_up.splits != 1:
            raise ValueError(f"{self}: one cut serves both GEMMs, and an activation needs whole sums")


@dataclass(frozen=True, slots=True)
class MoeShape:
    """What the tiles depend on; `inner` is I, half of gate_up's rows.

    `down` says how down is stored where that is another way than gate_up's, which is `weights`.
    """

    weights: Weights
    hidden: int
    inner: int
    num_experts: int
    num_pairs: int
    down: Weights | None = None


@MEASURED.decide
@cache
def load_expert_table(device: str) -> Mapping[MoeShape, MoeTiles]:
    """The shipped table of `device` ("NVIDIA H200" lies in nvidia_h200_experts.json), or an empty one."""
    path = FOLDER / f"{device.lower().replace(' ', '_').replace('/', '_')}_experts.json"
    return read_table(path, device, parse_expert_table) if MEASURED.are_used and path.exists() else {}


def parse_expert_table(text: str) -> Mapping[MoeShape, MoeTiles]:
    """A table from its JSON text; raises KeyError, TypeError or ValueError on anything else."""
    entries: list[dict[str, Any]] = json.loads(text)["entries"]
    return {MoeShape(**e["shape"]): _parse_tiles(e) for e in entries}


def _parse_tiles(entry: Mapping[str, Any]) -> MoeTiles:
    ranged = RangedTiles(**entry["ranged"]) if "ranged" in entry else None
    return MoeTiles(ExpertTiles(**entry["gate_up"]), ExpertTiles(**entry["down"]), ranged)


@MEASURED.decide
@cache
def select_experts(shape: MoeShape, device: str, *, batch_invariant: bool = False) -> MoeTiles:
    """The tiles of a layer. With `batch_invariant` they do not depend on the number of pairs."""
    if batch_invariant:
        return _rule(shape, 8, device)
    best: MoeTiles | None = None
    best_distance = NEAREST
    for at, tiles in load_expert_table(device).items():
        if (at.weights, at.down, at.hidden, at.inner) != (
            shape.weights,
            shape.down,
            shape.hidden,
            shape.inner,
        ):
            continue
        # how full blocks get is what matters, so tables serve other numbers of experts too
        ratio = (at.num_pairs / at.num_experts) / (max(1, shape.num_pairs) / shape.num_experts)
        distance = abs(math.log2(ratio))
        if distance <= best_distance:
            best, best_distance = tiles, distance
    if best is not None:
        return best
    return _rule(shape, shape.num_pairs / shape.num_experts, device)


def _rule(shape: MoeShape, rows_per_expert: float, device: str) -> MoeTiles:
    if shape.down is not None:
        return _mixed_rule(shape, shape.down, rows_per_expert)
    is_measured = MEASURED.name(device) in SPECIALIZED_DEVICES
    if is_measured and rows_per_expert >= MIN_SPECIALIZED_ROWS and _is_whole(shape):
        return _specialized_rule(rows_per_expert)
    return _storage_rule(shape, rows_per_expert)


def _mixed_rule(shape: MoeShape, down: Weights, rows_per_expert: float) -> MoeTiles:
    """Each GEMM's own storage's, with the smaller blocks of the two: those that the other takes too."""
    first = _storage_rule(shape, rows_per_expert).gate_up
    second = _storage_rule(replace(shape, weights=down), rows_per_expert).down
    rows = min(first.block_rows, second.block_rows)
    return MoeTiles(replace(first, block_rows=rows), replace(second, block_rows=rows))


def _storage_rule(shape: MoeShape, rows_per_expert: float) -> MoeTiles:
    if shape.weights == "bf16":
        return _bf16_rule(rows_per_expert)
    if shape.weights in ("fp8_block", "fp8_interleaved", "fp8_channel"):
        return _fp8_rule(shape, rows_per_expert)
    if shape.weights == "fp32":
        tiles = ExpertTiles("decode", 16, 64, 32, 3, 4)
        return MoeTiles(tiles, tiles)
    if rows_per_expert <= 6:
        tiles = ExpertTiles("decode", 8, 64, 3, 4, 4)
    elif rows_per_expert <= 16:
        tiles = ExpertTiles("decode", 16, 128, 3, 3, 4)
    elif rows_per_expert <= 48:
        tiles = ExpertTiles("prefill", 32, 128, 3, 2, 8)
    elif rows_per_expert <= 128:
        tiles = ExpertTiles("prefill", 64, 128, 3, 2, 8)
    else:
        tiles = ExpertTiles("prefill", 128, 128, 3, 2, 8, max_registers=128)
    return MoeTiles(tiles, tiles)


def _bf16_rule(rows_per_expert: float) -> MoeTiles:
    if rows_per_expert <= 12:
        tiles = ExpertTiles("decode", 16, 64, 128, 4, 4)
    elif rows_per_expert <= 24:
        tiles = ExpertTiles("decode", 32, 128, 64, 4, 4)
    elif rows_per_expert <= 96:
        tiles = ExpertTiles("prefill", 64, 128, 64, 4, 4)
    else:
        tiles = ExpertTiles("prefill", 128, 256, 64, 3, 8)
    return MoeTiles(tiles, tiles)


def _fp8_rule(shape: MoeShape, rows_per_expert: float) -> MoeTiles:
    """A step is what shares a scale.

    Measured on an H200: up to 12 rows an expert, 128 of the matrix's rows and three stages are 1 to 6 %
    faster than 64 and four, where that leaves enough programs; beyond, 64 pairs a program are 2 to 13 %
    faster than 128, which halve the programs a multiprocessor holds.
    """
    if rows_per_expert <= 12:
        touched = min(shape.num_experts, rows_per_expert * shape.num_experts)
        is_wide = touched * min(2 * shape.inner, shape.hidden) >= 128 * FEW_PROGRAMS
        tiles = ExpertTiles("decode", 16, *((128, 128, 3) if is_wide else (64, 128, 4)), 4)
    elif rows_per_expert <= 24:
        tiles = ExpertTiles("prefill", 32, 128, 128, 3, 4)
    else:
        tiles = ExpertTiles("prefill", 64, 128, 128, 4, 4)
    return MoeTiles(_short(tiles, shape.hidden), _short(tiles, shape.inner))


def _is_whole(shape: MoeShape) -> bool:
    """Whether blocks of scales are whole ones of 128 x 128, gate's above up's."""
    return shape.weights == "fp8_block" and shape.hidden % 128 == 0 and shape.inner % 128 == 0


def _specialized_rule(rows_per_expert: float) -> MoeTiles:
    """Blocks that most experts fill one of: their weights are read once.

    Measured on an H200, both GEMMs: with 32 and 64 pairs an expert 128 a block take 13 % less than the other
    kernel and 8 to 12 % less than 192; with 128 and 256 pairs 192 take 23 to 32 % less than the other kernel
    and 5 to 12 % less than 128. Stages are as many as shared memory holds: down's have its scales too. Down
    and the sum in one launch, where a matrix's columns are few enough, take 2 to 7 % off a layer of
    DeepSeek-V3 TP8; other shapes that take it were not timed.
    """
    if rows_per_expert < MIN_WIDE_ROWS:
        tiles = ExpertTiles("specialized", 128, 128, 128, 6, 12)
        return MoeTiles(tiles, tiles)
    tiles = ExpertTiles("specialized", 192, 128, 128, 5, 16)
    return MoeTiles(tiles, replace(tiles, stages=4), RangedTiles(128, 6, 2, 4))


def _short(tiles: ExpertTiles, columns: int) -> ExpertTiles:
    """No more stages than there are steps, and two: further ones would hold memory that stays empty."""
    return replace(tiles, stages=min(tiles.stages, max(2, -(-columns // tiles.step))))
