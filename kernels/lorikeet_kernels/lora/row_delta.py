"""Device code: the LoRA delta of one row for a kernel that has the row's outputs in registers.

    delta[n] = B[n, :] @ (A x)

One program reads the whole of A and B: for sites with few outputs, and few rows, whose own launch would cost
more than that. A site without weights costs the look-up alone.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def row_delta(
    x_ptr, arena_ptr, a_offset, b_offset, rank, n, inside,
    K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The delta at outputs `n`, float32, from a row of K inputs; zeros where rank is 0. One A only."""
    delta = tl.zeros(n.shape, tl.float32)
    first = 0
    while first < rank:
        r = first + tl.arange(0, CHUNK)
        a_row = arena_ptr + a_offset + r.to(tl.int64)[:, None] * K
        products = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            a = tl.load(a_row + k[None, :], mask=(r < rank)[:, None] & (k < K)[None, :], other=0.0)
            products += a.to(tl.float32) * x[None, :]
        h = tl.sum(products, axis=1)
        b_row = arena_ptr + b_offset + n.to(tl.int64)[:, None] * rank
        b = tl.load(b_row + r[None, :], mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        delta += tl.sum(b.to(tl.float32) * h[None, :], axis=1)
        first += CHUNK
    return delta
