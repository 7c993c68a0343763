"""Latent attention of requests with one query: bound by the latents' bytes, with 128 heads by products.

One program: a request, a tile of its heads, one of `splits` parts of its latents. Each leaves (sum of p v,
largest score, sum of p), and a second launch merges them in order; with one split the program writes the
result. Parts follow the sequence's length, which is read on the device; their number is an argument, so that
one kernel serves every batch. Tiles say which of two kernels that is: the one here, over any latents, or that
of `latent_ring_kernels`, over the caches that `can_ring` names.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton takes no keyword in a nested call of many constants.
# ruff: noqa: FBT003

import torch
import triton
import triton.language as tl

from lorikeet_kernels.attention.latent_ring_kernels import ring_decode
from lorikeet_kernels.attention.latent_scan import BIG_NEGATIVE, LOG2E, load_queries, scan_latents
from lorikeet_kernels.tiling.latent_tiles import LatentDecodeTiles

# Parts at a time and columns of a program that merges: few programs wait for many parts at once.
FEW_PARTS, MANY_PARTS, COLUMNS_OF_MANY = 8, 64, 64


@triton.jit(
    do_not_specialize=["stride_table", "splits"],
    do_not_specialize_on_alignment=["stride_table", "splits"],
)
def _decode_kernel(
    out_ptr, parts_ptr, q_ptr, cache_ptr, starts_ptr, lens_ptr, tables_ptr,
    stride_qt, stride_block, stride_token, stride_table, splits, scale_log2,
    HEADS: tl.constexpr, ROWS: tl.constexpr, LATENT: tl.constexpr, LATENT_P2: tl.constexpr,
    ROPE: tl.constexpr, ROPE_P2: tl.constexpr, BLOCK_TOKENS: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HEAD_TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    # tiles of one request lie side by side: the second one finds the latents in the L2
    request = tl.program_id(0) // HEAD_TILES
    head = (tl.program_id(0) % HEAD_TILES) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    token = tl.load(starts_ptr + request)
    if tl.load(starts_ptr + request + 1) - token != 1:
        return
    length = tl.load(lens_ptr + request)
    num_tiles = tl.cdiv(length, BLOCK_N)
    begin = (num_tiles * split // splits) * BLOCK_N
    end = (num_tiles * (split + 1) // splits) * BLOCK_N
    is_row = head < HEADS
    q_at = q_ptr + token.to(tl.int64) * stride_qt + head * (LATENT + ROPE)
    q_latent, q_rope = load_queries(q_at, is_row, LATENT, LATENT_P2, ROPE, ROPE_P2)
    acc, largest, total = scan_latents(
        q_latent, q_rope, head, begin, end, length, cache_ptr,
        tables_ptr + request.to(tl.int64) * stride_table, stride_block, stride_token, scale_log2,
        ROWS, LATENT, LATENT_P2, ROPE, ROPE_P2, BLOCK_TOKENS, False, BLOCK_N, STAGES,
    )  # fmt: skip
    d = tl.arange(0, LATENT_P2)
    if IS_SPLIT:
        # a part: [heads, LATENT_P2] sums, then [heads] largest scores, then [heads] totals
        part = parts_ptr + (request * splits + split).to(tl.int64) * (HEADS * (LATENT_P2 + 2))
        tl.store(part + head[:, None] * LATENT_P2 + d[None, :], acc, mask=is_row[:, None])
        tl.store(part + HEADS * LATENT_P2 + head, largest, mask=is_row)
        tl.store(part + HEADS * (LATENT_P2 + 1) + head, total, mask=is_row)
    else:
        y = acc / tl.maximum(total, 1e-30)[:, None]  # a request without keys, which pads a batch, gives 0
        out_at = out_ptr + (token.to(tl.int64) * HEADS + head)[:, None] * LATENT + d[None, :]
        mask = is_row[:, None] & (d < LATENT)[None, :]
        tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["splits"])
def _merge_kernel(
    out_ptr, parts_ptr, starts_ptr, splits,
    HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_P2: tl.constexpr, MERGED: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(starts_ptr + request)
    is_decode = tl.load(starts_ptr + request + 1) - token == 1
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not is_decode:
        return
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    highest = BIG_NEGATIVE
    total = 0.0
    for first in range(0, splits, MERGED):
        split = first + tl.arange(0, MERGED)
        inside = split < splits
        part = parts_ptr + (request * splits + split).to(tl.int64) * (HEADS * (LATENT_P2 + 2))
        at = part[:, None] + head * LATENT_P2 + d[None, :]
        sums = tl.load(at, mask=inside[:, None], other=0.0)
        largest = tl.load(part + HEADS * LATENT_P2 + head, mask=inside, other=BIG_NEGATIVE)
        totals = tl.load(part + HEADS * (LATENT_P2 + 1) + head, mask=inside, other=0.0)
        now = tl.maximum(highest, tl.max(largest, axis=0))
        weight = tl.exp2(largest - now)
        shrink = tl.exp2(highest - now)
        total = total * shrink + tl.sum(totals * weight, axis=0)
        acc = acc * shrink + tl.sum(sums * weight[:, None], axis=0)
        highest = now
    y = acc / tl.maximum(total, 1e-30)
    out_at = out_ptr + (token.to(tl.int64) * HEADS + head) * LATENT + d
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=d < LATENT)


def kind_of_splits(splits: int) -> int:
    """The same for all numbers of splits that launch the same kernels: one that does."""
    return min(splits, 2) if splits <= FEW_PARTS else FEW_PARTS + 1


def latent_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    sequence_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tiles: LatentDecodeTiles,
) -> None:
    """Write the rows of `out` that belong to requests with exactly one query; leave the others alone."""
    num_requests = sequence_lens.shape[0]
    block_tokens, latent_dim, heads = cache.shape[1], out.shape[-1], q.shape[1]
    rope_dim = cache.shape[-1] - latent_dim
    latent_p2 = max(16, triton.next_power_of_2(latent_dim))
    parts = out
    if tiles.splits > 1:
        size = num_requests * tiles.splits * heads * (latent_p2 + 2)
        parts = torch.empty(size, dtype=torch.float32, device=q.device)
    pdl = q.device.type == "cuda"
    scale_log2 = scale * LOG2E.value
    if tiles.is_ring:
        ring_decode(
            q, cache, query_starts, sequence_lens, block_tables, scale_log2, out, parts,
            rows=tiles.rows, splits=tiles.splits, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages, num_key_stages=tiles.num_key_stages,
        )  # fmt: skip
    else:
        _decode_kernel[(num_requests * triton.cdiv(heads, tiles.rows), tiles.splits)](
            out, parts, q, cache, query_starts, sequence_lens, block_tables,
            q.stride(0), cache.stride(0), cache.stride(1), block_tables.stride(0), tiles.splits, scale_log2,
            HEADS=heads, ROWS=tiles.rows, LATENT=latent_dim, LATENT_P2=latent_p2, ROPE=rope_dim,
            ROPE_P2=max(16, triton.next_power_of_2(rope_dim)), BLOCK_TOKENS=block_tokens,
            IS_SPLIT=tiles.splits > 1, BLOCK_N=tiles.block_n, STAGES=tiles.num_stages, PDL=pdl,
            num_warps=tiles.num_warps,
        )  # fmt: skip
    if tiles.splits > 1:
        dependent = {"launch_pdl": True} if pdl else {}
        few = tiles.splits <= FEW_PARTS
        block_d = latent_p2 if few else min(latent_p2, COLUMNS_OF_MANY)
        _merge_kernel[(num_requests, heads, latent_p2 // block_d)](
            out, parts, query_starts, tiles.splits,
            HEADS=heads, LATENT=latent_dim, LATENT_P2=latent_p2, MERGED=FEW_PARTS if few else MANY_PARTS,
            BLOCK_D=block_d, PDL=pdl, num_warps=2 if few else 4, **dependent,
        )  # fmt: skip
