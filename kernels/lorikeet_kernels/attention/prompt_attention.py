"""Latent attention of whole prompts, by keys and values projected up from the batch's own latents.

    p = softmax over j <= i of scale (q_i . (k_j | shared_j));   y_i = sum_j p_j v_j

Only for requests whose whole sequence is in the batch, of more than `most_fresh` tokens: their keys are rows
of the batch, and need no cache. Rows of other requests are left alone.

Absorbed weights make a pair of query and key cost 2 latent + rope multiplications a head instead of plain +
rope + value (1,088 and 320 in DeepSeek's models), but spare the projection of each key, latent * (plain +
value). A prompt of n tokens meets n^2 / 2 pairs: beyond `longest_absorbed` tokens (341 there) projecting
costs less. A request with a past would have to project that as well, which would pay from 170 queries a step
on, with memory for all heads' keys of the past; it stays absorbed.

Shapes: q [T, H, plain + rope], rotated, a view is fine; up [T, H, plain + value], contiguous; shared
[T, rope], rotated, a view is fine; out [T, H, value], contiguous. Scores, softmax and sum are float32; the
result rounds once.
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

from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.latent_prefill import find_queries
from lorikeet_kernels.attention.latent_scan import BIG_NEGATIVE, LOG2E
from lorikeet_kernels.tiling.latent_tiles import LatentPrefillTiles, select_prompt


def longest_absorbed(latent_dim: int, plain_dim: int, rope_dim: int, value_dim: int) -> int:
    """Tokens of a prompt up to which absorbed weights take no more multiplications than projected heads."""
    saved = 2 * latent_dim + rope_dim - (plain_dim + rope_dim + value_dim)
    return 2 * latent_dim * (plain_dim + value_dim) // max(1, saved)


def prompt_attention_reference(
    q: torch.Tensor,
    up: torch.Tensor,
    shared: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    *,
    most_fresh: int,
) -> torch.Tensor:
    """See `prompt_attention`."""
    plain = q.shape[-1] - shared.shape[-1]
    starts = metadata.query_starts_host or metadata.query_starts.tolist()
    lengths = metadata.sequence_lens_host or metadata.sequence_lens.tolist()
    for index, length in enumerate(lengths):
        begin, end = starts[index], starts[index + 1]
        if end - begin != length or length <= most_fresh:
            continue
        heads = up[begin:end].float()
        keys = torch.cat(
            (heads[..., :plain], shared[begin:end, None].float().expand(-1, up.shape[1], -1)), -1
        )
        score = torch.einsum("nhd,shd->hns", q[begin:end].float() * scale, keys)
        hidden = torch.ones((length, length), dtype=torch.bool, device=q.device).triu(1)
        p = score.masked_fill_(hidden, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hns,shd->nhd", p, heads[..., plain:]).to(out.dtype)
    return out


@triton.jit
def _attend(
    acc, largest, total, q_plain, q_rope, begin, end, length, up_at, shared_at, stride_ut, stride_st,
    position, scale_log2, PLAIN: tl.constexpr, PLAIN_P2: tl.constexpr, ROPE: tl.constexpr,
    ROPE_P2: tl.constexpr, VALUE: tl.constexpr, VALUE_P2: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, end), whole tiles; without MASKED every query sees all of them."""
    d = tl.arange(0, PLAIN_P2)
    r = tl.arange(0, ROPE_P2)
    e = tl.arange(0, VALUE_P2)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < length
        row = up_at + n.to(tl.int64) * stride_ut
        shared_row = shared_at + n.to(tl.int64) * stride_st
        k = tl.load(row[:, None] + d[None, :], mask=inside[:, None] & (d < PLAIN)[None, :], other=0.0)
        s = tl.load(shared_row[:, None] + r[None, :], mask=inside[:, None] & (r < ROPE)[None, :], other=0.0)
        value_at = row[:, None] + PLAIN + e[None, :]
        v = tl.load(value_at, mask=inside[:, None] & (e < VALUE)[None, :], other=0.0)
        score = tl.dot(q_plain, tl.trans(k), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(s), score, input_precision="ieee")
        if MASKED:
            score = tl.where(n[None, :] <= position[:, None], score, BIG_NEGATIVE)
        highest = tl.maximum(largest, tl.max(score, axis=1) * scale_log2)
        p = tl.exp2(score * scale_log2 - highest[:, None])
        shrink = tl.exp2(largest - highest)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        largest = highest
    return acc, largest, total


