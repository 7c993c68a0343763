"""Dense LoRA for batches whose tokens share adapters, as `segment_lora`, with products out of registers.

    out[t, columns of a lane] += B[rows, :] @ (A x[t])

What differs is what a program waits for once its input is there. A weight goes from global memory into the
very registers from which the tensor cores read it (16 bytes a lane along the contraction), so that x meets
no shared memory and no barrier; each 64 columns of the contraction have an accumulator of their own, so that
a product's latency is four multiplications long whatever BLOCK_K is; blocks and sites without weights cost a
program that goes at once; programs are small enough that the next
launch's are resident, weights in registers, while this one runs. Shrink programs, the first
to be resident, fetch x, out and B into L2 before they wait: where all writes meet, so that nothing fetched
early is stale.

Predicted for 32 tokens over 8 slots of rank 16, us (floor, `segment_lora`, measured): gpt-oss-20b qkv 2.7
(1.0, 4.4, 3.0), o 2.4 (0.6, 3.6, 2.6), Qwen3-32B qkv 3.6 (1.9, 5.9, 4.1), o 2.9 (1.1, 4.9, 3.5),
Llama-3.3-70B qkv 4.3 (2.5, 6.8, 5.3), o 3.0 (1.3, 5.1, 3.4).

Words of parts, phases and the wait are segment_lora's. A shrink program keeps the phase in one word of its
own, since all its words flip together. 16-bit dtypes only. As there, the delta can be stored alone, in
float32: the products are the same ones, so that whoever adds it and rounds gets the bits of the sum in place.
"""

# A Gluon kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportUnnecessaryComparison=false, reportPossiblyUnboundVariable=false

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from lorikeet_kernels.launch.grid_dependency import launch_next_grid, wait_for_grid
from lorikeet_kernels.lora.fetch_rows import can_fetch, fetch_rows, fetch_run
from lorikeet_kernels.lora.group_blocks import GroupBlocks
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.output_lanes import PairLane, describe_lanes
from lorikeet_kernels.lora.pair_lora import SPIN_LIMIT
from lorikeet_kernels.lora.part_sums import sum_parts, wait_for_parts, waiting_sum
from lorikeet_kernels.tiling import MAX_SEGMENT_BLOCKS, RegisterTiles


@gluon.jit
def _find_block(blocks_ptr, num_blocks_ptr, block):
    """(tokens left in its group, slot) of a block; none and slot -1 beyond the last."""
    live = block < gl.load(num_blocks_ptr)
    left = gl.load(blocks_ptr + block * 4 + 1)
    slot = gl.load(blocks_ptr + block * 4 + 3)
    return gl.where(live, left, 0), gl.where(live, slot, -1)


@gluon.jit
def _find_site(offset_ptr, rank_ptr, num_a_ptr, slot, index, site0, site1, site2, num_sites):
    """(offset, rank, num_a) of a slot at the launch's site `index`; rank 0 for slot -1."""
    site = gl.where(index == 0, site0, gl.where(index == 1, site1, site2))
    place = gl.maximum(slot, 0).to(gl.int64) * num_sites + site
    offset = gl.multiple_of(gl.load(offset_ptr + place), 64)
    rank = gl.where(slot < 0, 0, gl.multiple_of(gl.load(rank_ptr + place), 8))
    return offset, gl.multiple_of(rank, 8), gl.load(num_a_ptr + place)


@gluon.jit
def _find_span(index, SPANS: gl.constexpr, NUM_LAUNCH_SITES: gl.constexpr):
    """(first column, columns) of the launch's site `index`."""
    column, width = 0, 0
    for site in gl.static_range(NUM_LAUNCH_SITES):
        column = gl.where(index == site, SPANS[site][0], column)
        width = gl.where(index == site, SPANS[site][1], width)
    return column, width


