"""Grouped GEMM over e4m3 experts for many tokens an expert, whose MMAs and float32 sums overlap (Gluon).

    y[p] = W[expert] x[row(p)] + bias[expert], then what follows it; see fp8_gemm

One program: up to `block_rows` pairs of one expert and `block_n` of the matrix's rows. While a step's
warpgroup MMAs run, the sum that the step before left is multiplied by its scales and added to the
accumulator: three sets of registers, of which the MMA in flight has one. Both operands pass a ring of
asynchronous copies. Widths of whole steps of 128 columns only.
"""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from lorikeet_kernels.launch.grid_dependency import launch_next_grid, wait_for_grid

STEP = gl.constexpr(128)
"""Columns of a step, which share a scale."""
BY_TURNS = gl.constexpr(3)
"""As in `fp8_accumulate`: gate's rows and up's have a block scale each."""


@gluon.jit
def _fetch(x_ring, w_ring, slot, x_at, weight_at, step):
    """Start the copies of a step into the rings' `slot`."""
    async_copy.async_copy_global_to_shared(x_ring.index(slot), x_at + step * STEP)
    async_copy.async_copy_global_to_shared(w_ring.index(slot), weight_at + step * STEP)
    async_copy.commit_group()


@gluon.jit
def _factor(
    x_scale_at, scale_at, odd_scale_at, step,
    BLOCK_N: gl.constexpr, SCALES: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """What a step's sum is multiplied by, [pairs, BLOCK_N]."""
    rows = gl.load(x_scale_at + step)[:, None]
    scale = gl.load(scale_at + step)
    if SCALES == BY_TURNS:
        odd = gl.load(odd_scale_at + step)
        column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, ACC))[None, :]
        scale = gl.where(column % 2 == 0, scale, odd)
    return rows * scale