@triton.jit(
    do_not_specialize=["num_requests", "most_fresh"],
    do_not_specialize_on_alignment=["num_requests", "most_fresh"],
)
def _prompt_kernel(
    out_ptr, q_ptr, up_ptr, shared_ptr, starts_ptr, lens_ptr, num_requests, most_fresh,
    stride_qt, stride_st, scale_log2,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, PLAIN_P2: tl.constexpr, ROPE: tl.constexpr,
    ROPE_P2: tl.constexpr, VALUE: tl.constexpr, VALUE_P2: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # later tiles see more keys: they go first, so that the short ones fill the end
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0)
    request, first_row, num_queries, first_query = find_queries(starts_ptr, tile, num_requests, BLOCK_Q)
    is_fresh = (num_queries == tl.load(lens_ptr + request)) & (num_queries > most_fresh)
    if (first_query >= num_queries) | (is_fresh == 0):
        return
    query = first_query + tl.arange(0, BLOCK_Q)
    is_row = (query < num_queries)[:, None]
    token = (first_row + query).to(tl.int64)
    d = tl.arange(0, PLAIN_P2)
    r = tl.arange(0, ROPE_P2)
    e = tl.arange(0, VALUE_P2)
    q_at = q_ptr + (token * stride_qt + head * (PLAIN + ROPE))[:, None]
    q_plain = tl.load(q_at + d[None, :], mask=is_row & (d < PLAIN)[None, :], other=0.0)
    q_rope = tl.load(q_at + PLAIN + r[None, :], mask=is_row & (r < ROPE)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_Q, VALUE_P2], tl.float32)
    largest = tl.full([BLOCK_Q], BIG_NEGATIVE, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    stride_ut: tl.constexpr = HEADS * (PLAIN + VALUE)
    up_at = up_ptr + first_row.to(tl.int64) * stride_ut + head * (PLAIN + VALUE)
    shared_at = shared_ptr + first_row.to(tl.int64) * stride_st
    # keys before `free` are visible to all queries of the tile
    free = (first_query + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(first_query + BLOCK_Q, num_queries)
    acc, largest, total = _attend(
        acc, largest, total, q_plain, q_rope, 0, free, num_queries, up_at, shared_at, stride_ut, stride_st,
        query, scale_log2, PLAIN, PLAIN_P2, ROPE, ROPE_P2, VALUE, VALUE_P2, BLOCK_N, STAGES, False,
    )  # fmt: skip
    acc, largest, total = _attend(
        acc, largest, total, q_plain, q_rope, free, end, num_queries, up_at, shared_at, stride_ut, stride_st,
        query, scale_log2, PLAIN, PLAIN_P2, ROPE, ROPE_P2, VALUE, VALUE_P2, BLOCK_N, STAGES, True,
    )  # fmt: skip
    y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_at = out_ptr + ((token * HEADS + head) * VALUE)[:, None] + e[None, :]
    tl.store(out_at, y, mask=is_row & (e < VALUE)[None, :])


def attend_prompts(
    q: torch.Tensor,
    up: torch.Tensor,
    shared: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    tiles: LatentPrefillTiles,
    *,
    most_fresh: int,
) -> None:
    """Launch; `prompt_attention` on a GPU, and what the interpreter tests."""
    num_requests, heads = metadata.sequence_lens.shape[0], q.shape[1]
    rope_dim, value_dim = shared.shape[1], out.shape[2]
    plain_dim = q.shape[2] - rope_dim
    limited = {} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}
    _prompt_kernel[(heads, q.shape[0] // tiles.rows + num_requests)](
        out, q, up, shared, metadata.query_starts, metadata.sequence_lens, num_requests, most_fresh,
        q.stride(0), shared.stride(0), scale * LOG2E.value,
        HEADS=heads, PLAIN=plain_dim, PLAIN_P2=max(16, triton.next_power_of_2(plain_dim)), ROPE=rope_dim,
        ROPE_P2=max(16, triton.next_power_of_2(rope_dim)), VALUE=value_dim,
        VALUE_P2=max(16, triton.next_power_of_2(value_dim)), BLOCK_Q=tiles.rows, BLOCK_N=tiles.block_n,
        STAGES=tiles.num_stages, num_warps=tiles.num_warps, **limited,
    )  # fmt: skip


def prompt_attention(
    q: torch.Tensor,
    up: torch.Tensor,
    shared: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    *,
    most_fresh: int,
) -> torch.Tensor:
    """Write the rows of `out` that belong to whole prompts of more than `most_fresh` tokens; return it."""
    num_rows, heads, dim = q.shape
    sizes = (num_rows, heads, dim - shared.shape[1] + out.shape[2])
    if up.shape != sizes or shared.shape[0] != num_rows or out.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"prompt_attention: heads {tuple(up.shape)}, shared keys {tuple(shared.shape)} and out "
            f"{tuple(out.shape)} do not fit queries {tuple(q.shape)}"
        )
    if q.device.type == "cpu":
        return prompt_attention_reference(q, up, shared, metadata, scale, out, most_fresh=most_fresh)
    if (
        q.stride()[1:] != (dim, 1)
        or shared.stride(1) != 1
        or not (up.is_contiguous() and out.is_contiguous())
    ):
        raise ValueError(
            f"prompt_attention: rows of q and shared, strides {q.stride()} and {shared.stride()}, must be "
            "contiguous, up and out wholly"
        )
    tiles = select_prompt(dim, q.itemsize)
    attend_prompts(q, up, shared, metadata, scale, out, tiles, most_fresh=most_fresh)
    return out
