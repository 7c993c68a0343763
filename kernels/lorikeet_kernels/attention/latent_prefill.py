"""Latent attention of requests with several queries, over cached latents: bound by the tensor cores.

One program: BLOCK_Q queries of one request with a tile of their heads, 64 rows in all. Which request a
program serves is searched in `query_starts` on the device: program i serves request b where
query_starts[b] // BLOCK_Q + b <= i, and any batch needs at most T // BLOCK_Q + B.
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

from lorikeet_kernels.attention.latent_ring_kernels import ring_prefill
from lorikeet_kernels.attention.latent_scan import LOG2E, load_queries, scan_latents
from lorikeet_kernels.tiling.latent_tiles import LatentPrefillTiles


@triton.jit
def find_queries(starts_ptr, tile, num_requests, BLOCK_Q: tl.constexpr):
    """(request, its first query's row, its number of queries, the tile's first query) of a query tile."""
    low = 0
    high = num_requests
    while high - low > 1:  # the last request whose first tile is not beyond this one
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    row = tl.load(starts_ptr + low)
    num_queries = tl.load(starts_ptr + low + 1) - row
    return low, row, num_queries, (tile - (row // BLOCK_Q + low)) * BLOCK_Q


@triton.jit(
    do_not_specialize=["num_requests", "stride_table", "most_fresh"],
    do_not_specialize_on_alignment=["num_requests", "stride_table", "most_fresh"],
)
def _prefill_kernel(
    out_ptr, q_ptr, cache_ptr, starts_ptr, lens_ptr, tables_ptr, num_requests, most_fresh,
    stride_qt, stride_block, stride_token, stride_table, scale_log2,
    HEADS: tl.constexpr, HEADS_P2: tl.constexpr, BLOCK_Q: tl.constexpr, LATENT: tl.constexpr,
    LATENT_P2: tl.constexpr, ROPE: tl.constexpr, ROPE_P2: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # later tiles see more keys: they go first, so that the short ones fill the end
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request, first_row, num_queries, first_query = find_queries(starts_ptr, tile, num_requests, BLOCK_Q)
    length = tl.load(lens_ptr + request)
    if (first_query >= num_queries) | (num_queries < 2):
        return
    if (num_queries == length) & (num_queries > most_fresh):
        return
    ROWS: tl.constexpr = BLOCK_Q * HEADS_P2
    row = tl.arange(0, ROWS)
    query = first_query + row // HEADS_P2
    head = tl.program_id(0) * HEADS_P2 + row % HEADS_P2
    is_row = (query < num_queries) & (head < HEADS)
    first_position = length - num_queries
    last = tl.minimum(first_position + first_query + BLOCK_Q, length) - 1
    token = (first_row + query).to(tl.int64)
    q_at = q_ptr + token * stride_qt + head * (LATENT + ROPE)
    q_latent, q_rope = load_queries(q_at, is_row, LATENT, LATENT_P2, ROPE, ROPE_P2)
    acc, _, total = scan_latents(
        q_latent, q_rope, first_position + query, 0, last + 1, length, cache_ptr,
        tables_ptr + request.to(tl.int64) * stride_table, stride_block, stride_token, scale_log2,
        ROWS, LATENT, LATENT_P2, ROPE, ROPE_P2, BLOCK_TOKENS, True, BLOCK_N, STAGES,
    )  # fmt: skip
    d = tl.arange(0, LATENT_P2)
    y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_at = out_ptr + (token * HEADS + head)[:, None] * LATENT + d[None, :]
    tl.store(out_at, y, mask=is_row[:, None] & (d < LATENT)[None, :])


def latent_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    sequence_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tiles: LatentPrefillTiles,
    *,
    most_fresh: int,
) -> None:
    """Write the rows of `out` that belong to requests with several queries; leave the others alone.

    Left alone are also requests whose whole sequence is in the batch and longer than `most_fresh`.
    """
    num_requests = sequence_lens.shape[0]
    block_tokens, latent_dim, heads = cache.shape[1], out.shape[-1], q.shape[1]
    rope_dim = cache.shape[-1] - latent_dim
    heads_p2 = min(tiles.rows, triton.next_power_of_2(heads))
    block_q = tiles.rows // heads_p2
    if tiles.is_ring:
        ring_prefill(
            q, cache, query_starts, sequence_lens, block_tables, scale * LOG2E.value, out,
            heads_p2=heads_p2, block_q=block_q, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            num_key_stages=tiles.num_key_stages, most_fresh=most_fresh,
        )  # fmt: skip
        return
    _prefill_kernel[(triton.cdiv(heads, heads_p2), q.shape[0] // block_q + num_requests)](
        out, q, cache, query_starts, sequence_lens, block_tables, num_requests, most_fresh,
        q.stride(0), cache.stride(0), cache.stride(1), block_tables.stride(0), scale * LOG2E.value,
        HEADS=heads, HEADS_P2=heads_p2, BLOCK_Q=block_q, LATENT=latent_dim,
        LATENT_P2=max(16, triton.next_power_of_2(latent_dim)), ROPE=rope_dim,
        ROPE_P2=max(16, triton.next_power_of_2(rope_dim)), BLOCK_TOKENS=block_tokens,
        BLOCK_N=tiles.block_n, STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