@gluon.jit
def _matrix_row(column, OUT: gl.constexpr, PAIRING: gl.constexpr):
    """The matrix's row of an accumulator's column: gate and up alternate there in every row order."""
    if PAIRING == 2:
        return column % 2 * (OUT // 2) + column // 2
    return column


@gluon.jit
def _advance(
    x_ring, w_ring, x_at, weight_at, x_scale_at, scale_at, odd_scale_at, step, running, spare, acc, factor,
    BLOCK_N: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, SCALES: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Start a step's MMAs in the registers of `spare`, then add what the step before left, `running`.

    That sum's registers are spare afterwards.
    """
    async_copy.wait_group(STAGES - 3)
    fence_async_shared()
    # every warp is past the MMAs of the step before the last: its slot takes the step STAGES - 2 ahead
    ahead = gl.minimum(step + STAGES - 2, STEPS - 1)
    _fetch(x_ring, w_ring, (step + STAGES - 2) % STAGES, x_at, weight_at, ahead)
    slot = step % STAGES
    # The accumulator passes here too: else the compiler puts its sums off and copies what they need, and as a
    # copy reads what an MMA is to write, ptxas waits for each MMA by itself.
    done, acc = warpgroup_mma_wait(0, (running, acc))
    started = warpgroup_mma(
        x_ring.index(slot), w_ring.index(slot).permute((1, 0)), spare, use_acc=False, is_async=True
    )
    if SCALES != 0:
        acc += done * factor
        factor = _factor(x_scale_at, scale_at, odd_scale_at, step, BLOCK_N, SCALES, ACC)
    else:
        acc += done
    return started, done, acc, factor


@gluon.jit
def _accumulate(
    x_at, weight_at, x_scale_at, scale_at, odd_scale_at,
    PAIRS: gl.constexpr, BLOCK_N: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    SCALES: gl.constexpr, ACC: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Acc [PAIRS, BLOCK_N] float32 over all steps."""
    RING: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    x_ring = gl.allocate_shared_memory(E4M3, [STAGES, PAIRS, STEP], RING)
    w_ring = gl.allocate_shared_memory(E4M3, [STAGES, BLOCK_N, STEP], RING)
    for step in gl.static_range(STAGES - 2):
        _fetch(x_ring, w_ring, step, x_at, weight_at, step if step < STEPS else STEPS - 1)
    acc = gl.zeros([PAIRS, BLOCK_N], gl.float32, layout=ACC)
    spare = acc
    factor = acc
    if SCALES != 0:
        factor = _factor(x_scale_at, scale_at, odd_scale_at, 0, BLOCK_N, SCALES, ACC)
    # Before the first step a sum of zeros "runs". Two steps a turn, whose sums keep registers of their own: a
    # copy of one that an MMA still writes would make the compiler wait for every MMA.
    even = warpgroup_mma_init(acc)
    for turn in range(STEPS // 2):
        odd, spare, acc, factor = _advance(
            x_ring, w_ring, x_at, weight_at, x_scale_at, scale_at, odd_scale_at, 2 * turn, even, spare, acc,
            factor, BLOCK_N, STEPS, STAGES, SCALES, ACC,
        )  # fmt: skip
        even, spare, acc, factor = _advance(
            x_ring, w_ring, x_at, weight_at, x_scale_at, scale_at, odd_scale_at, 2 * turn + 1, odd, spare,
            acc, factor, BLOCK_N, STEPS, STAGES, SCALES, ACC,
        )  # fmt: skip
    if STEPS % 2 == 1:
        even, spare, acc, factor = _advance(
            x_ring, w_ring, x_at, weight_at, x_scale_at, scale_at, odd_scale_at, STEPS - 1, even, spare, acc,
            factor, BLOCK_N, STEPS, STAGES, SCALES, ACC,
        )  # fmt: skip
    done = warpgroup_mma_wait(0, (even,))
    async_copy.wait_group(0)
    if SCALES != 0:
        acc += done * factor
    else:
        acc += done
    return acc


@gluon.jit
def _compute(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr,
    first, count, expert, alpha, limit, up_offset,
    IN: gl.constexpr, OUT: gl.constexpr, X_DIV: gl.constexpr, PAIRING: gl.constexpr, ACTIVATE: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ROUTED: gl.constexpr, HAS_DELTA: gl.constexpr,
    SCALES: gl.constexpr, SCALE_ROWS: gl.constexpr, PAIRS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Up to PAIRS pairs times the program's columns."""
    ACROSS: gl.constexpr = 16 * WARPS // PAIRS if 16 * WARPS > PAIRS else 1  # warps side by side in a row
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS // ACROSS, ACROSS], instr_shape=[16, BLOCK_N // ACROSS, 32]
    )
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    GROUPS: gl.constexpr = IN // STEP
    begin = gl.program_id(0) * BLOCK_N

    m = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, COPY))
    n = begin + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, COPY))[None, :]
    # places beyond the block's pairs, and rows beyond the matrix, repeat the first; they are never stored
    x_row = gl.load(order_ptr + first + gl.where(m < count, m, 0)) // X_DIV
    x_at = x_ptr + (x_row.to(gl.int64) * IN)[:, None] + k
    weight_row = _matrix_row(gl.where(n < OUT, n, begin), OUT, PAIRING)
    weight_at = weight_ptr + ((expert * OUT + weight_row) * IN)[:, None] + k

    r = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, ACC))
    is_row = r < count
    pair = gl.load(order_ptr + first + gl.where(is_row, r, 0))
    column = begin + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, ACC))
    inside = column < OUT
    row = _matrix_row(gl.where(inside, column, begin), OUT, PAIRING)
    scale_at = scale_ptr
    odd_scale_at = scale_ptr
    if SCALES == 0:
        x_scale_at = x_scale_ptr + pair // X_DIV
    else:
        x_scale_at = x_scale_ptr + (pair // X_DIV).to(gl.int64) * GROUPS
        if SCALES == BY_TURNS:
            scale_at += (expert * SCALE_ROWS + begin // 2 // STEP) * GROUPS
            odd_scale_at += (expert * SCALE_ROWS + (begin // 2 + OUT // 2) // STEP) * GROUPS
        else:
            scale_at += (expert * SCALE_ROWS + begin // STEP) * GROUPS
    acc = _accumulate(
        x_at, weight_at, x_scale_at, scale_at, odd_scale_at, PAIRS, BLOCK_N, GROUPS, STAGES, SCALES, ACC,
        x_ptr.dtype.element_ty,
    )  # fmt: skip
    if SCALES == 0:
        acc *= gl.load(x_scale_at)[:, None] * gl.load(scale_ptr + expert * OUT + row)[None, :]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if HAS_BIAS:
        acc += gl.load(bias_ptr + expert * OUT + row).to(gl.float32)[None, :]
    if ACTIVATE:
        value = acc.to(dtype)
        if HAS_DELTA:
            at = delta_ptr + (pair.to(gl.int64) * OUT)[:, None] + row[None, :]
            delta = gl.load(at, mask=is_row[:, None] & inside[None, :], other=0.0)
            value = (value.to(gl.float32) + delta.to(gl.float32)).to(dtype)
        gate, up = gl.split(value.to(gl.float32).reshape([PAIRS, BLOCK_N // 2, 2]))
        if HAS_LIMIT:  # comparisons keep a NaN, minimum and maximum may not
            gate = gl.where(gate > limit, limit, gate)
            up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        y = (gate / (1.0 + gl.exp(-alpha * gate)) * (up + up_offset)).to(dtype)
        width: gl.constexpr = OUT // 2
        to = begin // 2 + gl.arange(0, BLOCK_N // 2, layout=gl.SliceLayout(0, WIDE))
    else:
        if HAS_ROUTED:
            acc *= gl.load(routed_ptr + pair)[:, None]
        y = acc.to(dtype)
        width: gl.constexpr = OUT
        to = begin + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, WIDE))
    # rows are stored by neighbouring lanes, 16 bytes each
    y = gl.convert_layout(y, WIDE)
    w = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, WIDE))
    stored = gl.load(order_ptr + first + gl.where(w < count, w, 0))
    at = out_ptr + (stored.to(gl.int64) * width)[:, None] + to[None, :]
    gl.store(at, y, mask=(w < count)[:, None] & (to < width)[None, :])


@gluon.jit
def _fp8_pipelined_kernel(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr,
    blocks_ptr, alpha, limit, up_offset,
    IN: gl.constexpr, OUT: gl.constexpr, X_DIV: gl.constexpr, PAIRING: gl.constexpr, ACTIVATE: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ROUTED: gl.constexpr, HAS_DELTA: gl.constexpr,
    SCALES: gl.constexpr, SCALE_ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_grid()
        launch_next_grid()
    block = gl.program_id(1)
    first = gl.load(blocks_ptr + block * 4)
    count = gl.load(blocks_ptr + block * 4 + 1)
    expert = gl.load(blocks_ptr + block * 4 + 2).to(gl.int64)
    if count == 0:
        return
    if HALVES and count <= BLOCK_M // 2:  # an expert's last block: half the work where half suffices
        _compute(
            out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr,
            first, count, expert, alpha, limit, up_offset, IN, OUT, X_DIV, PAIRING, ACTIVATE, HAS_LIMIT,
            HAS_BIAS, HAS_ROUTED, HAS_DELTA, SCALES, SCALE_ROWS, BLOCK_M // 2, BLOCK_N, STAGES, WARPS,
        )  # fmt: skip
    else:
        _compute(
            out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr,
            first, count, expert, alpha, limit, up_offset, IN, OUT, X_DIV, PAIRING, ACTIVATE, HAS_LIMIT,
            HAS_BIAS, HAS_ROUTED, HAS_DELTA, SCALES, SCALE_ROWS, BLOCK_M, BLOCK_N, STAGES, WARPS,
        )  # fmt: skip
