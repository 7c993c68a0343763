"""Attention of requests with several queries over the paged cache: bound by the tensor cores.

One program: BLOCK_Q tokens of one request with all query heads of one key head, so that keys and values are
loaded once for a group. Which request a program serves is searched in `query_starts` on the device: program i
serves request b where query_starts[b] // BLOCK_Q + b <= i, and any batch needs at most T // BLOCK_Q + B.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton takes no keyword in a nested call of many constants, and its branches on constants are statements.
# ruff: noqa: FBT003, SIM108

import torch
import triton
import triton.language as tl

from lorikeet_kernels.attention.kv_scales import KvScales
from lorikeet_kernels.attention.paged_decode import LOG2E, first_visible
from lorikeet_kernels.tiling.attention_tiles import PrefillTiles

BIG_NEGATIVE = tl.constexpr(-1.0e30)  # before the first visible key; -inf minus itself would be NaN

SMALLEST_SCALE = tl.constexpr(1.0e-30)


@triton.jit
def _attend(
    acc, largest, total, q, begin, end, key_head, value_head, table, position, lower, length,
    stride_kb, stride_kt, stride_vb, stride_vt, scale_log2,
    DIM: tl.constexpr, DIM_P2: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIM_P2: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, end), whole tiles; without MASKED every query sees all of them."""
    dim = tl.arange(0, DIM_P2)
    value_dim = tl.arange(0, VALUE_DIM_P2)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n >= lower) & (n < length)
        if MASKED:
            block = tl.load(table + n // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table + n // BLOCK_TOKENS).to(tl.int64)
        place = n % BLOCK_TOKENS
        key_at = (key_head + block * stride_kb + place * stride_kt)[None, :] + dim[:, None]
        value_at = (value_head + block * stride_vb + place * stride_vt)[:, None] + value_dim[None, :]
        if MASKED:
            k = tl.load(key_at, mask=inside[None, :] & (dim < DIM)[:, None], other=0.0)
            v = tl.load(value_at, mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0)
        else:
            if DIM == DIM_P2:
                k = tl.load(key_at)
            else:
                k = tl.load(key_at, mask=(dim < DIM)[:, None], other=0.0)
            if VALUE_DIM == VALUE_DIM_P2:
                v = tl.load(value_at)
            else:
                v = tl.load(value_at, mask=(value_dim < VALUE_DIM)[None, :], other=0.0)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        score = tl.dot(q, k, input_precision="ieee")
        if MASKED:
            visible = n[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (n[None, :] > position[:, None] - WINDOW)
            if CHUNK > 0:
                visible = visible & (n[None, :] >= (position // CHUNK * CHUNK)[:, None])
            # -inf, since the product below is fused with the subtraction: where a row sees nothing of the
            # tile, a finite stand-in would leave the product's rounding error, and 2 to its power be infinite
            score = tl.where(visible, score, float("-inf"))
        highest = tl.maximum(largest, tl.max(score, axis=1) * scale_log2)
        p = tl.exp2(score * scale_log2 - highest[:, None])
        shrink = tl.exp2(largest - highest)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        largest = highest
    return acc, largest, total


@triton.jit(
    do_not_specialize=["num_requests", "stride_table"],
    do_not_specialize_on_alignment=["num_requests", "stride_table"],
)
def _prefill_kernel(
    out_ptr, q_ptr, key_ptr, value_ptr, starts_ptr, lens_ptr, tables_ptr, sinks_ptr, key_scales_ptr,
    value_scales_ptr, num_requests, stride_qt, stride_kb, stride_kt, stride_vb, stride_vt, stride_table,
    scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P2: tl.constexpr, DIM: tl.constexpr,
    DIM_P2: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIM_P2: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MIN_QUERIES: tl.constexpr,
):  # fmt: skip
    # later tiles see more keys: they go first, so that the short ones fill the end
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0)
    low = 0
    high = num_requests
    while high - low > 1:  # the last request whose first tile is not beyond this one
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    request = low
    q_begin = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - q_begin
    first_query = (tile - (q_begin // BLOCK_Q + request)) * BLOCK_Q
    if (first_query >= num_queries) | (num_queries < MIN_QUERIES):
        return
    length = tl.load(lens_ptr + request)
    row = tl.arange(0, BLOCK_Q * GROUP_P2)
    query = first_query + row // GROUP_P2
    member = row % GROUP_P2
    is_row = (query < num_queries) & (member < GROUP)
    position = length - num_queries + query
    dim = tl.arange(0, DIM_P2)
    value_dim = tl.arange(0, VALUE_DIM_P2)
    token = (q_begin + query).to(tl.int64)
    q_at = q_ptr + (token * stride_qt + (head * GROUP + member) * DIM)[:, None] + dim[None, :]
    q = tl.load(q_at, mask=is_row[:, None] & (dim < DIM)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_Q * GROUP_P2, VALUE_DIM_P2], tl.float32)
    largest = tl.full([BLOCK_Q * GROUP_P2], BIG_NEGATIVE, tl.float32)
    total = tl.zeros([BLOCK_Q * GROUP_P2], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head * GROUP + member, mask=member < GROUP, other=0.0).to(tl.float32)
        # a sink may be -inf, or become so by the factor: it is no start for what follows, as above
        largest = tl.maximum(sink * LOG2E, BIG_NEGATIVE)
        total += tl.exp2(sink * LOG2E - largest)

    if HAS_SCALES:
        # never 0, whose product with a hidden score's -inf is NaN; scores vanish as they do by a 0
        scale_log2 = tl.maximum(scale_log2 * tl.load(key_scales_ptr + head), SMALLEST_SCALE)
    first_position = length - num_queries + first_query
    last_position = tl.minimum(first_position + BLOCK_Q, length) - 1
    # blocks of keys that nobody sees may belong to others by now
    lower = first_visible(first_position, WINDOW, CHUNK)
    begin = lower // BLOCK_N * BLOCK_N
    free_begin = tl.cdiv(first_visible(last_position, WINDOW, CHUNK), BLOCK_N) * BLOCK_N
    end = tl.cdiv(last_position + 1, BLOCK_N) * BLOCK_N
    # tiles from free_begin to free_end are visible to all queries
    free_end = (first_position + 1) // BLOCK_N * BLOCK_N
    free_begin = tl.minimum(free_begin, end)
    free_end = tl.maximum(free_end, free_begin)
    table = tables_ptr + request.to(tl.int64) * stride_table
    key_head = key_ptr + head * DIM
    value_head = value_ptr + head * VALUE_DIM
    if WINDOW > 0 or CHUNK > 0:
        acc, largest, total = _attend(
            acc, largest, total, q, begin, free_begin, key_head, value_head, table, position, lower, length,
            stride_kb, stride_kt, stride_vb, stride_vt, scale_log2,
            DIM, DIM_P2, VALUE_DIM, VALUE_DIM_P2, BLOCK_TOKENS, WINDOW, CHUNK, BLOCK_N, STAGES, True,
        )  # fmt: skip
    acc, largest, total = _attend(
        acc, largest, total, q, free_begin, free_end, key_head, value_head, table, position, lower, length,
        stride_kb, stride_kt, stride_vb, stride_vt, scale_log2,
        DIM, DIM_P2, VALUE_DIM, VALUE_DIM_P2, BLOCK_TOKENS, WINDOW, CHUNK, BLOCK_N, STAGES, False,
    )  # fmt: skip
    acc, largest, total = _attend(
        acc, largest, total, q, free_end, end, key_head, value_head, table, position, lower, length,
        stride_kb, stride_kt, stride_vb, stride_vt, scale_log2,
        DIM, DIM_P2, VALUE_DIM, VALUE_DIM_P2, BLOCK_TOKENS, WINDOW, CHUNK, BLOCK_N, STAGES, True,
    )  # fmt: skip
    if HAS_SCALES:
        acc *= tl.load(value_scales_ptr + head)
    y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_at = out_ptr + ((token * KV_HEADS + head) * GROUP + member)[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(out_at, y, mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :])


def paged_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: torch.Tensor,
    sequence_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tiles: PrefillTiles,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    scales: KvScales | None = None,
    min_queries: int = 1,
) -> None:
    """Write the rows of `out` that belong to requests with at least `min_queries`; leave the others alone."""
    num_requests = sequence_lens.shape[0]
    _, block_tokens, kv_heads, dim = key_cache.shape
    value_dim = value_cache.shape[-1]
    group = q.shape[1] // kv_heads
    group_p2 = triton.next_power_of_2(group)
    block_q = max(1, tiles.block_m // group_p2)
    limited = {} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}
    _prefill_kernel[(kv_heads, q.shape[0] // block_q + num_requests)](
        out, q, key_cache, value_cache, query_starts, sequence_lens, block_tables,
        q if sinks is None else sinks, q if scales is None else scales.keys,
        q if scales is None else scales.values, num_requests,
        q.stride(0), key_cache.stride(0), key_cache.stride(1), value_cache.stride(0), value_cache.stride(1),
        block_tables.stride(0), scale * LOG2E.value,
        KV_HEADS=kv_heads, GROUP=group, GROUP_P2=group_p2, DIM=dim,
        DIM_P2=max(16, triton.next_power_of_2(dim)),
        VALUE_DIM=value_dim, VALUE_DIM_P2=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_TOKENS=block_tokens, WINDOW=window or 0, CHUNK=chunk or 0, HAS_SINKS=sinks is not None,
        HAS_SCALES=scales is not None, BLOCK_Q=block_q, BLOCK_N=tiles.block_n, STAGES=tiles.num_stages,
        MIN_QUERIES=min_queries, num_warps=tiles.num_warps, **limited,
    )  # fmt: skip