@gluon.jit
def _shrink_part(
    out_ptr, x_ptr, arena_ptr, pairs_ptr, partial_ptr, turn_ptr, program, split, chunk, index, block, left,
    offset, rank, num_a, b_offset,
    K: gl.constexpr, N: gl.constexpr, SPANS: gl.constexpr, SLICE: gl.constexpr,
    NUM_LAUNCH_SITES: gl.constexpr, ROWS: gl.constexpr, CHUNKS: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr, VECTOR: gl.constexpr, PDL: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    X: gl.constexpr = gl.DotOperandLayout(0, ACC, 8)
    A: gl.constexpr = gl.DotOperandLayout(1, ACC, 8)
    DEPTH: gl.constexpr = BLOCK_K // GROUPS
    row = chunk * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))
    a_group = split * BLOCK_K + DEPTH * gl.arange(0, GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, A)))
    a_k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))
    a_column = a_group[:, None, None] + a_k[None, :, None]
    a_place = arena_ptr + offset + row.to(gl.int64)[None, None, :] * K + a_column
    a = gl.load(a_place, mask=(row < rank * num_a)[None, None, :] & (a_column < K), other=0.0)
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))
    token = gl.load(pairs_ptr + block * BLOCK_M + m, mask=m < left, other=0)
    x_group = split * BLOCK_K + DEPTH * gl.arange(0, GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))
    x_k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))
    x_column = x_group[:, None, None] + x_k[None, None, :]
    x_place = x_ptr + token.to(gl.int64)[None, :, None] * K + x_column
    if FETCH:
        if index == 0:
            fetch_rows(x_ptr, pairs_ptr, block, left, split * BLOCK_K, K, K, BLOCK_K, BLOCK_M, WARPS)
        if chunk == 0:
            column, width = _find_span(index, SPANS, NUM_LAUNCH_SITES)
            begin = column + split * SLICE
            fetch_rows(out_ptr, pairs_ptr, block, left, begin, column + width, N, SLICE, BLOCK_M, WARPS)
            rows = gl.minimum(SLICE, width - split * SLICE)
            fetch_run(arena_ptr + b_offset + (split * SLICE * rank).to(gl.int64), rows * rank * 2, WARPS)
    if PDL:
        wait_for_grid()
    turn = gl.load(turn_ptr + program, volatile=True)  # else it is loaded last, and waited for
    x = gl.load(x_place, mask=(m < left)[None, :, None] & (x_column < K), other=0.0)
    acc = gl.zeros([GROUPS, BLOCK_M, ROWS], gl.float32, layout=ACC)
    PARTS: gl.constexpr = gl.BlockedLayout(
        [GROUPS, 1, VECTOR], [1, 32 * VECTOR // ROWS, ROWS // VECTOR], [1, WARPS, 1], [2, 1, 0]
    )
    part = gl.sum(gl.convert_layout(mma_v2(x, a, acc), PARTS), axis=0)  # each thread by itself, in order
    H_ROWS: gl.constexpr = CHUNKS * ROWS
    PART: gl.constexpr = gl.SliceLayout(0, PARTS)
    base = ((block * SPLITS + split) * NUM_LAUNCH_SITES + index).to(gl.int64) * (BLOCK_M * H_ROWS)
    to_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, PART))
    to_column = chunk * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, PART))
    place = partial_ptr + base + to_row[:, None] * H_ROWS + to_column[None, :]
    flipped = (turn & 1) ^ 1
    gl.store(place, (part.to(gl.int32, bitcast=True) & -2) | flipped)
    gl.store(turn_ptr + program, flipped)


@gluon.jit
def _find_lane(tile, LANES: gl.constexpr, NUM_LANES: gl.constexpr):
    """The lane that `tile` lies in: describe_lanes's (site, half, column, row, width, first tile)."""
    index, half, column, row, width, first = 0, 0, 0, 0, 0, 0
    for lane in gl.static_range(NUM_LANES):
        inside = tile >= LANES[lane][5]
        index = gl.where(inside, LANES[lane][0], index)
        half = gl.where(inside, LANES[lane][1], half)
        column = gl.where(inside, LANES[lane][2], column)
        row = gl.where(inside, LANES[lane][3], row)
        width = gl.where(inside, LANES[lane][4], width)
        first = gl.where(inside, LANES[lane][5], first)
    return index, half, column, row, width, first


