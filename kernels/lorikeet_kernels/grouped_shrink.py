"""Shrink at prefill: one program per (block of pairs of one (expert, slot), rows of A, part of the input).

    h[part, p, site, a, :R] = A[a * R : (a + 1) * R, part of K] @ x[row(p)]

h [SPLITS, P, sites, halves, Rmax] float32: expand sums the parts in order.
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
from lorikeet_kernels.site_lookup import find_site
from lorikeet_kernels.tiling import ShrinkTiles

MAX_ROWS = 64  # of A a program: wider accumulators leave too few programs on an SM


@triton.jit(do_not_specialize=["num_pairs", "site0", "site1", "site2", "num_sites", "num_slots"])
def _grouped_shrink_kernel(
    h_ptr, x_ptr, arena_ptr, a_offset_ptr, rank_ptr, num_a_ptr, order_ptr, blocks_ptr, num_blocks_ptr,
    num_pairs, site0, site1, site2, num_sites, num_slots,
    K: tl.constexpr, X_DIV: tl.constexpr, NUM_LAUNCH_SITES: tl.constexpr, HALVES: tl.constexpr,
    MAX_RANK: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr, STEPS:
    tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(1)
    start = tl.load(blocks_ptr + block * 4)
    count = tl.load(blocks_ptr + block * 4 + 1)
    expert = tl.load(blocks_ptr + block * 4 + 2)
    slot = tl.load(blocks_ptr + block * 4 + 3)
    if block >= tl.load(num_blocks_ptr):
        return  # beyond the last block the entry read above is arbitrary, but within bounds
    part = tl.program_id(0)
    split = part % SPLITS
    chunk = (part // SPLITS) % CHUNKS
    index = part // (SPLITS * CHUNKS)
    site = tl.where(index == 0, site0, tl.where(index == 1, site1, site2))
    offset, rank, num_a = find_site(a_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, 0)
    total_rows = rank * num_a
    if chunk * ROWS >= total_rows:
        return
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(order_ptr + start + m, mask=m < count, other=0)
    row = chunk * ROWS + tl.arange(0, ROWS)
    a_ptr = arena_ptr + offset + tl.multiple_of(expert.to(tl.int64) * total_rows * K, 8)
    a_row = a_ptr + row.to(tl.int64)[None, :] * K
    x_row = x_ptr + (pair // X_DIV).to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_M, ROWS], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0 and (SPLITS * STEPS * BLOCK_K == K):
            x = tl.load(x_row + k[None, :], mask=(m < count)[:, None], other=0.0)
            a = tl.load(a_row + k[:, None], mask=(row < total_rows)[None, :], other=0.0)
        else:
            x = tl.load(x_row + k[None, :], mask=(m < count)[:, None] & (k < K)[None, :], other=0.0)
            a = tl.load(a_row + k[:, None], mask=(row < total_rows)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    place = row + tl.where(row >= rank, MAX_RANK - rank, 0)
    h_row = h_ptr + ((split * num_pairs + pair).to(tl.int64) * NUM_LAUNCH_SITES + index) * (HALVES * MAX_RANK)
    tl.store(h_row[:, None] + place[None, :], acc, mask=(m < count)[:, None] & (row < total_rows)[None, :])


def grouped_shrink(
    h: torch.Tensor,
    x: torch.Tensor,
    groups: GroupBlocks,
    tables: LoraTables,
    sites: tuple[int, ...],
    tiles: ShrinkTiles,
    *,
    x_div: int,
) -> None:
    """Launch; `x` is read as [rows, in], row = pair // x_div; `h` [SPLITS, P, sites, halves, Rmax]."""
    splits, num_pairs, num_launch_sites, halves, max_rank = h.shape
    in_features = x.shape[-1]
    num_slots, num_sites = tables.rank.shape
    rows = max(16, min(MAX_ROWS, triton.next_power_of_2(halves * max_rank)))
    chunks = triton.cdiv(halves * max_rank, rows)
    pdl = h.device.type == "cuda"
    _grouped_shrink_kernel[(splits * chunks * num_launch_sites, groups.capacity)](
        h, x, tables.arena, tables.a_offset, tables.rank, tables.num_a, groups.order, groups.blocks,
        groups.num_blocks, num_pairs, *sites, num_sites, num_slots,
        K=in_features, X_DIV=x_div, NUM_LAUNCH_SITES=num_launch_sites, HALVES=halves, MAX_RANK=max_rank,
        ROWS=rows, CHUNKS=chunks, SPLITS=splits,
        STEPS=triton.cdiv(triton.cdiv(in_features, tiles.block_k), splits),
        BLOCK_M=groups.block_m, BLOCK_K=tiles.block_k, STAGES=tiles.num_stages, PDL=pdl,
        num_warps=tiles.num_warps,
    )  # fmt: skip
