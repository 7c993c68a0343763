"""MXFP4 grouped expert GEMM for many tokens an expert: bound by the tensor cores.

    y[p] = W[expert] x[row(p)] + bias[expert], then what follows it; see mxfp4_linear

One program: up to `block_rows` pairs of one expert and a span of the matrix's rows. Weights are dequantised
into registers, which warpgroup MMAs read as A, while the MMA before runs; the pairs' rows are B, in shared
memory, a step of STEP chunks ahead. Up to half a block's pairs take half its work.
"""

# A Gluon kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# Gluon's tuples grow by +.
# ruff: noqa: RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from lorikeet_kernels.experts.mxfp4_dequant import dequantize
from lorikeet_kernels.experts.mxfp4_epilogue import finish
from lorikeet_kernels.launch.grid_dependency import launch_next_grid, wait_for_grid


@gluon.jit
def _fetch_x(x_ring, slot, x_at, column, chunk, num_columns, STEP: gl.constexpr, EVEN: gl.constexpr):
    for u in gl.static_range(STEP):
        at = x_at + (chunk + u) * 64
        if EVEN:
            async_copy.async_copy_global_to_shared(x_ring[u].index(slot), at)
        else:  # a masked copy writes zeros
            inside = (chunk + u) * 64 + column < num_columns
            async_copy.async_copy_global_to_shared(x_ring[u].index(slot), at, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _fetch_weights(word_at, scale_at, chunk, CHUNKS: gl.constexpr, STEP: gl.constexpr, EVEN: gl.constexpr):
    words = ()
    scales = ()
    for u in gl.static_range(STEP):
        if EVEN:
            words = words + (gl.load(word_at + (chunk + u) * 128, cache_modifier=".cg"),)
            scales = scales + (gl.load(scale_at + (chunk + u) * 8),)
        else:
            inside = chunk + u < CHUNKS
            words = words + (
                gl.load(word_at + (chunk + u) * 128, mask=inside, other=0, cache_modifier=".cg"),
            )
            scales = scales + (gl.load(scale_at + (chunk + u) * 8, mask=inside, other=0),)
    return words, scales


@gluon.jit
def _compute(
    out_ptr, x_ptr, words_ptr, scales_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr, first, count,
    expert, tile, factor, alpha, limit, up_offset,
    IN: gl.constexpr, OUT: gl.constexpr, TILES: gl.constexpr, CHUNKS: gl.constexpr, X_DIV: gl.constexpr,
    PAIRING: gl.constexpr, ACTIVATE: gl.constexpr, HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_ROUTED: gl.constexpr, HAS_DELTA: gl.constexpr, PAIRS: gl.constexpr, SPAN: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """SPAN tiles of 16 rows from `tile` on, times up to PAIRS pairs."""
    STEPS: gl.constexpr = (CHUNKS + STEP - 1) // STEP
    EVEN: gl.constexpr = STEPS * STEP == CHUNKS and IN == CHUNKS * 64
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, PAIRS, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    SCALES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    RING: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    HALF: gl.constexpr = gl.BlockedLayout(
        [1, 2], [8, 4], [WARPS, 1], [1, 0]
    )  # ACC's rows without the upper 8
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])

    i = gl.arange(0, SPAN * 128, layout=WORDS)
    j = gl.arange(0, SPAN * 32, layout=SCALES)
    # rows of tiles beyond the last repeat it; they are never stored
    word_at = words_ptr + (expert * TILES + gl.minimum(tile + i // 128, TILES - 1)) * (CHUNKS * 128) + i % 128
    scale_at = (
        scales_ptr + (expert * TILES + gl.minimum(tile + j // 32, TILES - 1)) * (CHUNKS * 8) + j % 32 // 4
    )
    m = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, X))
    # places beyond the block's pairs repeat its first; their columns are never stored
    x_row = gl.load(order_ptr + first + gl.where(m < count, m, 0)) // X_DIV
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, X))[None, :]
    x_at = x_ptr + (x_row.to(gl.int64) * IN)[:, None] + column

    x_ring = ()
    # a buffer for each chunk of a step: setting barriers, the compiler takes all slots of one buffer for one
    for _ in gl.static_range(STEP):
        x_ring = x_ring + (gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, PAIRS, 64], RING),)
    for step in gl.static_range(STAGES - 1):
        _fetch_x(x_ring, step, x_at, column, step * STEP, IN, STEP, EVEN)
    words, scales = _fetch_weights(word_at, scale_at, 0, CHUNKS, STEP, EVEN)
    acc = warpgroup_mma_init(gl.zeros([SPAN * 16, PAIRS], gl.float32, layout=ACC))
    running = dequantize(
        words[0], scales[0], SPAN, A
    )  # what the MMA in flight reads must stay alive until it ends
    for step in range(STEPS):
        after = gl.minimum(step + 1, STEPS - 1) * STEP
        next_words, next_scales = _fetch_weights(word_at, scale_at, after, CHUNKS, STEP, EVEN)
        for u in gl.static_range(STEP):
            a = dequantize(words[u], scales[u], SPAN, A)
            acc, running = warpgroup_mma_wait(0, (acc, running))
            if u == 0:
                # every warp is past the step before, so its slot is free for the step STAGES - 1 ahead
                async_copy.wait_group(STAGES - 2)
                fence_async_shared()
                ahead = gl.minimum(step + STAGES - 1, STEPS - 1) * STEP
                _fetch_x(x_ring, (step + STAGES - 1) % STAGES, x_at, column, ahead, IN, STEP, EVEN)
            acc = warpgroup_mma(a, x_ring[u].index(step % STAGES).permute((1, 0)), acc, is_async=True)
            running = a
        words = next_words
        scales = next_scales
    acc, running = warpgroup_mma_wait(0, (acc, running))
    async_copy.wait_group(0)

    p = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, ACC))
    pair = gl.load(order_ptr + first + p, mask=p < count, other=0)
    finish(
        acc, out_ptr, bias_ptr, routed_ptr, delta_ptr, tile * 16, pair, expert, p < count, factor, alpha,
        limit, up_offset, OUT, PAIRING, ACTIVATE, HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA, ACC, HALF, WIDE,
    )  # fmt: skip


