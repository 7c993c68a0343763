"""Dense LoRA for batches whose tokens share adapters: shrink and expand of all segments in one launch.

    out[t, columns of a lane] += B[rows, :] @ (A x[t])

As `pair_lora`, but a program serves up to BLOCK_M tokens of one slot, so that each tile of A and of B is read
once a block instead of once a token, and the products run on tensor cores. Blocks come from
`group_blocks.group_pairs` over the tokens, made once per step. Expand's wait for shrink and the start ahead
of the launch before are pair_lora's: a part is a float32 whose last mantissa bit is the phase; every word of
every block that the launch covers flips, also of blocks beyond the last and of slots without weights. As
there, the delta can be stored alone, NO_DELTA for rows without an adapter.
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
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.no_delta import no_delta
from lorikeet_kernels.lora.output_lanes import PairLane, describe_lanes
from lorikeet_kernels.lora.pair_lora import SPIN_LIMIT
from lorikeet_kernels.lora.site_lookup import find_lane, find_site
from lorikeet_kernels.tiling import MAX_SEGMENT_BLOCKS, PairTiles


@triton.jit
def _find_block(blocks_ptr, num_blocks_ptr, block):
    """(tokens left in its group, slot) of a block; none and slot -1 beyond the last."""
    live = block < tl.load(num_blocks_ptr)
    left = tl.load(blocks_ptr + block * 4 + 1)
    slot = tl.load(blocks_ptr + block * 4 + 3)
    return tl.where(live, left, 0), tl.where(live, slot, -1)


@triton.jit
def _shrink_part(
    x_ptr, arena_ptr, a_offset_ptr, rank_ptr, num_a_ptr, pairs_ptr, blocks_ptr, num_blocks_ptr, partial_ptr,
    program, site0, site1, site2, num_sites, num_slots,
    K: tl.constexpr, NUM_LAUNCH_SITES: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SLOT_SCAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    split = program % SPLITS
    chunk = (program // SPLITS) % CHUNKS
    index = (program // (SPLITS * CHUNKS)) % NUM_LAUNCH_SITES
    block = program // (SPLITS * CHUNKS * NUM_LAUNCH_SITES)
    left, slot = _find_block(blocks_ptr, num_blocks_ptr, block)
    site = tl.where(index == 0, site0, tl.where(index == 1, site1, site2))
    offset, rank, num_a = find_site(
        a_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, SLOT_SCAN
    )
    m = tl.arange(0, BLOCK_M)
    row = chunk * ROWS + tl.arange(0, ROWS)
    total_rows = rank * num_a
    a_row = arena_ptr + offset + row.to(tl.int64)[:, None] * K
    a_mask = (row < total_rows)[:, None] & (chunk * ROWS < total_rows)
    token = tl.load(pairs_ptr + block * BLOCK_M + m)
    x_row = x_ptr + token.to(tl.int64)[:, None] * K
    H_ROWS: tl.constexpr = CHUNKS * ROWS
    base = ((block * SPLITS + split) * NUM_LAUNCH_SITES + index).to(tl.int64) * (BLOCK_M * H_ROWS)
    place = partial_ptr + base + m[:, None] * H_ROWS + row[None, :]
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    a = tl.load(a_row + k[None, :], mask=a_mask & (k < K)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    before = tl.load(place)  # ahead of the product: no load moves up across its barriers
    x = tl.load(x_row + k[None, :], mask=(m < left)[:, None] & (k < K)[None, :], other=0.0)
    part = tl.dot(x, tl.trans(a), input_precision="ieee")
    tl.store(place, (part.to(tl.int32, bitcast=True) & -2) | ((before & 1) ^ 1))


@triton.jit
def _sum_parts(part_ptr, expected, row_mask, rank, r, H_ROWS: tl.constexpr, STRIDE: tl.constexpr,
               SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, RANK_P2: tl.constexpr,
               SPIN_LIMIT: tl.constexpr):  # fmt: skip
    """The rank vectors [BLOCK_M, RANK_P2]: the splits' words, in order, once all carry the phase."""
    m = tl.arange(0, BLOCK_M)
    wanted = row_mask[:, None] & (r < rank)[None, :]
    place = part_ptr + m[:, None] * H_ROWS + r[None, :]
    late = 1
    spins = 0
    h = tl.zeros([BLOCK_M, RANK_P2], tl.float32)
    while (late != 0) & (spins < SPIN_LIMIT):
        h = tl.zeros([BLOCK_M, RANK_P2], tl.float32)
        differing = tl.zeros([BLOCK_M, RANK_P2], tl.int32)
        for split in tl.static_range(SPLITS):
            words = tl.load(place + split * STRIDE, mask=wanted, other=0, volatile=True)
            h += (words & -2).to(tl.float32, bitcast=True)
            differing |= words ^ expected
        late = tl.max(tl.max(tl.where(wanted, differing & 1, 0), axis=1), axis=0)
        spins += 1
    return tl.where(late == 0, h, float("nan"))


