"""The delta's programs of a launch that also makes the projection it belongs to; see `few_rows_lora`.

    delta[t, columns of site j] = B_j @ (A_j @ x[t]),  NO_DELTA where there is no adapter
    delta[p] = topk_weights[p] B[expert] @ (A[expert] @ x[p]),   p a (token, expert) pair: `fp8_gemm_lora`

These are `pair_lora`'s programs, with its tiles but for the warps, which are the projection's: where these
`add_alike`, the delta has the same bits. The launch's first ones shrink, the next expand; none of them waits
for one that started later.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.output_lanes import site_lanes
from lorikeet_kernels.lora.pair_lora import expand_tile, plan_pairs, shrink_part
from lorikeet_kernels.tiling import PairTiles

MAX_JOINED_RANK = 32
"""Beyond, an expanding program may have fewer warps than the projection's."""
ALIGNED_BYTES = 16
"""Of rows: Triton compiles another kernel for those that lie between."""
LANE_VALUES = 8
"""Numbers of 16 bits that a lane loads at once, and adds up before it meets other lanes."""


def add_alike(tiles: PairTiles, max_rank: int, num_warps: int) -> bool:
    """Whether so many warps add up `tiles` in the order of `tiles.num_warps`: none shares a row."""
    rows = min(tiles.rows, 1 << (max_rank - 1).bit_length())
    loaded = rows * min(tiles.block_k, 32 * LANE_VALUES), tiles.block_n * max(16, max_rank)
    return max(num_warps, tiles.num_warps) * 32 * LANE_VALUES <= min(loaded)


@triton.jit
def delta_program(
    program, delta_ptr, x_ptr, arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr,
    partial_ptr, seen_ptr, site0, site1, site2, num_sites, num_slots,
    PARTS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, NUM_LANES: tl.constexpr,
    TILES: tl.constexpr, NUM_LAUNCH_SITES: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, RANK_P2: tl.constexpr,
    SLOT_SCAN: tl.constexpr, SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
    topk_ids_ptr=None, topk_weights_ptr=None, TOP_K: tl.constexpr = 1, HAS_EXPERTS: tl.constexpr = False,
):  # fmt: skip
    """What program number `program` does; the first PARTS shrink.

    Experts' ids are read ahead of the launch before, as its weights are.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if program < PARTS:
        shrink_part(
            x_ptr, arena_ptr, a_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr, topk_ids_ptr, partial_ptr,
            program, site0, site1, site2, num_sites, num_slots,
            K=K, TOP_K=TOP_K, X_DIV=1, HAS_EXPERTS=HAS_EXPERTS, NUM_LAUNCH_SITES=NUM_LAUNCH_SITES, ROWS=ROWS,
            CHUNKS=CHUNKS, SPLITS=SPLITS, BLOCK_K=BLOCK_K, SLOT_SCAN=SLOT_SCAN, PDL=PDL,
        )  # fmt: skip
    else:
        expand_tile(
            delta_ptr, arena_ptr, b_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr, topk_ids_ptr,
            topk_weights_ptr, partial_ptr, seen_ptr, program - PARTS, site0, site1, site2, num_sites,
            num_slots, N=N, TOP_K=TOP_K, HAS_EXPERTS=HAS_EXPERTS, HAS_WEIGHT=HAS_EXPERTS, INTERLEAVED=False,
            ACCUMULATE=False, LANES=LANES, NUM_LANES=NUM_LANES, TILES=TILES,
            NUM_LAUNCH_SITES=NUM_LAUNCH_SITES, ROWS=ROWS, CHUNKS=CHUNKS, SPLITS=SPLITS, BLOCK_N=BLOCK_N,
            RANK_P2=RANK_P2, SLOT_SCAN=SLOT_SCAN, SPIN_LIMIT=SPIN_LIMIT, PDL=PDL,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class JoinedSites:
    """The adapters of a batch at a projection's sites, as `lora_linear` takes them, and its tiles.

    At experts a row is a pair, and `top_k` is how many a token has.
    """

    segments: LoraSegments
    tables: LoraTables
    sites: tuple[int, ...]
    out_features: tuple[int, ...]
    num_slices: tuple[int, ...]
    tiles: PairTiles
    top_k: int = 1


def delta_arguments(
    x: torch.Tensor,
    delta: torch.Tensor,
    adapters: JoinedSites,
    num_warps: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[int, dict[str, Any]]:
    """How many programs come first in a launch of so many warps each, and `delta_program`'s arguments.

    Raises:
        ValueError: x, delta, adapters do not fit together or are not what the programs read.
    """
    segments, tables, sites = adapters.segments, adapters.tables, adapters.sites
    (num_rows, in_features), columns = x.shape, sum(adapters.out_features)
    if tables.max_rank > MAX_JOINED_RANK or not x.is_contiguous() or x.dtype != tables.arena.dtype:
        raise ValueError(f"joined delta: rank {tables.max_rank}, x {x.dtype}, strides {x.stride()}")
    if delta.shape != (num_rows, columns) or delta.dtype != dtype or not delta.is_contiguous():
        raise ValueError(f"joined delta: {delta.dtype} {tuple(delta.shape)} for {num_rows} x {columns}")
    if (x.data_ptr() | delta.data_ptr()) % ALIGNED_BYTES:
        raise ValueError(f"joined delta: x and delta must be {ALIGNED_BYTES} bytes aligned")
    if segments.token_slot.shape[0] * adapters.top_k != num_rows:
        raise ValueError(f"joined delta: segments are of another batch than x {tuple(x.shape)}")
    if len(sites) != len(adapters.out_features):
        raise ValueError(f"joined delta: sites {sites} of {adapters.out_features} columns")
    site0, site1, site2 = tables.padded_sites(sites)
    plan = plan_pairs(
        num_rows, in_features, columns, tables, sites,
        site_lanes(adapters.out_features, adapters.num_slices), replace(adapters.tiles, num_warps=num_warps),
        segments.workspace,
    )  # fmt: skip
    num_slots, num_sites = tables.rank.shape
    return num_rows * plan.programs_a_pair, {
        "delta_ptr": delta,
        "rows_ptr": x,
        "arena_ptr": tables.arena,
        "a_offset_ptr": tables.a_offset,
        "b_offset_ptr": tables.b_offset,
        "rank_ptr": tables.rank,
        "num_a_ptr": tables.num_a,
        "token_slot_ptr": segments.token_slot,
        "partial_ptr": plan.partial,
        "seen_ptr": plan.seen,
        "site0": site0,
        "site1": site1,
        "site2": site2,
        "num_sites": num_sites,
        "num_slots": num_slots,
        "PARTS": num_rows * (plan.programs_a_pair - plan.constants["TILES"]),
        "OF_DELTA": num_rows * plan.programs_a_pair,
        **plan.constants,
    }