@gluon.jit
def _store_no_delta(
    out_ptr, pairs_ptr, order_ptr, starts_ptr, block, at, column, width, left, rank,
    N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """NO_DELTA where no weights give one: rows of a slot without any at the site, and the base's tokens.

    Those are in no block: they come first in `order`, and each block takes a share.
    """
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, TILE))
    n = at + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, TILE))
    inside = (n < width)[None, :]
    # by its bits: a constant equal to zero is taken for 0
    bits = gl.full([BLOCK_M, BLOCK_N], -2147483648, gl.int32, layout=TILE)
    nothing = bits.to(gl.float32, bitcast=True)
    place = block * BLOCK_M + m
    is_base = place < gl.load(starts_ptr + 1)
    token = gl.load(order_ptr + place, mask=is_base, other=0)
    out_place = out_ptr + token.to(gl.int64)[:, None] * N + column + n[None, :]
    gl.store(out_place, nothing, mask=is_base[:, None] & inside)
    if rank == 0:
        token = gl.load(pairs_ptr + place, mask=m < left, other=0)
        out_place = out_ptr + token.to(gl.int64)[:, None] * N + column + n[None, :]
        gl.store(out_place, nothing, mask=(m < left)[:, None] & inside)


@gluon.jit
def _expand_tile(
    out_ptr, arena_ptr, pairs_ptr, partial_ptr, seen_place, block, at, index, half, column, row, width, left,
    offset, rank, num_a,
    ACCUMULATE: gl.constexpr, N: gl.constexpr, NUM_LAUNCH_SITES: gl.constexpr, ROWS: gl.constexpr,
    CHUNKS: gl.constexpr, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    RANK_P2: gl.constexpr, SPIN_LIMIT: gl.constexpr, WARPS: gl.constexpr, HELD: gl.constexpr,
    PDL: gl.constexpr, ON_GPU: gl.constexpr, VECTOR: gl.constexpr, WAITING_SUM: gl.constexpr,
    OPERANDS: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8]
    )
    H: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    WIDE: gl.constexpr = gl.BlockedLayout(
        [8, 1], [RANK_P2 // 8, 256 // RANK_P2], [1, WARPS], [0, 1]
    )  # 16 bytes a lane
    r = gl.arange(0, RANK_P2, layout=gl.SliceLayout(1, WIDE))
    b_n = at + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, WIDE))
    b_place = arena_ptr + offset + (row + b_n).to(gl.int64)[None, :] * rank + r[:, None]
    b = gl.load(b_place, mask=(b_n < width)[None, :] & (r < rank)[:, None], other=0.0)
    b = gl.convert_layout(b, B)
    n = at + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, ACC))
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ACC))
    token = gl.load(pairs_ptr + block * BLOCK_M + m, mask=m < left, other=0)
    out_place = out_ptr + token.to(gl.int64)[:, None] * N + column + n[None, :]
    mask = (m < left)[:, None] & (n < width)[None, :]
    if PDL:
        wait_for_grid()
    expected = (gl.load(seen_place) & 1) ^ 1
    if ACCUMULATE:
        before = gl.load(out_place, mask=mask, other=0.0)
    H_ROWS: gl.constexpr = CHUNKS * ROWS
    STRIDE: gl.constexpr = NUM_LAUNCH_SITES * BLOCK_M * H_ROWS
    part_ptr = partial_ptr + block.to(gl.int64) * (SPLITS * STRIDE) + index * (BLOCK_M * H_ROWS)
    part_ptr += gl.where(num_a == 2, half * rank, 0)
    if ON_GPU:
        h = wait_for_parts(
            part_ptr, expected, left, rank, H_ROWS, BLOCK_M, RANK_P2, HELD, VECTOR, WAITING_SUM, OPERANDS
        )
    else:
        h = sum_parts(
            part_ptr, expected, left, rank, H_ROWS, STRIDE, SPLITS, BLOCK_M, RANK_P2, SPIN_LIMIT, HELD
        )
    h = gl.convert_layout(h, H)
    dtype: gl.constexpr = arena_ptr.dtype.element_ty
    high = h.to(dtype)
    y = mma_v2(high, b, gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=ACC))
    y = mma_v2((h - high.to(gl.float32)).to(dtype), b, y)
    if ACCUMULATE:
        y = (before.to(gl.float32) + y).to(dtype)
    gl.store(out_place, y, mask=mask)
    gl.store(seen_place, expected)