@triton.jit
def _store_no_delta(out_ptr, order_ptr, starts_ptr, place, column, inside, N: tl.constexpr):
    """The base model's tokens are in no block: they come first in `order`, and each block takes a share."""
    is_base = place < tl.load(starts_ptr + 1)
    token = tl.load(order_ptr + place, mask=is_base, other=0)
    at = out_ptr + token.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, no_delta(at).to(out_ptr.dtype.element_ty), mask=is_base[:, None] & inside[None, :])


@triton.jit
def _expand_tile(
    out_ptr, arena_ptr, b_offset_ptr, rank_ptr, num_a_ptr, pairs_ptr, blocks_ptr, num_blocks_ptr, order_ptr,
    starts_ptr, partial_ptr, seen_ptr, program, site0, site1, site2, num_sites, num_slots,
    ACCUMULATE: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, NUM_LANES: tl.constexpr,
    TILES: tl.constexpr, NUM_LAUNCH_SITES: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANK_P2: tl.constexpr,
    SLOT_SCAN: tl.constexpr, SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = program % TILES
    block = program // TILES
    index, half, column, row, width, first, _ = find_lane(tile, LANES, NUM_LANES)
    left, slot = _find_block(blocks_ptr, num_blocks_ptr, block)
    site = tl.where(index == 0, site0, tl.where(index == 1, site1, site2))
    offset, rank, num_a = find_site(
        b_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, SLOT_SCAN
    )
    seen_place = seen_ptr + block * TILES + tile
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, RANK_P2)
    n = (tile - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = m < left
    token = tl.load(pairs_ptr + block * BLOCK_M + m)
    b_row = arena_ptr + offset + (row + n).to(tl.int64)[None, :] * rank
    b = tl.load(b_row + r[:, None], mask=(n < width)[None, :] & (r < rank)[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    expected = (tl.load(seen_place) & 1) ^ 1
    out_place = out_ptr + token.to(tl.int64)[:, None] * N + column + n[None, :]
    mask = row_mask[:, None] & (n < width)[None, :]
    if not ACCUMULATE:
        _store_no_delta(out_ptr, order_ptr, starts_ptr, block * BLOCK_M + m, column + n, n < width, N)
    if rank == 0:
        tl.store(seen_place, expected)
        if not ACCUMULATE:
            tl.store(out_place, no_delta(out_place).to(out_ptr.dtype.element_ty), mask=mask)
        return
    if ACCUMULATE:
        before = tl.load(out_place, mask=mask, other=0.0)
    H_ROWS: tl.constexpr = CHUNKS * ROWS
    STRIDE: tl.constexpr = NUM_LAUNCH_SITES * BLOCK_M * H_ROWS
    part_ptr = partial_ptr + block.to(tl.int64) * (SPLITS * STRIDE) + index * (BLOCK_M * H_ROWS)
    part_ptr += tl.where(num_a == 2, half * rank, 0)
    h = _sum_parts(
        part_ptr, expected, row_mask, rank, r, H_ROWS, STRIDE, SPLITS, BLOCK_M, RANK_P2, SPIN_LIMIT
    )
    y = dot_exact(h, b, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    if ACCUMULATE:
        y = before.to(tl.float32) + y
    tl.store(out_place, y.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(seen_place, expected)


@triton.jit(do_not_specialize=["capacity", "site0", "site1", "site2", "num_sites", "num_slots"])
def _segment_lora_kernel(
    out_ptr, x_ptr, arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, pairs_ptr, blocks_ptr,
    num_blocks_ptr, order_ptr, starts_ptr, partial_ptr, seen_ptr, capacity, site0, site1, site2, num_sites,
    num_slots, ACCUMULATE: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, NUM_LANES: tl.constexpr, TILES: tl.constexpr,
    NUM_LAUNCH_SITES: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    RANK_P2: tl.constexpr, SLOT_SCAN: tl.constexpr, SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: tl.constexpr = NUM_LAUNCH_SITES * CHUNKS * SPLITS
    program = tl.program_id(0)
    num_parts = capacity * PARTS
    if program < num_parts:
        _shrink_part(
            x_ptr, arena_ptr, a_offset_ptr, rank_ptr, num_a_ptr, pairs_ptr, blocks_ptr, num_blocks_ptr,
            partial_ptr, program, site0, site1, site2, num_sites, num_slots,
            K, NUM_LAUNCH_SITES, ROWS, CHUNKS, SPLITS, BLOCK_M, BLOCK_K, SLOT_SCAN,
            PDL,
        )  # fmt: skip
    else:
        _expand_tile(
            out_ptr, arena_ptr, b_offset_ptr, rank_ptr, num_a_ptr, pairs_ptr, blocks_ptr, num_blocks_ptr,
            order_ptr, starts_ptr, partial_ptr, seen_ptr, program - num_parts, site0, site1, site2, num_sites,
            num_slots, ACCUMULATE, N, LANES, NUM_LANES, TILES, NUM_LAUNCH_SITES, ROWS, CHUNKS, SPLITS,
            BLOCK_M, BLOCK_N, RANK_P2, SLOT_SCAN, SPIN_LIMIT, PDL,
        )  # fmt: skip


def segment_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    blocks: GroupBlocks,
    tables: LoraTables,
    sites: tuple[int, ...],
    lanes: tuple[PairLane, ...],
    tiles: PairTiles,
    workspace: LoraWorkspace,
    *,
    accumulate: bool = True,
) -> None:
    """Launch over the token blocks of one step; `out` [T, N] and `x` [T, K] have a row a token.

    Weights, tables and `blocks` are read ahead of the kernel that this launch depends on: they must be older
    than that one. `x` and `out` may be its results. `accumulate` as for `pair_lora`.
    """
    if blocks.capacity > MAX_SEGMENT_BLOCKS:
        raise ValueError(
            f"{blocks.capacity} blocks in one launch: at most {MAX_SEGMENT_BLOCKS}, more want two launches"
        )
    num_slots, num_sites = tables.rank.shape
    in_features = x.shape[-1]
    num_columns = out.shape[-1]
    max_rows = tables.max_rank * max(1 + (lane.half > 0) for lane in lanes)
    rows = max(16, min(tiles.rows, triton.next_power_of_2(max_rows)))
    chunks = triton.cdiv(max_rows, rows)
    splits = triton.cdiv(in_features, tiles.block_k)
    described, num_tiles = describe_lanes(lanes, tiles.block_n)
    words = len(sites) * chunks * rows * blocks.block_m
    key = ("segment", *tiles.key, in_features, num_columns, words, num_tiles)
    partial = workspace.zeroed(("partial", *key), MAX_SEGMENT_BLOCKS * splits * words)
    seen = workspace.zeroed(("seen", *key), MAX_SEGMENT_BLOCKS * num_tiles)
    padded_sites = tables.padded_sites(sites)
    programs = blocks.capacity * (len(sites) * chunks * splits + num_tiles)
    pdl = accumulate and out.device.type == "cuda"
    _segment_lora_kernel[(programs,)](
        out, x, tables.arena, tables.a_offset, tables.b_offset, tables.rank, tables.num_a, blocks.pairs,
        blocks.blocks, blocks.num_blocks, blocks.order, blocks.starts, partial, seen, blocks.capacity,
        *padded_sites, num_sites, num_slots,
        ACCUMULATE=accumulate, K=in_features, N=num_columns, LANES=described, NUM_LANES=len(lanes),
        TILES=num_tiles, NUM_LAUNCH_SITES=len(sites), ROWS=rows, CHUNKS=chunks, SPLITS=splits,
        BLOCK_M=blocks.block_m, BLOCK_K=tiles.block_k, BLOCK_N=tiles.block_n,
        RANK_P2=max(16, triton.next_power_of_2(tables.max_rank)),
        SLOT_SCAN=triton.next_power_of_2(num_slots) if num_slots <= 32 else 0, SPIN_LIMIT=SPIN_LIMIT, PDL=pdl,
        num_warps=tiles.num_warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
