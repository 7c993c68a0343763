"""Attention of requests with one query over the paged cache: bound by the keys' and values' bytes.

One program: a request, a key head, one of `splits` parts of the visible keys. All query heads of the key head
share its loads. With several splits each leaves (sum of p v, largest score, sum of p), and a second launch
merges them in order; the parts follow the sequence's length, read on the device.

An FP8 cache is widened to q's dtype in registers and has half the bytes: of gpt-oss-20b, 32 requests of 2,048
keys are 134 MB a layer in bfloat16, which take 31 us at 4.3 TB/s, and 67 MB and 16 us in FP8.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.attention.kv_scales import KvScales
from lorikeet_kernels.tiling.attention_tiles import DecodeTiles

MIN_ROWS = 16  # of a tl.dot
LOG2E = tl.constexpr(1.4426950408889634)
BIG_NEGATIVE = tl.constexpr(-1.0e30)  # instead of -inf, whose difference with itself is NaN


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that a query at `position` sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["stride_table"])
def _decode_kernel(
    out_ptr, parts_ptr, q_ptr, key_ptr, value_ptr, starts_ptr, lens_ptr, tables_ptr, sinks_ptr,
    key_scales_ptr, value_scales_ptr, stride_qt, stride_kb, stride_kt, stride_vb, stride_vt, stride_table,
    scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_P2: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_DIM_P2: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # split is slowest, so that long sequences' last parts do not all start last
    head = tl.program_id(0) % KV_HEADS
    request = tl.program_id(0) // KV_HEADS
    split = tl.program_id(1)
    token = tl.load(starts_ptr + request)
    if tl.load(starts_ptr + request + 1) - token != 1:
        return
    length = tl.load(lens_ptr + request)
    first = first_visible(length - 1, WINDOW, CHUNK)
    # whole tiles a split, so that only the first and the last tile of the sequence need masks
    tile_begin = first // BLOCK_N
    num_tiles = tl.cdiv(length, BLOCK_N) - tile_begin
    begin = (tile_begin + num_tiles * split // SPLITS) * BLOCK_N
    end = (tile_begin + num_tiles * (split + 1) // SPLITS) * BLOCK_N

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_P2)
    value_dim = tl.arange(0, VALUE_DIM_P2)
    q_at = q_ptr + token.to(tl.int64) * stride_qt + (head * GROUP + row)[:, None] * DIM + dim[None, :]
    q = tl.load(q_at, mask=(row < GROUP)[:, None] & (dim < DIM)[None, :], other=0.0)
    if HAS_SCALES:
        scale_log2 *= tl.load(key_scales_ptr + head)
    table = tables_ptr + request.to(tl.int64) * stride_table
    key_head = key_ptr + head * DIM
    value_head = value_ptr + head * VALUE_DIM
    acc = tl.zeros([ROWS, VALUE_DIM_P2], tl.float32)
    largest = tl.full([ROWS], BIG_NEGATIVE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n >= first) & (n < length)  # blocks of keys that nobody sees may belong to others by now
        block = tl.load(table + n // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
        place = n % BLOCK_TOKENS
        key_at = key_head + block * stride_kb + place * stride_kt
        value_at = value_head + block * stride_vb + place * stride_vt
        key_mask = inside[None, :]
        value_mask = inside[:, None]
        if DIM != DIM_P2:
            key_mask = key_mask & (dim < DIM)[:, None]
        if VALUE_DIM != VALUE_DIM_P2:
            value_mask = value_mask & (value_dim < VALUE_DIM)[None, :]
        k = tl.load(key_at[None, :] + dim[:, None], mask=key_mask, other=0.0).to(q.dtype)
        v = tl.load(value_at[:, None] + value_dim[None, :], mask=value_mask, other=0.0).to(q.dtype)
        score = tl.dot(q, k, input_precision="ieee") * scale_log2
        score = tl.where(inside[None, :], score, BIG_NEGATIVE)
        highest = tl.maximum(largest, tl.max(score, axis=1))
        p = tl.exp2(score - highest[:, None])
        shrink = tl.exp2(largest - highest)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        largest = highest

    if HAS_SCALES:
        acc *= tl.load(value_scales_ptr + head)
    is_row = row < GROUP
    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head * GROUP + row, mask=is_row, other=0.0).to(tl.float32)
            sink = sink * LOG2E
            highest = tl.maximum(largest, sink)
            total = total * tl.exp2(largest - highest) + tl.exp2(sink - highest)
            acc = acc * tl.exp2(largest - highest)[:, None]
        y = acc / tl.maximum(total, 1e-30)[:, None]  # a request without keys, which pads a batch, gives 0
        out_at = out_ptr + (token.to(tl.int64) * KV_HEADS + head) * (GROUP * VALUE_DIM)
        out_at += row[:, None] * VALUE_DIM
        tl.store(
            out_at + value_dim[None, :], y.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :],
        )  # fmt: skip
    else:
        # a part: [heads, VALUE_DIM_P2] sums, then [heads] largest scores, then [heads] totals
        heads: tl.constexpr = KV_HEADS * GROUP
        part = parts_ptr + (request * SPLITS + split).to(tl.int64) * (heads * (VALUE_DIM_P2 + 2))
        place = head * GROUP + row
        tl.store(part + place[:, None] * VALUE_DIM_P2 + value_dim[None, :], acc, mask=is_row[:, None])
        tl.store(part + heads * VALUE_DIM_P2 + place, largest, mask=is_row)
        tl.store(part + heads * (VALUE_DIM_P2 + 1) + place, total, mask=is_row)


@triton.jit
def _merge_kernel(
    out_ptr, parts_ptr, starts_ptr, sinks_ptr,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIM_P2: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(starts_ptr + request)
    is_decode = tl.load(starts_ptr + request + 1) - token == 1
    sink = BIG_NEGATIVE
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not is_decode:
        return
    split = tl.arange(0, SPLITS_P2)
    dim = tl.arange(0, VALUE_DIM_P2)
    part = parts_ptr + (request * SPLITS + split).to(tl.int64) * (HEADS * (VALUE_DIM_P2 + 2))
    inside = split < SPLITS
    sums = tl.load(part[:, None] + head * VALUE_DIM_P2 + dim[None, :], mask=inside[:, None], other=0.0)
    largest = tl.load(part + HEADS * VALUE_DIM_P2 + head, mask=inside, other=BIG_NEGATIVE)
    totals = tl.load(part + HEADS * (VALUE_DIM_P2 + 1) + head, mask=inside, other=0.0)
    highest = tl.maximum(tl.max(largest, axis=0), sink)
    weight = tl.exp2(largest - highest)
    total = tl.sum(totals * weight, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - highest)
    y = tl.sum(sums * weight[:, None], axis=0) / tl.maximum(total, 1e-30)
    out_at = out_ptr + (token.to(tl.int64) * HEADS + head) * VALUE_DIM + dim
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=dim < VALUE_DIM)


def paged_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: torch.Tensor,
    sequence_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tiles: DecodeTiles,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    scales: KvScales | None = None,
) -> None:
    """Write the rows of `out` that belong to requests with exactly one query; leave the others alone."""
    num_requests = sequence_lens.shape[0]
    _, block_tokens, kv_heads, dim = key_cache.shape
    value_dim = value_cache.shape[-1]
    heads = q.shape[1]
    value_dim_p2 = max(16, triton.next_power_of_2(value_dim))
    parts = out
    if tiles.splits > 1:
        size = num_requests * tiles.splits * heads * (value_dim_p2 + 2)
        parts = torch.empty(size, dtype=torch.float32, device=q.device)
    pdl = q.device.type == "cuda"
    _decode_kernel[(num_requests * kv_heads, tiles.splits)](
        out, parts, q, key_cache, value_cache, query_starts, sequence_lens, block_tables,
        q if sinks is None else sinks, q if scales is None else scales.keys,
        q if scales is None else scales.values,
        q.stride(0), key_cache.stride(0), key_cache.stride(1), value_cache.stride(0), value_cache.stride(1),
        block_tables.stride(0), scale * LOG2E.value,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(heads // kv_heads)), DIM=dim,
        DIM_P2=max(16, triton.next_power_of_2(dim)), VALUE_DIM=value_dim, VALUE_DIM_P2=value_dim_p2,
        BLOCK_TOKENS=block_tokens, WINDOW=window or 0, CHUNK=chunk or 0, HAS_SINKS=sinks is not None,
        HAS_SCALES=scales is not None, SPLITS=tiles.splits, BLOCK_N=tiles.block_n, STAGES=tiles.num_stages,
        PDL=pdl, num_warps=tiles.num_warps,
    )  # fmt: skip
    if tiles.splits > 1:
        dependent = {"launch_pdl": True} if pdl else {}
        _merge_kernel[(num_requests, heads)](
            out, parts, query_starts, q if sinks is None else sinks,
            HEADS=heads, VALUE_DIM=value_dim, VALUE_DIM_P2=value_dim_p2, HAS_SINKS=sinks is not None,
            SPLITS=tiles.splits, SPLITS_P2=triton.next_power_of_2(tiles.splits), PDL=pdl, num_warps=1,
            **dependent,
        )  # fmt: skip
