"""Expand at prefill: one program per (block of pairs of one (expert, slot), span of output columns).

    out[p, columns] += w[p] * B[rows, :] @ sum over parts of h[part, p, site, half, :R]

The rank vector meets the tensor cores as the sum of two compute-dtype values, high and low half, so that out
is the only place that rounds. The add is fused; rows without an adapter are in no block. Tiles of B and of
out are loaded STAGES - 1 steps ahead into shared memory: how many bytes are on their way bounds the op.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.lora.exact_dot import dot_exact
from lorikeet_kernels.lora.group_blocks import GroupBlocks
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.output_lanes import PairLane, describe_lanes
from lorikeet_kernels.lora.site_lookup import find_lane, find_site
from lorikeet_kernels.tiling import ExpandTiles

MAX_RANK_CHUNK = 64


@triton.jit
def _load_parts(h_row, r, mask, weight, part_stride, SPLITS: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    h = tl.load(h_row[:, None] + r[None, :], mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        h += tl.load(h_row[:, None] + split * part_stride + r[None, :], mask=mask, other=0.0)
    if HAS_WEIGHT:
        h = h * weight[:, None]
    return h


@triton.jit
def _load_rows(b_ptr, row, inside, r, rank):
    """B[row, r], transposed: [ranks, rows]."""
    return tl.load(
        b_ptr + row.to(tl.int64)[None, :] * rank + r[:, None],
        mask=inside[None, :] & (r < rank)[:, None],
        other=0.0,
    )


@triton.jit(do_not_specialize=["num_pairs", "site0", "site1", "site2", "num_sites", "num_slots"])
def _grouped_expand_kernel(
    out_ptr, h_ptr, arena_ptr, b_offset_ptr, rank_ptr, num_a_ptr, weight_ptr, pairs_ptr, blocks_ptr,
    num_blocks_ptr, num_pairs, site0, site1, site2, num_sites, num_slots,
    N: tl.constexpr, LANES: tl.constexpr, NUM_LANES: tl.constexpr, NUM_LAUNCH_SITES: tl.constexpr,
    HALVES: tl.constexpr, MAX_RANK: tl.constexpr, RANK_P2: tl.constexpr, RANK_CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, HAS_WEIGHT: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    left = tl.load(blocks_ptr + block * 4 + 1)
    expert = tl.load(blocks_ptr + block * 4 + 2)
    slot = tl.load(blocks_ptr + block * 4 + 3)
    if block >= tl.load(num_blocks_ptr):
        return  # beyond the last block the entry read above is arbitrary, but within bounds
    tile = tl.program_id(0)
    index, half, column, row, width, tile0, site_rows = find_lane(tile, LANES, NUM_LANES)
    site = tl.where(index == 0, site0, tl.where(index == 1, site1, site2))
    offset, rank, num_a = find_site(b_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, 0)
    if rank == 0:
        return
    m = tl.arange(0, BLOCK_M)
    row_mask = m < left
    pair = tl.load(pairs_ptr + block * BLOCK_M + m, mask=row_mask, other=0)
    b_ptr = arena_ptr + offset + tl.multiple_of(expert.to(tl.int64) * (site_rows * rank), 8)
    weight = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + pair, mask=row_mask, other=0.0)
    out_row = out_ptr + pair.to(tl.int64)[:, None] * N + column
    part_stride = num_pairs.to(tl.int64) * (NUM_LAUNCH_SITES * HALVES * MAX_RANK)
    h_row = h_ptr + (pair.to(tl.int64) * NUM_LAUNCH_SITES + index) * (HALVES * MAX_RANK)
    if not INTERLEAVED:
        h_row += tl.where(num_a == 2, half * MAX_RANK, 0)
    h_up_row = h_row + tl.where(num_a == 2, MAX_RANK, 0)
    r0 = tl.arange(0, RANK_CHUNK)
    mask0 = row_mask[:, None] & (r0 < rank)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    h0 = _load_parts(h_row, r0, mask0, weight, part_stride, SPLITS, HAS_WEIGHT)
    h_up0 = h0
    if INTERLEAVED:
        h_up0 = _load_parts(h_up_row, r0, mask0, weight, part_stride, SPLITS, HAS_WEIGHT)
    for step in tl.range(0, SPAN, num_stages=STAGES):
        first = ((tile - tile0) * SPAN + step) * BLOCK_N
        n = first + tl.arange(0, BLOCK_N)
        mask = row_mask[:, None] & (n < width)[None, :]
        if ACCUMULATE:
            before = tl.load(out_row + n[None, :], mask=mask, other=0.0)
        if INTERLEAVED:
            # gate's and up's columns are computed apart and joined in registers: each has a vector of its own
            even = first + 2 * tl.arange(0, BLOCK_N // 2)
            gate = tl.zeros([BLOCK_M, BLOCK_N // 2], tl.float32)
            up = tl.zeros([BLOCK_M, BLOCK_N // 2], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for chunk in tl.static_range(0, RANK_P2, RANK_CHUNK):
            r = chunk + r0
            h, h_up = h0, h_up0
            if chunk > 0:
                h_mask = row_mask[:, None] & (r < rank)[None, :]
                h = _load_parts(h_row, r, h_mask, weight, part_stride, SPLITS, HAS_WEIGHT)
                if INTERLEAVED:
                    h_up = _load_parts(h_up_row, r, h_mask, weight, part_stride, SPLITS, HAS_WEIGHT)
            if INTERLEAVED:
                gate = dot_exact(h, _load_rows(b_ptr, row + even, even < width, r, rank), gate)
                up = dot_exact(h_up, _load_rows(b_ptr, row + even + 1, even < width, r, rank), up)
            else:
                acc = dot_exact(h, _load_rows(b_ptr, row + n, n < width, r, rank), acc)
        if INTERLEAVED:
            acc = tl.reshape(tl.join(gate, up), [BLOCK_M, BLOCK_N])
        if ACCUMULATE:
            acc = before.to(tl.float32) + acc
        tl.store(out_row + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def grouped_expand(
    out: torch.Tensor,
    h: torch.Tensor,
    topk_weights: torch.Tensor | None,
    groups: GroupBlocks,
    tables: LoraTables,
    sites: tuple[int, ...],
    lanes: tuple[PairLane, ...],
    tiles: ExpandTiles,
    *,
    interleaved: bool = False,
    accumulate: bool = True,
) -> None:
    """Launch as a dependent of grouped_shrink; `out` has a row a pair, `h` is as grouped_shrink left it.

    Without `accumulate` the delta is stored, and rows without an adapter stay as they are.
    """
    splits, num_pairs, num_launch_sites, halves, max_rank = h.shape
    num_slots, num_sites = tables.rank.shape
    described, num_tiles = describe_lanes(lanes, tiles.block_n * tiles.span)
    rank_p2 = max(16, triton.next_power_of_2(max_rank))
    pdl = h.device.type == "cuda"
    _grouped_expand_kernel[(num_tiles, groups.capacity)](
        out, h, tables.arena, tables.b_offset, tables.rank, tables.num_a,
        out if topk_weights is None else topk_weights, groups.pairs, groups.blocks, groups.num_blocks,
        num_pairs, *sites, num_sites, num_slots,
        N=out.shape[-1], LANES=described, NUM_LANES=len(lanes), NUM_LAUNCH_SITES=num_launch_sites,
        HALVES=halves, MAX_RANK=max_rank, RANK_P2=rank_p2, RANK_CHUNK=min(MAX_RANK_CHUNK, rank_p2),
        SPLITS=splits, BLOCK_M=groups.block_m, BLOCK_N=tiles.block_n, SPAN=tiles.span,
        STAGES=tiles.num_stages, HAS_WEIGHT=topk_weights is not None, INTERLEAVED=interleaved,
        PDL=pdl, ACCUMULATE=accumulate, num_warps=tiles.num_warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
