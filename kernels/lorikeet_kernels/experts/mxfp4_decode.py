"""MXFP4 grouped expert GEMM for few tokens an expert: bound by the weights' bytes.

    y[p] = W[expert] x[row(p)] + bias[expert], then what follows it; see mxfp4_linear

One program: up to `block_rows` pairs of one expert, a span of the matrix's rows, one of `splits` parts of the
columns. Weights are the MMA's A operand, pairs its columns. Words, scales and activations pass a ring of
asynchronous copies; a thread reads back the very 16 bytes of words that it copied.
"""

# A Gluon kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# Gluon's tuples grow by +, and it knows no max() of constants nor keyword-only flags.
# ruff: noqa: RUF005, FURB136

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from lorikeet_kernels.experts.mxfp4_dequant import dequantize
from lorikeet_kernels.experts.mxfp4_epilogue import finish
from lorikeet_kernels.launch.grid_dependency import launch_next_grid, wait_for_grid


@gluon.jit
def _fetch_weights(
    word_ring, scale_ring, slot, word_at, scale_at, chunk,
    CHUNKS: gl.constexpr, STEP: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Start the copies of STEP chunks of weights into the ring's `slot`."""
    for u in gl.static_range(STEP):
        at = chunk + u
        words, scales = word_at + at * 128, scale_at + at * 8
        if EVEN:
            async_copy.async_copy_global_to_shared(word_ring[u].index(slot), words)
            async_copy.async_copy_global_to_shared(scale_ring[u].index(slot), scales)
        else:  # a masked copy writes zeros
            async_copy.async_copy_global_to_shared(word_ring[u].index(slot), words, mask=at < CHUNKS)
            async_copy.async_copy_global_to_shared(scale_ring[u].index(slot), scales, mask=at < CHUNKS)


@gluon.jit
def _fetch_x(
    x_ring, slot, x_at, is_row, column, chunk, IN: gl.constexpr, STEP: gl.constexpr, EVEN: gl.constexpr
):
    """Likewise the activations of STEP chunks."""
    for u in gl.static_range(STEP):
        x = x_at + (chunk + u) * 64
        if EVEN:
            async_copy.async_copy_global_to_shared(x_ring[u].index(slot), x, mask=is_row)
        else:
            inside = is_row & ((chunk + u) * 64 + column < IN)
            async_copy.async_copy_global_to_shared(x_ring[u].index(slot), x, mask=inside)


@gluon.jit
def _accumulate(
    word_at, scale_at, x_at, is_row, column, begin,
    IN: gl.constexpr, CHUNKS: gl.constexpr, SPAN: gl.constexpr, BLOCK_ROWS: gl.constexpr, STEP: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, ACC: gl.constexpr, X_TYPE: gl.constexpr,
    EVEN: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """The product over STEPS steps of STEP chunks from `begin` on; WAITS: x is the launch before's."""
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    LANES: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0]))
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    word_ring = ()
    scale_ring = ()
    x_ring = ()
    # a buffer for each chunk of a step: setting barriers, the compiler takes all slots of one buffer for one
    for _ in gl.static_range(STEP):
        word_ring = word_ring + (gl.allocate_shared_memory(gl.int32, [STAGES, SPAN * 128], FLAT),)
        scale_ring = scale_ring + (gl.allocate_shared_memory(gl.int32, [STAGES, SPAN * 8], FLAT),)
        x_ring = x_ring + (
            gl.allocate_shared_memory(
                X_TYPE, [STAGES, BLOCK_ROWS, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
            ),
        )
    acc = gl.zeros([SPAN * 16, BLOCK_ROWS], gl.float32, layout=ACC)
    for step in gl.static_range(STAGES - 1):
        if step < STEPS:
            _fetch_weights(
                word_ring, scale_ring, step, word_at, scale_at, begin + step * STEP, CHUNKS, STEP, EVEN
            )
    if WAITS:
        wait_for_grid()
    for step in gl.static_range(STAGES - 1):
        if step < STEPS:
            _fetch_x(x_ring, step, x_at, is_row, column, begin + step * STEP, IN, STEP, EVEN)
        async_copy.commit_group()
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        ahead = step + STAGES - 1
        if ahead < STEPS:
            chunk = begin + ahead * STEP
            _fetch_weights(
                word_ring, scale_ring, ahead % STAGES, word_at, scale_at, chunk, CHUNKS, STEP, EVEN
            )
            _fetch_x(x_ring, ahead % STAGES, x_at, is_row, column, chunk, IN, STEP, EVEN)
        async_copy.commit_group()
        slot = step % STAGES
        for u in gl.static_range(STEP):
            words = word_ring[u].index(slot).load(WORDS)
            scales = scale_ring[u].index(slot).load(LANES)
            scales = scales.expand_dims(1).broadcast_to([SPAN * 8, 4]).reshape([SPAN * 32])
            x = x_ring[u].index(slot).permute((1, 0)).load(B)
            acc = mma_v2(dequantize(words, scales, SPAN, A), x, acc)
    async_copy.wait_group(0)
    return acc


@gluon.jit(do_not_specialize=["num_pairs"])
def _mxfp4_decode_kernel(
    out_ptr, x_ptr, words_ptr, scales_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr, blocks_ptr,
    num_pairs, factor, alpha, limit, up_offset,
    IN: gl.constexpr, OUT: gl.constexpr, TILES: gl.constexpr, CHUNKS: gl.constexpr, X_DIV: gl.constexpr,
    PAIRING: gl.constexpr, ACTIVATE: gl.constexpr, HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_ROUTED: gl.constexpr, HAS_DELTA: gl.constexpr, BLOCK_ROWS: gl.constexpr, ROW_TILES: gl.constexpr,
    STEP: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr, WEIGHTS_FIRST: gl.constexpr,
):  # fmt: skip
    SPAN: gl.constexpr = WARPS * ROW_TILES  # tiles of 16 rows
    needed: gl.constexpr = (CHUNKS + SPLITS * STEP - 1) // (SPLITS * STEP)
    STEPS: gl.constexpr = needed if needed > 2 else 2  # a loop of one step crashes Triton 3.6
    EVEN: gl.constexpr = STEPS * SPLITS * STEP == CHUNKS and IN == CHUNKS * 64
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8]
    )
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    SCALES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    HALF: gl.constexpr = gl.BlockedLayout(
        [1, 2], [8, 4], [WARPS, 1], [1, 0]
    )  # ACC's rows without the upper 8

    if PDL:
        # WEIGHTS_FIRST: the launch before is past what made the blocks, and only its output is waited for
        if not WEIGHTS_FIRST:
            wait_for_grid()
        launch_next_grid()
    block = gl.program_id(1)
    first = gl.load(blocks_ptr + block * 4)
    count = gl.load(blocks_ptr + block * 4 + 1)
    expert = gl.load(blocks_ptr + block * 4 + 2).to(gl.int64)
    if count == 0:
        return
    split = gl.program_id(2)
    begin = split * (STEPS * STEP)
    tile = gl.program_id(0) * SPAN
    i = gl.arange(0, SPAN * 128, layout=WORDS)
    j = gl.arange(0, SPAN * 8, layout=SCALES)
    # rows of tiles beyond the last repeat it; they are never stored
    word_tile = expert * TILES + gl.minimum(tile + i // 128, TILES - 1)
    scale_tile = expert * TILES + gl.minimum(tile + j // 8, TILES - 1)
    word_at = words_ptr + word_tile * (CHUNKS * 128) + i % 128
    scale_at = scales_ptr + scale_tile * (CHUNKS * 8) + j % 8
    m = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, X))
    x_row = gl.load(order_ptr + first + m, mask=m < count, other=0) // X_DIV
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, X))
    x_at = x_ptr + (x_row.to(gl.int64) * IN)[:, None] + column[None, :]
    is_row = (m < count)[:, None] & (column >= 0)[None, :]

    acc = _accumulate(
        word_at, scale_at, x_at, is_row, column[None, :], begin, IN, CHUNKS, SPAN, BLOCK_ROWS, STEP, STEPS,
        STAGES, WARPS, ACC, x_ptr.dtype.element_ty, EVEN, PDL and WEIGHTS_FIRST,
    )  # fmt: skip
    p = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, ACC))
    pair = gl.load(order_ptr + first + p, mask=p < count, other=0)
    finish(
        acc, out_ptr + split.to(gl.int64) * num_pairs * OUT, bias_ptr, routed_ptr, delta_ptr, tile * 16, pair,
        expert, p < count, factor, alpha, limit, up_offset, OUT, PAIRING, ACTIVATE, HAS_LIMIT, HAS_BIAS,
        HAS_ROUTED, HAS_DELTA, ACC, HALF, HALF if ACTIVATE else ACC,
    )  # fmt: skip
