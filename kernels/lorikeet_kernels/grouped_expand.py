"""Expand at prefill: one program per (block of pairs of one (expert, slot), span of output columns).

    out[p, columns] += w[p] * B[rows, :] @ sum over parts of h[part, p, site, half, :R]

The rank vector meets the tensor cores as the sum of two compute-dtype values, high and low half, so that out
is the only place that rounds. The add is fused; rows without an adapter are in no block.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.group_blocks import GroupBlocks
from lorikeet_kernels.lora_tables import LoraTables
from lorikeet_kernels.output_lanes import PairLane, describe_lanes
from lorikeet_kernels.site_lookup import find_lane, find_site
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
def _dot_exact(h, b, acc):
    """Acc + h @ b with h float32 and b in the compute dtype, h as a high and a low half of that dtype."""
    if b.dtype == tl.float32:
        acc = tl.dot(h, b, acc, input_precision="ieee")
    else:
        high = h.to(b.dtype)
        acc = tl.dot(high, b, acc)
        acc = tl.dot((h - high.to(tl.float32)).to(b.dtype), b, acc)
    return acc


@triton.jit(do_not_specialize=["num_pairs", "site0", "site1", "site2", "num_sites", "num_slots"])
def _grouped_expand_kernel(
    out_ptr, h_ptr, arena_ptr, b_offset_ptr, rank_ptr, num_a_ptr, weight_ptr, order_ptr, blocks_ptr,
    num_blocks_ptr, num_pairs, site0, site1, site2, num_sites, num_slots,
    N: tl.constexpr, LANES: tl.constexpr, NUM_LANES: tl.constexpr, NUM_LAUNCH_SITES: tl.constexpr,
    HALVES: tl.constexpr, MAX_RANK: tl.constexpr, RANK_P2: tl.constexpr, RANK_CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, HAS_WEIGHT: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    start = tl.load(blocks_ptr + block * 4)
    count = tl.load(blocks_ptr + block * 4 + 1)
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
    row_mask = m < count
    pair = tl.load(order_ptr + start + m, mask=row_mask, other=0)
    offset += tl.multiple_of(expert.to(tl.int64) * (site_rows * rank), 8)
    weight = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + pair, mask=row_mask, other=0.0)
    first = (tile - tile0) * (SPAN * BLOCK_N)
    lane_n = tl.arange(0, BLOCK_N)
    out_row = out_ptr + pair.to(tl.int64)[:, None] * N + column
    before = tl.load(
        out_row + (first + lane_n)[None, :],
        mask=row_mask[:, None] & (first + lane_n < width)[None, :],
        other=0.0,
    )
    part_stride = num_pairs.to(tl.int64) * (NUM_LAUNCH_SITES * HALVES * MAX_RANK)
    h_row = h_ptr + (pair.to(tl.int64) * NUM_LAUNCH_SITES + index) * (HALVES * MAX_RANK)
    h_row += tl.where(num_a == 2, half * MAX_RANK, 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    r0 = tl.arange(0, RANK_CHUNK)
    h0 = _load_parts(
        h_row, r0, row_mask[:, None] & (r0 < rank)[None, :], weight, part_stride, SPLITS, HAS_WEIGHT
    )
    for step in tl.range(0, SPAN, num_stages=STAGES):
        n = first + step * BLOCK_N + lane_n
        following = n + BLOCK_N
        # out's next tile is on its way while this one is computed: a read of DRAM a tile is what bounds the
        # op
        upcoming = before
        if SPAN > 1:
            upcoming = tl.load(
                out_row + following[None, :],
                mask=row_mask[:, None] & ((following < width) & (step + 1 < SPAN))[None, :],
                other=0.0,
            )
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for chunk in tl.static_range(0, RANK_P2, RANK_CHUNK):
            r = chunk + r0
            h_mask = row_mask[:, None] & (r < rank)[None, :]
            b = tl.load(
                arena_ptr + offset + (row + n).to(tl.int64)[None, :] * rank + r[:, None],
                mask=(n < width)[None, :] & (r < rank)[:, None],
                other=0.0,
            )
            h = h0
            if chunk > 0:
                h = _load_parts(h_row, r, h_mask, weight, part_stride, SPLITS, HAS_WEIGHT)
            if INTERLEAVED:
                # two A on interleaved columns: gate's vector meets B with up's rows zeroed, and the other way
                acc = _dot_exact(h, tl.where(((num_a == 1) | (n % 2 == 0))[None, :], b, 0.0), acc)
                if num_a == 2:
                    h = _load_parts(h_row + MAX_RANK, r, h_mask, weight, part_stride, SPLITS, HAS_WEIGHT)
                    acc = _dot_exact(h, tl.where((n % 2 == 1)[None, :], b, 0.0), acc)
            else:
                acc = _dot_exact(h, b, acc)
        tl.store(
            out_row + n[None, :],
            (before.to(tl.float32) + acc).to(out_ptr.dtype.element_ty),
            mask=row_mask[:, None] & (n < width)[None, :],
        )
        before = upcoming


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
) -> None:
    """Launch as a dependent of grouped_shrink; `out` has a row a pair, `h` is as grouped_shrink left it."""
    splits, num_pairs, num_launch_sites, halves, max_rank = h.shape
    num_slots, num_sites = tables.rank.shape
    described, num_tiles = describe_lanes(lanes, tiles.block_n * tiles.span)
    rank_p2 = max(16, triton.next_power_of_2(max_rank))
    pdl = h.device.type == "cuda"
    _grouped_expand_kernel[(num_tiles, groups.capacity)](
        out, h, tables.arena, tables.b_offset, tables.rank, tables.num_a,
        out if topk_weights is None else topk_weights, groups.order, groups.blocks, groups.num_blocks,
        num_pairs, *sites, num_sites, num_slots,
        N=out.shape[-1], LANES=described, NUM_LANES=len(lanes), NUM_LAUNCH_SITES=num_launch_sites,
        HALVES=halves, MAX_RANK=max_rank, RANK_P2=rank_p2, RANK_CHUNK=min(MAX_RANK_CHUNK, rank_p2),
        SPLITS=splits, BLOCK_M=groups.block_m, BLOCK_N=tiles.block_n, SPAN=tiles.span,
        STAGES=tiles.num_stages,
        HAS_WEIGHT=topk_weights is not None, INTERLEAVED=interleaved,
        PDL=pdl, num_warps=tiles.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
