"""Device code shared by the latent attention kernels: rows of queries over a range of a request's latents.

A cached row is (latent | rotated key). It is copied to shared memory once and serves both products: whole as
the key, its first LATENT elements as the value. ROWS are (query, head) pairs. A tensor core instruction takes
64 rows of its first operand, so what is first depends on which side has as many: up to 32 rows go second, and
the products are keys x queries and values^T x probabilities.
"""

# A Triton kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
BIG_NEGATIVE = tl.constexpr(-1.0e30)  # instead of -inf, whose difference with itself is NaN


@triton.jit
def load_queries(
    q_at, is_row, LATENT: tl.constexpr, LATENT_P2: tl.constexpr, ROPE: tl.constexpr, ROPE_P2: tl.constexpr
):
    """The rows at `q_at` [ROWS] as [ROWS, LATENT_P2] and [ROWS, ROPE_P2], zeros where there is none."""
    d = tl.arange(0, LATENT_P2)
    r = tl.arange(0, ROPE_P2)
    q_latent = tl.load(q_at[:, None] + d[None, :], mask=is_row[:, None] & (d < LATENT)[None, :], other=0.0)
    at = q_at[:, None] + LATENT + r[None, :]
    q_rope = tl.load(at, mask=is_row[:, None] & (r < ROPE)[None, :], other=0.0)
    return q_latent, q_rope


@triton.jit
def _load_rows(
    cache_ptr, table, n, inside, stride_block, stride_token,
    LATENT: tl.constexpr, LATENT_P2: tl.constexpr, ROPE: tl.constexpr, ROPE_P2: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, LATENT_P2)
    r = tl.arange(0, ROPE_P2)
    block = tl.load(table + n // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
    at = cache_ptr + block * stride_block + (n % BLOCK_TOKENS) * stride_token
    latent_mask = inside[:, None]
    rope_mask = inside[:, None]
    if LATENT != LATENT_P2:
        latent_mask = latent_mask & (d < LATENT)[None, :]
    if ROPE != ROPE_P2:
        rope_mask = rope_mask & (r < ROPE)[None, :]
    latent = tl.load(at[:, None] + d[None, :], mask=latent_mask, other=0.0)
    key = tl.load(at[:, None] + LATENT + r[None, :], mask=rope_mask, other=0.0)
    return latent, key


@triton.jit
def scan_latents(
    q_latent, q_rope, position, begin, end, length, cache_ptr, table, stride_block, stride_token, scale_log2,
    ROWS: tl.constexpr, LATENT: tl.constexpr, LATENT_P2: tl.constexpr, ROPE: tl.constexpr,
    ROPE_P2: tl.constexpr, BLOCK_TOKENS: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """(sum of p v [ROWS, LATENT_P2], largest score [ROWS], sum of p [ROWS]) over keys [begin, end).

    Scores are base-two logarithms. Keys from `length` on are hidden, with CAUSAL also those behind a row's
    `position` [ROWS].
    """
    largest = tl.full([ROWS], BIG_NEGATIVE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if ROWS < 64:
        acc = tl.zeros([LATENT_P2, ROWS], tl.float32)
        q_first = tl.trans(q_latent)
        q_second = tl.trans(q_rope)
        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            n = start + tl.arange(0, BLOCK_N)
            inside = n < length
            latent, key = _load_rows(
                cache_ptr, table, n, inside, stride_block, stride_token,
                LATENT, LATENT_P2, ROPE, ROPE_P2, BLOCK_TOKENS,
            )  # fmt: skip
            score = tl.dot(latent, q_first, input_precision="ieee")
            score = tl.dot(key, q_second, score, input_precision="ieee") * scale_log2
            visible = inside[:, None]
            if CAUSAL:
                visible = visible & (n[:, None] <= position[None, :])
            score = tl.where(visible, score, BIG_NEGATIVE)
            highest = tl.maximum(largest, tl.max(score, axis=0))
            p = tl.exp2(score - highest[None, :])
            shrink = tl.exp2(largest - highest)
            total = total * shrink + tl.sum(p, axis=0)
            acc = acc * shrink[None, :]
            acc = tl.dot(tl.trans(latent), p.to(latent.dtype), acc, input_precision="ieee")
            largest = highest
        return tl.trans(acc), largest, total
    else:  # noqa: RET505 - a branch at compile time: the other one's types are not this one's
        acc = tl.zeros([ROWS, LATENT_P2], tl.float32)
        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            n = start + tl.arange(0, BLOCK_N)
            inside = n < length
            latent, key = _load_rows(
                cache_ptr, table, n, inside, stride_block, stride_token,
                LATENT, LATENT_P2, ROPE, ROPE_P2, BLOCK_TOKENS,
            )  # fmt: skip
            score = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
            score = tl.dot(q_rope, tl.trans(key), score, input_precision="ieee") * scale_log2
            visible = inside[None, :]
            if CAUSAL:
                visible = visible & (n[None, :] <= position[:, None])
            score = tl.where(visible, score, BIG_NEGATIVE)
            highest = tl.maximum(largest, tl.max(score, axis=1))
            p = tl.exp2(score - highest[:, None])
            shrink = tl.exp2(largest - highest)
            total = total * shrink + tl.sum(p, axis=1)
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(latent.dtype), latent, acc, input_precision="ieee")
            largest = highest
        return acc, largest, total
