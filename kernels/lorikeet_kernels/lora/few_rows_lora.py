"""A dense projection of few rows and its adapters' delta in one launch.

    y = x W^T + bias,    delta[t, columns of site j] = B_j @ (A_j @ x[t]),  NO_DELTA where there is no adapter

Shapes: x [T, in], y [T, out] of 16 bits, delta [T, out] float32, which whoever reads y adds. y has the bits
of `few_rows_linear` and delta those of `pair_lora`: these are their programs. The launch's first ones shrink,
the next expand, the others project; none of LoRA's programs waits for one that started later.

A fork to a second stream and a join cost about 2 us on an H200, and behind a join a launch cannot start ahead
of the end of the one before. Here there is neither: A, B and W are all on their way before x is there.
Floor: the bytes of W, A and B at 4.3 TB/s. Predicted: 0.5 to 1 us more than the projection by itself.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from dataclasses import replace

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.few_rows_linear import few_rows_constants, few_rows_program, takes
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.output_lanes import site_lanes
from lorikeet_kernels.lora.pair_lora import MAX_SITES, expand_tile, plan_pairs, shrink_part
from lorikeet_kernels.tiling import OpShape, PairTiles, select_pair
from lorikeet_kernels.tiling.few_rows_tiles import MAX_LANE_ROWS, FewRowsTiles, select_few_rows

MAX_JOINED_RANK = 32
"""Beyond, an expanding program may have fewer warps than the projection's."""