@gluon.jit
def _mxfp4_prefill_kernel(
    out_ptr, x_ptr, words_ptr, scales_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr, blocks_ptr,
    factor, alpha, limit, up_offset,
    IN: gl.constexpr, OUT: gl.constexpr, TILES: gl.constexpr, CHUNKS: gl.constexpr, X_DIV: gl.constexpr,
    PAIRING: gl.constexpr, ACTIVATE: gl.constexpr, HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_ROUTED: gl.constexpr, HAS_DELTA: gl.constexpr, BLOCK_ROWS: gl.constexpr, ROW_TILES: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_grid()
        launch_next_grid()
    block = gl.program_id(1)
    first = gl.load(blocks_ptr + block * 4)
    count = gl.load(blocks_ptr + block * 4 + 1)
    expert = gl.load(blocks_ptr + block * 4 + 2).to(gl.int64)
    SPAN: gl.constexpr = WARPS * ROW_TILES
    tile = gl.program_id(0) * SPAN
    if count == 0:
        return
    if HALVES and count <= BLOCK_ROWS // 2:  # an expert's last block: half the work where half suffices
        _compute(
            out_ptr, x_ptr, words_ptr, scales_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr, first, count,
            expert, tile, factor, alpha, limit, up_offset, IN, OUT, TILES, CHUNKS, X_DIV, PAIRING, ACTIVATE,
            HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA, BLOCK_ROWS // 2, SPAN, STEP, STAGES, WARPS,
        )  # fmt: skip
    else:
        _compute(
            out_ptr, x_ptr, words_ptr, scales_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr, first, count,
            expert, tile, factor, alpha, limit, up_offset, IN, OUT, TILES, CHUNKS, X_DIV, PAIRING, ACTIVATE,
            HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA, BLOCK_ROWS, SPAN, STEP, STAGES, WARPS,
        )  # fmt: skip