@gluon.jit(do_not_specialize=["capacity", "site0", "site1", "site2", "num_sites"])
def _register_segments_kernel(
    out_ptr, x_ptr, arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, pairs_ptr, blocks_ptr,
    num_blocks_ptr, order_ptr, starts_ptr, partial_ptr, turn_ptr, seen_ptr, capacity, site0, site1, site2,
    num_sites, ACCUMULATE: gl.constexpr,
    K: gl.constexpr, N: gl.constexpr, SPANS: gl.constexpr, SLICE: gl.constexpr, LANES: gl.constexpr,
    NUM_LANES: gl.constexpr, TILES: gl.constexpr,
    NUM_LAUNCH_SITES: gl.constexpr, ROWS: gl.constexpr, CHUNKS: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    RANK_P2: gl.constexpr, SPIN_LIMIT: gl.constexpr, WARPS: gl.constexpr, VECTOR: gl.constexpr,
    PDL: gl.constexpr, ON_GPU: gl.constexpr, FETCH: gl.constexpr, WAITING_SUM: gl.constexpr,
    OPERANDS: gl.constexpr,
):  # fmt: skip
    if PDL:
        launch_next_grid()
    HELD: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR], [32 * VECTOR // RANK_P2, RANK_P2 // VECTOR], [WARPS, 1], [1, 0]
    )
    PARTS: gl.constexpr = NUM_LAUNCH_SITES * CHUNKS * SPLITS
    program = gl.program_id(0)
    # what has no weights goes at once: no word of it is written nor waited for, so that phases stay as they
    # are. One program stays until the launch before has ended, so that this one never ends first.
    if program < capacity * PARTS:
        split = program % SPLITS
        chunk = (program // SPLITS) % CHUNKS
        index = (program // (SPLITS * CHUNKS)) % NUM_LAUNCH_SITES
        block = program // PARTS
        left, slot = _find_block(blocks_ptr, num_blocks_ptr, block)
        offset, rank, num_a = _find_site(
            a_offset_ptr, rank_ptr, num_a_ptr, slot, index, site0, site1, site2, num_sites
        )
        if rank > 0:
            b_offset, _, _ = _find_site(
                b_offset_ptr, rank_ptr, num_a_ptr, slot, index, site0, site1, site2, num_sites
            )
            _shrink_part(
                out_ptr, x_ptr, arena_ptr, pairs_ptr, partial_ptr, turn_ptr, program, split, chunk, index,
                block, left, offset, rank, num_a, b_offset,
                K, N, SPANS, SLICE, NUM_LAUNCH_SITES, ROWS, CHUNKS, SPLITS, BLOCK_M, BLOCK_K, GROUPS, WARPS,
                VECTOR, PDL, FETCH,
            )  # fmt: skip
        elif PDL:
            if program == 0:
                wait_for_grid()
    else:
        tile = (program - capacity * PARTS) % TILES
        block = (program - capacity * PARTS) // TILES
        index, half, column, row, width, first = _find_lane(tile, LANES, NUM_LANES)
        left, slot = _find_block(blocks_ptr, num_blocks_ptr, block)
        offset, rank, num_a = _find_site(
            b_offset_ptr, rank_ptr, num_a_ptr, slot, index, site0, site1, site2, num_sites
        )
        if not ACCUMULATE:
            _store_no_delta(
                out_ptr, pairs_ptr, order_ptr, starts_ptr, block, (tile - first) * BLOCK_N, column, width,
                left, rank, N, BLOCK_M, BLOCK_N, WARPS,
            )  # fmt: skip
        if rank > 0:
            _expand_tile(
                out_ptr, arena_ptr, pairs_ptr, partial_ptr, seen_ptr + block * TILES + tile, block,
                (tile - first) * BLOCK_N, index, half, column, row, width, left, offset, rank, num_a,
                ACCUMULATE, N, NUM_LAUNCH_SITES, ROWS, CHUNKS, SPLITS, BLOCK_M, BLOCK_N, RANK_P2, SPIN_LIMIT,
                WARPS, HELD, PDL, ON_GPU, VECTOR, WAITING_SUM, OPERANDS,
            )  # fmt: skip


def _spans(lanes: tuple[PairLane, ...], num_sites: int) -> tuple[tuple[int, int], ...]:
    """(first column, columns) of each of the launch's sites; a site's lanes lie side by side."""
    of_sites = [[lane for lane in lanes if lane.site == site] for site in range(num_sites)]
    return tuple((min(lane.column for lane in of), sum(lane.width for lane in of)) for of in of_sites)


def register_segments(
    out: torch.Tensor,
    x: torch.Tensor,
    blocks: GroupBlocks,
    tables: LoraTables,
    sites: tuple[int, ...],
    lanes: tuple[PairLane, ...],
    tiles: RegisterTiles,
    workspace: LoraWorkspace,
    *,
    accumulate: bool = True,
) -> None:
    """Launch over the token blocks of one step; `out` [T, N] and `x` [T, K] have a row a token.

    With `accumulate` weights, tables and `blocks` are read ahead of the kernel that this launch depends on:
    they must be older than that one; `x` and `out` may be its results. Without, `out` is float32 and becomes
    the delta alone, NO_DELTA where there is none.
    """
    if blocks.capacity > MAX_SEGMENT_BLOCKS:
        raise ValueError(
            f"{blocks.capacity} blocks in one launch: at most {MAX_SEGMENT_BLOCKS}, more want two launches"
        )
    if x.element_size() != 2:
        raise ValueError(f"x {x.dtype}: only 16-bit dtypes meet the tensor cores here")
    num_sites = tables.rank.shape[1]
    in_features = x.shape[-1]
    num_columns = out.shape[-1]
    rank_p2 = max(16, triton.next_power_of_2(tables.max_rank))
    chunks = triton.cdiv(tables.max_rank * max(1 + (lane.half > 0) for lane in lanes), rank_p2)
    splits = triton.cdiv(in_features, tiles.block_k)
    warps = tiles.num_warps
    vector = max(1, min(4, blocks.block_m * rank_p2 // (32 * warps)))
    described, num_tiles = describe_lanes(lanes, tiles.block_n)
    spans = _spans(lanes, len(sites))
    words = len(sites) * chunks * blocks.block_m * rank_p2
    parts = len(sites) * chunks * splits
    key = ("register", *tiles.key, blocks.block_m, in_features, num_columns, words, num_tiles)
    partial = workspace.zeroed(("partial", *key), MAX_SEGMENT_BLOCKS * splits * words)
    turn = workspace.zeroed(("turn", *key), MAX_SEGMENT_BLOCKS * parts)
    seen = workspace.zeroed(("seen", *key), MAX_SEGMENT_BLOCKS * num_tiles)
    padded_sites = tables.padded_sites(sites)
    on_gpu = out.device.type == "cuda"
    pdl = accumulate and on_gpu
    _register_segments_kernel[(blocks.capacity * (parts + num_tiles),)](
        out, x, tables.arena, tables.a_offset, tables.b_offset, tables.rank, tables.num_a, blocks.pairs,
        blocks.blocks, blocks.num_blocks, blocks.order, blocks.starts, partial, turn, seen, blocks.capacity,
        *padded_sites, num_sites, ACCUMULATE=accumulate,
        K=in_features, N=num_columns, SPANS=spans,
        SLICE=8 * triton.cdiv(max(width for _, width in spans), 8 * splits), LANES=described,
        NUM_LANES=len(lanes), TILES=num_tiles, NUM_LAUNCH_SITES=len(sites), ROWS=rank_p2, CHUNKS=chunks,
        SPLITS=splits, BLOCK_M=blocks.block_m, BLOCK_K=tiles.block_k,
        GROUPS=max(warps, min(2 * warps, tiles.block_k // 64)), BLOCK_N=tiles.block_n, RANK_P2=rank_p2,
        SPIN_LIMIT=SPIN_LIMIT, WARPS=warps, VECTOR=vector, PDL=pdl,
        ON_GPU=on_gpu, FETCH=pdl and can_fetch(x) and can_fetch(out, lanes),
        WAITING_SUM=waiting_sum(splits, vector, words * 4),
        OPERANDS=",".join(["=f"] * vector + ["l"] * vector + ["r"] * 2 * vector),
        num_warps=warps, **({"launch_pdl": True} if pdl else {}),
        **({"maxnreg": tiles.num_registers} if tiles.num_registers else {}),
    )  # fmt: skip