@triton.jit(
    do_not_specialize=["site0", "site1", "site2", "num_sites", "num_slots"],
    do_not_specialize_on_alignment=["out_ptr", "bias_ptr"],
)
def _few_rows_lora_kernel(
    out_ptr, delta_ptr, words_ptr, x_ptr, weight_ptr, bias_ptr, arena_ptr, a_offset_ptr, b_offset_ptr,
    rank_ptr, num_a_ptr, token_slot_ptr, partial_ptr, seen_ptr,
    site0, site1, site2, num_sites, num_slots,
    T: tl.constexpr, T_P2: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    FEW_ROWS: tl.constexpr, CHUNK: tl.constexpr, FEW_CHUNKS: tl.constexpr, VECTOR: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, NUM_LANES: tl.constexpr, TILES: tl.constexpr,
    NUM_LAUNCH_SITES: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, RANK_P2: tl.constexpr, SLOT_SCAN: tl.constexpr,
    SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    PARTS: tl.constexpr = T * NUM_LAUNCH_SITES * CHUNKS * SPLITS
    OF_LORA: tl.constexpr = PARTS + T * TILES
    if program < PARTS:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        shrink_part(
            x_ptr, arena_ptr, a_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr, token_slot_ptr, partial_ptr,
            program, site0, site1, site2, num_sites, num_slots,
            K=K, TOP_K=1, X_DIV=1, HAS_EXPERTS=False, NUM_LAUNCH_SITES=NUM_LAUNCH_SITES, ROWS=ROWS,
            CHUNKS=CHUNKS, SPLITS=SPLITS, BLOCK_K=BLOCK_K, SLOT_SCAN=SLOT_SCAN, PDL=PDL,
        )  # fmt: skip
    elif program < OF_LORA:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        expand_tile(
            delta_ptr, arena_ptr, b_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr, token_slot_ptr,
            delta_ptr, partial_ptr, seen_ptr, program - PARTS, site0, site1, site2, num_sites, num_slots,
            N=N, TOP_K=1, HAS_EXPERTS=False, HAS_WEIGHT=False, INTERLEAVED=False, ACCUMULATE=False,
            LANES=LANES, NUM_LANES=NUM_LANES, TILES=TILES, NUM_LAUNCH_SITES=NUM_LAUNCH_SITES, ROWS=ROWS,
            CHUNKS=CHUNKS, SPLITS=SPLITS, BLOCK_N=BLOCK_N, RANK_P2=RANK_P2, SLOT_SCAN=SLOT_SCAN,
            SPIN_LIMIT=SPIN_LIMIT, PDL=PDL,
        )  # fmt: skip
    else:
        few_rows_program(
            program - OF_LORA, out_ptr, words_ptr, weight_ptr, bias_ptr, T, T_P2, IN, OUT, HAS_BIAS, FEW_ROWS,
            CHUNK, FEW_CHUNKS, VECTOR, PDL,
        )  # fmt: skip


def few_rows_lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    delta: torch.Tensor,
    few: FewRowsTiles,
    segments: LoraSegments,
    tables: LoraTables,
    sites: tuple[int, ...],
    out_features: tuple[int, ...],
    num_slices: tuple[int, ...],
    tiles: PairTiles,
) -> None:
    """Launch: `out` becomes the projection and `delta` what adapters add; see this module's docstring.

    Weights, tables and `segments` are read while the launch before still runs.
    """
    num_rows, (columns, in_features) = x.shape[0], weight.shape
    if not 1 <= num_rows <= MAX_LANE_ROWS or few.products or tables.max_rank > MAX_JOINED_RANK:
        raise ValueError(f"few_rows_lora: {num_rows} rows, rank {tables.max_rank}, {few}")
    if not takes(x, weight) or out.shape != delta.shape or out.shape != (num_rows, columns):
        raise ValueError(f"few_rows_lora: x {tuple(x.shape)}, out {tuple(out.shape)}, {tuple(weight.shape)}")
    if out.dtype != x.dtype or tables.arena.dtype != x.dtype or delta.dtype != torch.float32:
        raise ValueError(f"few_rows_lora: {x.dtype}, {out.dtype}, {delta.dtype}, {tables.arena.dtype}")
    if sum(out_features) != columns or segments.token_slot.shape[0] != num_rows:
        raise ValueError(f"few_rows_lora: sites of {out_features} columns for {columns}, or another batch's")
    plan = plan_pairs(
        in_features,
        columns,
        tables,
        sites,
        site_lanes(out_features, num_slices),
        replace(tiles, num_warps=few.num_warps),
        segments.workspace,
    )
    base = few_rows_constants(num_rows, weight, few)
    num_slots, num_sites = tables.rank.shape
    pdl = x.device.type == "cuda"
    programs = num_rows * plan.programs_a_pair + triton.cdiv(columns, few.rows)
    _few_rows_lora_kernel[(programs,)](
        out, delta, x.view(torch.int32), x, weight.view(torch.int32), out if bias is None else bias,
        tables.arena, tables.a_offset, tables.b_offset, tables.rank, tables.num_a, segments.token_slot,
        plan.partial, plan.seen, *sites, *sites[:1] * (MAX_SITES - len(sites)), num_sites, num_slots,
        T=base["T"], T_P2=base["T_P2"], IN=base["IN"], OUT=base["OUT"], HAS_BIAS=bias is not None,
        FEW_ROWS=base["ROWS"], CHUNK=base["CHUNK"], FEW_CHUNKS=base["CHUNKS"], VECTOR=base["VECTOR"],
        **plan.constants, PDL=pdl, num_warps=few.num_warps,
        **({} if few.max_registers is None else {"maxnreg": few.max_registers}),
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def joined_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    segments: LoraSegments,
    tables: LoraTables,
    sites: tuple[int, ...],
    out_features: tuple[int, ...],
    num_slices: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The projection and the delta, or None where one launch cannot make both."""
    num_rows, (columns, in_features) = x.shape[0], weight.shape
    if not x.is_cuda or not 1 <= num_rows <= MAX_LANE_ROWS or tables.max_rank > MAX_JOINED_RANK:
        return None
    device = device_name(x)
    few = select_few_rows(num_rows, columns, in_features, device)
    if few is None or few.products or segments.blocks is not None or not takes(x, weight):
        return None
    tiles = select_pair(OpShape("linear", in_features, columns, tables.max_rank, num_rows), device)
    y = x.new_empty((num_rows, columns))
    delta = torch.empty((num_rows, columns), dtype=torch.float32, device=x.device)
    few_rows_lora(x, weight, bias, y, delta, few, segments, tables, sites, out_features, num_slices, tiles)
    return y, delta
