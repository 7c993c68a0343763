"""Shrink at prefill: one program per (pairs of one (expert, slot), columns of h, part of the input).

    h[part, p, site, a, :R] = A[a * R : (a + 1) * R, part of K] @ x[row(p)]

h [SPLITS, P, sites, halves, Rmax] float32: expand sums the parts in order. A program covers all sites of the
launch as far as its columns reach, so that x is read once for q, k and v, and JOINED blocks of a group, so
that A is read once for more rows than expand's tiles have.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.lora.group_blocks import GroupBlocks
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.tiling import ShrinkTiles

MAX_COLUMNS = 64  # of h a program: wider accumulators leave too few programs on an SM


@triton.jit(do_not_specialize=["num_pairs", "site0", "site1", "site2", "num_sites"])
def _grouped_shrink_kernel(
    h_ptr, x_ptr, arena_ptr, a_offset_ptr, rank_ptr, num_a_ptr, pairs_ptr, blocks_ptr, num_blocks_ptr,
    num_pairs, site0, site1, site2, num_sites,
    K: tl.constexpr, X_DIV: tl.constexpr, NUM_LAUNCH_SITES: tl.constexpr, HALVES: tl.constexpr,
    MAX_RANK: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr,
    JOINED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(1)
    number = tl.load(blocks_ptr + block * 4)
    left = tl.load(blocks_ptr + block * 4 + 1)
    expert = tl.load(blocks_ptr + block * 4 + 2)
    slot = tl.load(blocks_ptr + block * 4 + 3)
    if block >= tl.load(num_blocks_ptr):
        return  # beyond the last block the entry read above is arbitrary, but within bounds
    if number % JOINED != 0:
        return  # the program of an earlier block of the group covers this one
    split = tl.program_id(0) % SPLITS
    WIDTH: tl.constexpr = NUM_LAUNCH_SITES * HALVES * MAX_RANK
    column = (tl.program_id(0) // SPLITS) * COLUMNS + tl.arange(0, COLUMNS)
    index = column // (HALVES * MAX_RANK)
    half = (column // MAX_RANK) % HALVES
    r = column % MAX_RANK
    place = slot * num_sites + tl.where(index == 0, site0, tl.where(index == 1, site1, site2))
    rank = tl.load(rank_ptr + place, mask=column < WIDTH, other=0)
    num_a = tl.load(num_a_ptr + place, mask=column < WIDTH, other=0)
    offset = tl.multiple_of(tl.load(a_offset_ptr + place, mask=column < WIDTH, other=0), 64)
    live = (r < rank) & (half < num_a)
    if tl.max(live.to(tl.int32)) == 0:
        return
    m = tl.arange(0, JOINED * BLOCK_M)
    inside = m < left
    pair = tl.load(pairs_ptr + block * BLOCK_M + m, mask=inside, other=0)
    row = expert * rank * num_a + half * rank + r
    a_row = arena_ptr + offset + row.to(tl.int64) * K
    x_row = x_ptr + (pair // X_DIV).to(tl.int64)[:, None] * K
    acc = tl.zeros([JOINED * BLOCK_M, COLUMNS], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        if SPLITS * STEPS * BLOCK_K == K:
            x = tl.load(x_row + k[None, :], mask=inside[:, None], other=0.0)
            a = tl.load(a_row[None, :] + k[:, None], mask=live[None, :], other=0.0)
        else:
            x = tl.load(x_row + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
            a = tl.load(a_row[None, :] + k[:, None], mask=live[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    h_row = h_ptr + (split * num_pairs + pair).to(tl.int64) * WIDTH
    tl.store(h_row[:, None] + column[None, :], acc, mask=inside[:, None] & live[None, :])


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
    width = num_launch_sites * halves * max_rank
    columns = max(16, min(MAX_COLUMNS, triton.next_power_of_2(width)))
    pdl = h.device.type == "cuda"
    _grouped_shrink_kernel[(splits * triton.cdiv(width, columns), groups.capacity)](
        h, x, tables.arena, tables.a_offset, tables.rank, tables.num_a, groups.pairs, groups.blocks,
        groups.num_blocks, num_pairs, *sites, tables.rank.shape[1],
        K=in_features, X_DIV=x_div, NUM_LAUNCH_SITES=num_launch_sites, HALVES=halves, MAX_RANK=max_rank,
        COLUMNS=columns, SPLITS=splits,
        STEPS=triton.cdiv(triton.cdiv(in_features, tiles.block_k), splits),
        JOINED=tiles.joined, BLOCK_M=groups.block_m, BLOCK_K=tiles.block_k, STAGES=tiles.num_stages, PDL=pdl,
        num_warps=tiles.num_warps,
    )  # fmt: skip
