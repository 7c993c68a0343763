"""The product of e4m3 rows with an e4m3 matrix, a step of columns at a time, for the FP8 kernels.

Tensor cores add up products of e4m3 in less than float32's precision: each step's sum leaves them and is
added, times its scales, to a float32 accumulator. Fewer than 64 rows of the left operand, which the warpgroup
MMA needs, take the 16-bit MMA, to whose operands the compiler widens e4m3 exactly; then all sums are float32.
"""

# A Triton kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

BY_ROW, BY_TILE, BY_TURNS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Whether a tile's rows have block scales of their own, one together, or the even and the odd one each."""


@triton.jit
def _weight_factor(scale_at, odd_scale_at, group, BLOCK_N: tl.constexpr, SCALES: tl.constexpr):
    scale = tl.load(scale_at + group)
    if SCALES == BY_TURNS:
        odd = tl.load(odd_scale_at + group)
        scale = tl.where(tl.arange(0, BLOCK_N)[None, :] % 2 == 0, scale, odd)
    return scale


@triton.jit
def accumulate(
    x_at, weight_at, x_scale_at, scale_at, odd_scale_at, begin,
    IN: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, is_column=None,
):  # fmt: skip
    """Acc [ROWS, BLOCK_N] float32 over STEPS steps from `begin` on.

    `x_at` [ROWS, BLOCK_K] and `weight_at` [BLOCK_K, BLOCK_N] point at columns 0 on. With SCALES (0: none),
    `x_scale_at` [ROWS, 1] points at the rows' first scales, and `scale_at` at the weight's: [1, BLOCK_N]
    BY_ROW, else a scalar, BY_TURNS the even columns' and `odd_scale_at` the odd ones'. Columns that are not
    `is_column` [BLOCK_N], where given, are zeros: nothing is read for them. Where the matrix's rows are the
    MMA's, x and the weight change places.
    """
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    if SCALES != 0:
        # a step's scales are read a step ahead: nothing else hides the way to them
        group = tl.minimum(begin * BLOCK_K, IN - 1) // GROUP
        x_scale = tl.load(x_scale_at + group)
        weight_scale = _weight_factor(scale_at, odd_scale_at, group, BLOCK_N, SCALES)
    for step in tl.range(begin, begin + STEPS, num_stages=STAGES):
        if EVEN:
            if is_column is None:
                w = tl.load(weight_at + step * BLOCK_K)
            else:
                w = tl.load(weight_at + step * BLOCK_K, mask=is_column[None, :], other=0.0)
            x = tl.load(x_at + step * BLOCK_K)
        else:
            in_columns = k + step * BLOCK_K < IN
            if is_column is None:
                w = tl.load(weight_at + step * BLOCK_K, mask=in_columns[:, None], other=0.0)
            else:
                w = tl.load(
                    weight_at + step * BLOCK_K, mask=in_columns[:, None] & is_column[None, :], other=0.0
                )
            x = tl.load(x_at + step * BLOCK_K, mask=in_columns[None, :], other=0.0)
        if SCALES != 0:
            factor = x_scale * weight_scale
            after = tl.minimum((step + 1) * BLOCK_K, IN - 1) // GROUP
            x_scale = tl.load(x_scale_at + after)
            weight_scale = _weight_factor(scale_at, odd_scale_at, after, BLOCK_N, SCALES)
            acc += tl.dot(x, w) * factor
        else:
            acc += tl.dot(x, w)
    return acc
