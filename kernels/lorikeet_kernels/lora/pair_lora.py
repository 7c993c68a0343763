"""LoRA at decode: shrink and expand of all pairs in one launch, without grouping.

    out[row, lane columns] += w * B[n, :] @ (A x),   a pair is one (token, expert)

A dense site has one expert. Programs come in two kinds, shrink first. A shrink program reads a tile of A
[ROWS, BLOCK_K] and stores its part of the rank vector; an expand program reads its tile of B and of out, then
waits for all parts of its pair and sums them in a fixed order, so results never depend on timing. The wait
costs no atomics and no fence: a part is a float32 whose last mantissa bit is the phase. A shrink program
flips the phase of its own words at every launch; an expand program keeps a word of its own with the phase it
saw last and takes a part once the phase differs. Programs start in order and shrink programs never wait, so
the wait always ends. Every word of every pair of the launch flips, also for pairs without an adapter. Rows of
such pairs keep their bits, or get NO_DELTA where the delta alone is stored.

A dense site's launch may start while the launch before it still runs (PDL): it reads weights and tables ahead
and waits before it touches what that launch may write. Routed ids may come from a launch just before, so a
MoE's does not. Every launch lets the one after start ahead of its own end: an expert GEMM fetches weights.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.no_delta import no_delta
from lorikeet_kernels.lora.output_lanes import PairLane, describe_lanes
from lorikeet_kernels.lora.site_lookup import find_lane, find_site
from lorikeet_kernels.tiling import PairTiles

MAX_PAIRS = 4096
SPIN_LIMIT = 1 << 22  # seconds: beyond it a part was lost, and NaN says so


@triton.jit
def shrink_part(
    x_ptr, arena_ptr, a_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr, topk_ids_ptr, partial_ptr,
    program, site0, site1, site2, num_sites, num_slots,
    K: tl.constexpr, TOP_K: tl.constexpr, X_DIV: tl.constexpr, HAS_EXPERTS: tl.constexpr,
    NUM_LAUNCH_SITES: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr, SLOT_SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What a shrink program does: see this module's docstring."""
    H_ROWS: tl.constexpr = NUM_LAUNCH_SITES * CHUNKS * ROWS
    split = program % SPLITS
    chunk = (program // SPLITS) % CHUNKS
    index = (program // (SPLITS * CHUNKS)) % NUM_LAUNCH_SITES
    pair = program // (SPLITS * CHUNKS * NUM_LAUNCH_SITES)
    slot = tl.load(token_slot_ptr + pair // TOP_K)
    site = tl.where(index == 0, site0, tl.where(index == 1, site1, site2))
    offset, rank, num_a = find_site(
        a_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, SLOT_SCAN
    )
    row = chunk * ROWS + tl.arange(0, ROWS)
    part_ptr = partial_ptr + (pair * SPLITS + split).to(tl.int64) * H_ROWS + index * (CHUNKS * ROWS) + row
    total_rows = rank * num_a
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    x_row = x_ptr + (pair // X_DIV).to(tl.int64) * K
    if HAS_EXPERTS:
        expert = tl.load(topk_ids_ptr + pair).to(tl.int64)
        offset += tl.multiple_of(expert * total_rows * K, 8)
    live = chunk * ROWS < total_rows
    a_row = arena_ptr + offset + row.to(tl.int64)[:, None] * K
    a_mask = (row < total_rows)[:, None] & live
    if K % BLOCK_K == 0:
        a = tl.load(a_row + k[None, :], mask=a_mask, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_row + k)
    else:
        a = tl.load(a_row + k[None, :], mask=a_mask & (k < K)[None, :], other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_row + k, mask=k < K, other=0.0)
    part = tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    phase = (tl.load(part_ptr) & 1) ^ 1
    tl.store(part_ptr, (part.to(tl.int32, bitcast=True) & -2) | phase)


@triton.jit
def _sum_parts(part_ptr, expected, SPLITS: tl.constexpr, H_ROWS: tl.constexpr, RANK_P2: tl.constexpr,
               num_rows, SPIN_LIMIT: tl.constexpr):  # fmt: skip
    """Sum the splits' words, in order, once all of them carry the phase."""
    r = tl.arange(0, RANK_P2)
    wanted = r < num_rows
    late = 1
    spins = 0
    h = tl.zeros([RANK_P2], tl.float32)
    while (late != 0) & (spins < SPIN_LIMIT):
        h = tl.zeros([RANK_P2], tl.float32)
        differing = tl.zeros([RANK_P2], tl.int32)
        for split in tl.static_range(SPLITS):
            # one word a lane: below 128 elements the compiler keeps no layout of its own for the load, and
            # the tile of B stays in the registers it was loaded into (measured: else it moves through shared
            # memory)
            words = tl.load(part_ptr + split * H_ROWS + r, mask=wanted, other=0, volatile=True)
            h += (words & -2).to(tl.float32, bitcast=True)  # without the phase: runs agree bit for bit
            differing |= words ^ expected
        late = tl.max(tl.where(wanted, differing & 1, 0))
        spins += 1
    return tl.where(late == 0, h, float("nan"))


@triton.jit
def _sum_products(b, h):
    """B [N, R] times h [R]: two products at a time, of which the first is rounded.

    Left to itself the compiler fuses either of the first two into their sum, now this one and now that, and
    the bits would depend on what else a program holds. (Products of 16-bit numbers are exact.)
    """
    even, odd = tl.split(tl.reshape(b, [b.shape[0], b.shape[1] // 2, 2]))
    even_h, odd_h = tl.split(tl.reshape(h, [h.shape[0] // 2, 2]))
    products = tl.fma(odd.to(tl.float32), odd_h[None, :], even.to(tl.float32) * even_h[None, :])
    return tl.sum(products, axis=1)


@triton.jit
def expand_tile(
    out_ptr, arena_ptr, b_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr, topk_ids_ptr, weight_ptr,
    partial_ptr, seen_ptr, program, site0, site1, site2, num_sites, num_slots,
    N: tl.constexpr, TOP_K: tl.constexpr, HAS_EXPERTS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    INTERLEAVED: tl.constexpr, ACCUMULATE: tl.constexpr,
    LANES: tl.constexpr, NUM_LANES: tl.constexpr, TILES: tl.constexpr,
    NUM_LAUNCH_SITES: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, RANK_P2: tl.constexpr, SLOT_SCAN: tl.constexpr,
    SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What an expand program does."""
    H_ROWS: tl.constexpr = NUM_LAUNCH_SITES * CHUNKS * ROWS
    tile = program % TILES
    pair = program // TILES
    index, half, column, row, width, first, site_rows = find_lane(tile, LANES, NUM_LANES)
    slot = tl.load(token_slot_ptr + pair // TOP_K)
    site = tl.where(index == 0, site0, tl.where(index == 1, site1, site2))
    offset, rank, num_a = find_site(
        b_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, SLOT_SCAN
    )
    n = (tile - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK_P2)
    out_place = out_ptr + pair.to(tl.int64) * N + column + n
    seen_place = seen_ptr + pair * TILES + tile
    if not PDL:
        expected = (tl.load(seen_place) & 1) ^ 1
        if rank == 0:
            tl.store(seen_place, expected)
            if not ACCUMULATE:
                tl.store(out_place, no_delta(out_place).to(out_ptr.dtype.element_ty), mask=n < width)
            return
    if HAS_EXPERTS:
        expert = tl.load(topk_ids_ptr + pair).to(tl.int64)
        offset += tl.multiple_of(expert * (site_rows * rank), 8)
    b_row = arena_ptr + offset + (row + n).to(tl.int64)[:, None] * rank
    b = tl.load(b_row + r[None, :], mask=(n < width)[:, None] & (r < rank)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        expected = (tl.load(seen_place) & 1) ^ 1
        if rank == 0:
            tl.store(seen_place, expected)
            if not ACCUMULATE:
                tl.store(out_place, no_delta(out_place).to(out_ptr.dtype.element_ty), mask=n < width)
            return
    if ACCUMULATE:
        before = tl.load(out_place, mask=n < width, other=0.0)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + pair)
    part_ptr = partial_ptr + (pair * SPLITS).to(tl.int64) * H_ROWS + index * (CHUNKS * ROWS)
    shift = tl.where(num_a == 2, half * rank, 0)
    h = _sum_parts(part_ptr + shift, expected, SPLITS, H_ROWS, RANK_P2, rank, SPIN_LIMIT)
    y = _sum_products(b, h)
    if INTERLEAVED:
        if num_a == 2:
            h1 = _sum_parts(part_ptr + rank, expected, SPLITS, H_ROWS, RANK_P2, rank, SPIN_LIMIT)
            y = tl.where(n % 2 == 1, _sum_products(b, h1), y)
    if HAS_WEIGHT:
        y = y * weight
    if ACCUMULATE:
        y = before.to(tl.float32) + y
    tl.store(out_place, y.to(out_ptr.dtype.element_ty), mask=n < width)
    tl.store(seen_place, expected)


@triton.jit(do_not_specialize=["num_pairs", "site0", "site1", "site2", "num_sites", "num_slots"])
def _pair_lora_kernel(
    out_ptr, x_ptr, arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr, topk_ids_ptr,
    weight_ptr, partial_ptr, seen_ptr, num_pairs, site0, site1, site2, num_sites, num_slots,
    K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, X_DIV: tl.constexpr, HAS_EXPERTS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, INTERLEAVED: tl.constexpr, ACCUMULATE: tl.constexpr,
    LANES: tl.constexpr, NUM_LANES: tl.constexpr, TILES: tl.constexpr, NUM_LAUNCH_SITES: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, RANK_P2: tl.constexpr, SLOT_SCAN: tl.constexpr,
    SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr, SIGNALS: tl.constexpr,
):  # fmt: skip
    # A launch behind this one may read the routing, or blocks cut from it, without a wait, as expert GEMMs do
    # with `weights_first`: this one must begin after those are complete, which with PDL it would not.
    tl.static_assert(not (PDL and HAS_EXPERTS))
    if SIGNALS:
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: tl.constexpr = NUM_LAUNCH_SITES * CHUNKS * SPLITS
    program = tl.program_id(0)
    num_parts = num_pairs * PARTS
    if program < num_parts:
        shrink_part(
            x_ptr, arena_ptr, a_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr, topk_ids_ptr, partial_ptr,
            program, site0, site1, site2, num_sites, num_slots,
            K, TOP_K, X_DIV, HAS_EXPERTS, NUM_LAUNCH_SITES, ROWS, CHUNKS, SPLITS, BLOCK_K, SLOT_SCAN,
            PDL,
        )  # fmt: skip
    else:
        expand_tile(
            out_ptr, arena_ptr, b_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr, topk_ids_ptr, weight_ptr,
            partial_ptr, seen_ptr, program - num_parts, site0, site1, site2, num_sites, num_slots,
            N, TOP_K, HAS_EXPERTS, HAS_WEIGHT, INTERLEAVED, ACCUMULATE, LANES, NUM_LANES, TILES,
            NUM_LAUNCH_SITES, ROWS, CHUNKS, SPLITS, BLOCK_N, RANK_P2, SLOT_SCAN, SPIN_LIMIT, PDL,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PairPlan:
    """What the launches over pairs of one shape share: sizes to compile for, and their scratch memory."""

    constants: dict[str, Any]
    programs_a_pair: int
    num_warps: int
    partial: torch.Tensor
    seen: torch.Tensor


def plan_pairs(
    num_pairs: int,
    in_features: int,
    num_columns: int,
    tables: LoraTables,
    sites: tuple[int, ...],
    lanes: tuple[PairLane, ...],
    tiles: PairTiles,
    workspace: LoraWorkspace,
    *,
    interleaved: bool = False,
) -> PairPlan:
    """The plan for so many rows, of so many inputs and outputs.

    Raises:
        ValueError: they are more than the scratch memory is for.
    """
    if num_pairs > MAX_PAIRS:
        raise ValueError(f"{num_pairs} pairs in one decode launch: at most {MAX_PAIRS}, group larger batches")
    num_slots = tables.rank.shape[0]
    max_rows = tables.max_rank * max(1 + (lane.half > 0) for lane in lanes)
    if interleaved:
        max_rows = tables.max_rank * 2
    rows = min(tiles.rows, triton.next_power_of_2(max_rows))
    chunks = triton.cdiv(max_rows, rows)
    splits = triton.cdiv(in_features, tiles.block_k)
    rank_p2 = max(16, triton.next_power_of_2(tables.max_rank))
    # Lanes that hold a copy of another lane's word may read it at another moment. Up to 32 ranks each warp
    # holds, and checks, all words by itself; beyond, a warp more than the words need would add copies that
    # nobody checks.
    num_warps = tiles.num_warps if rank_p2 <= 32 else min(tiles.num_warps, rank_p2 // 32)
    described, first = describe_lanes(lanes, tiles.block_n)
    h_rows = len(sites) * chunks * rows
    key = ("pair", *tiles.key, in_features, num_columns, h_rows, first)
    constants = {
        "K": in_features,
        "N": num_columns,
        "LANES": described,
        "NUM_LANES": len(lanes),
        "TILES": first,
        "NUM_LAUNCH_SITES": len(sites),
        "ROWS": rows,
        "CHUNKS": chunks,
        "SPLITS": splits,
        "BLOCK_K": tiles.block_k,
        "BLOCK_N": tiles.block_n,
        "RANK_P2": rank_p2,
        "SLOT_SCAN": triton.next_power_of_2(num_slots) if tiles.slot_scan and num_slots <= 32 else 0,
        "SPIN_LIMIT": SPIN_LIMIT,
    }
    return PairPlan(
        constants,
        len(sites) * chunks * splits + first,
        num_warps,
        workspace.zeroed(("partial", *key), MAX_PAIRS * splits * h_rows),
        workspace.zeroed(("seen", *key), MAX_PAIRS * first),
    )


def check_routed(topk_ids: torch.Tensor, topk_weights: torch.Tensor | None = None) -> None:
    """Raise ValueError unless kernels can read experts' ids [T, K] and weights as these."""
    if topk_ids.dtype != torch.int32 or topk_ids.dim() != 2 or not topk_ids.is_contiguous():
        raise ValueError(
            f"topk_ids is {topk_ids.dtype} {tuple(topk_ids.shape)}, strides {topk_ids.stride()}: pass "
            "contiguous int32 [T, K]"
        )
    if topk_weights is not None and (
        topk_weights.dtype != torch.float32
        or topk_weights.shape != topk_ids.shape
        or not topk_weights.is_contiguous()
    ):
        raise ValueError(
            f"topk_weights is {topk_weights.dtype} {tuple(topk_weights.shape)}, strides "
            f"{topk_weights.stride()}: pass contiguous float32, shaped as topk_ids {tuple(topk_ids.shape)}"
        )


def pair_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    token_slot: torch.Tensor,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    tables: LoraTables,
    sites: tuple[int, ...],
    lanes: tuple[PairLane, ...],
    tiles: PairTiles,
    workspace: LoraWorkspace,
    *,
    x_per_pair: bool = False,
    interleaved: bool = False,
    accumulate: bool = True,
) -> None:
    """Launch over all pairs of `topk_ids` [T, K] (None: one pair a token).

    `x` has a row a token, or with `x_per_pair` a row a pair; `out` a row a pair. With `accumulate` False the
    delta is stored instead of added, NO_DELTA for rows without an adapter, in out's dtype, for a base GEMM
    that runs at the same time; then nothing is read ahead of the launch before.
    """
    top_k = 1 if topk_ids is None else topk_ids.shape[1]
    num_pairs = token_slot.shape[0] * top_k
    num_slots, num_sites = tables.rank.shape
    padded_sites = tables.padded_sites(sites)
    plan = plan_pairs(
        num_pairs, x.shape[-1], out.shape[-1], tables, sites, lanes, tiles, workspace, interleaved=interleaved
    )
    programs = num_pairs * plan.programs_a_pair
    on_gpu = out.device.type == "cuda"
    pdl = topk_ids is None and accumulate and on_gpu
    _pair_lora_kernel[(programs,)](
        out, x, tables.arena, tables.a_offset, tables.b_offset, tables.rank, tables.num_a, token_slot,
        token_slot if topk_ids is None else topk_ids,
        out if topk_weights is None else topk_weights,
        plan.partial, plan.seen, num_pairs, *padded_sites, num_sites, num_slots,
        TOP_K=top_k, X_DIV=1 if x_per_pair else top_k,
        HAS_EXPERTS=topk_ids is not None, HAS_WEIGHT=topk_weights is not None, INTERLEAVED=interleaved,
        ACCUMULATE=accumulate, **plan.constants, PDL=pdl, SIGNALS=on_gpu, num_warps=plan.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
