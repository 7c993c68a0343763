"""Grouped GEMM over e4m3 experts and the sum of each token's experts, for many tokens, in one launch (Gluon).

    y[t] = sum_k round(topk_weights[t, k] W[expert] x[t, k])      (+ shared[t]; see moe_sum)

Rows of all pairs are K times the result: written and read again they cost the memory more than the weights.
So a range of the matrix's rows is done for all pairs before the next one, and a few ranges' rows take turns
in buffers that stay in the L2. A program stays on its multiprocessor: of each range it takes its own blocks,
then sums its own tokens' rows of a range before, which by then all programs have stored. Both come through
one ring, as `fp8_specialized` has it: a slot holds a step of weights or as many bytes of rows. Up to two
blocks a program stay in shared memory for the whole launch. Of more, each is multiplied by all ranges before
the next one, and all are summed at the end: their rows go to memory, as those of two launches.

DeepSeek-V3 TP8 on an H200: a layer of 4,096 tokens takes 7 % less time than with two launches, of 2,048 and
of 8,192, or of 4,096 with 324 blocks instead of 256, 2 %.

Programs wait for each other, so all of a launch must be on the card at once: as many as it has
multiprocessors are. Two such launches on two streams, or a context that has but a part of the card, could
wait forever; whatever ends by itself only delays them.

Has the bits of `fp8_specialized` and `sum_pairs` after one another. Whole blocks of 128 x 128 and up to
STAYING_COLUMNS columns only.
"""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# Gluon's tuples grow by +.
# ruff: noqa: RUF005

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.quantize_rows import QuantizedRows
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks
from lorikeet_kernels.experts.fp8_ranged_items import STAYING
from lorikeet_kernels.experts.fp8_ranged_warps import LINE, SLOT, load, multiply
from lorikeet_kernels.experts.fp8_specialized import STAYING_COLUMNS
from lorikeet_kernels.experts.fp8_warps import ROWS, SCALES, STEP, TILE
from lorikeet_kernels.launch.grid_dependency import launch_next_grid, wait_for_grid
from lorikeet_kernels.tiling.expert_tiles import RangedTiles

BLOCK_ROWS = 192
"""Pairs of a block: three warpgroups'."""
MAX_BYTES = 192 * 1024
"""For blocks that stay and slots: six of these beside 256 columns take 230,300 in all of Hopper's 232,448."""


@gluon.jit(
    do_not_specialize=["capacity", "num_tokens"], do_not_specialize_on_alignment=["capacity", "num_tokens"]
)
def _fp8_ranged_down_kernel(
    weight_desc, out_ptr, x_ptr, x_scale_ptr, scale_ptr, routed_ptr, shared_ptr, order_ptr, blocks_ptr,
    rows_ptr, marks_ptr, capacity, num_tokens,
    STEPS: gl.constexpr, TILES: gl.constexpr, TOP_K: gl.constexpr, RANGES: gl.constexpr, LAG: gl.constexpr,
    BUFFERS: gl.constexpr, HAS_SHARED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The launch's own warpgroup loads, GROUPS others multiply and sum."""
    if PDL:
        wait_for_grid()
        launch_next_grid()
    RING: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    x_stay = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAYING * STEPS * GROUPS, ROWS, STEP], RING)
    weight_ring = gl.allocate_shared_memory(
        x_ptr.dtype.element_ty, [STAGES] + weight_desc.block_shape, weight_desc.layout
    )
    weight_scales = gl.allocate_shared_memory(gl.float32, [STAGES, LINE], PLAIN)
    places = gl.allocate_shared_memory(gl.int32, [STAYING, SCALES], PLAIN)
    factors = gl.allocate_shared_memory(gl.float32, [STAYING * (1 + STEPS), SCALES], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [STAYING, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [STAYING, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        # the copy engine's bytes, and each loading thread's copies
        mbarrier.init(full.index(slot), count=1 + 128)
        mbarrier.init(empty.index(slot), count=GROUPS)
    for place in gl.static_range(STAYING):
        mbarrier.init(x_full.index(place), count=128)
        mbarrier.init(x_empty.index(place), count=GROUPS)
    for parity in gl.static_range(2):
        mbarrier.init(stored.index(parity), count=GROUPS)
    fence_async_shared()  # the copy engine's proxy must see the barriers before its first bytes arrive
    b = gl.arange(0, 512, layout=gl.BlockedLayout([4], [32], [4], [0]))
    used = 0
    for start in range(0, capacity, 512):
        counts = gl.load(blocks_ptr + 4 * (start + b) + 1, mask=start + b < capacity, other=0)
        used += gl.sum((counts > 0).to(gl.int32), 0)
    ring = (weight_ring, full, empty, weight_scales)
    stay = (x_stay, x_full, x_empty, places, factors)
    work = (order_ptr, blocks_ptr, used, num_tokens)
    rows = (rows_ptr, marks_ptr, stored)
    inputs = (x_ptr, x_scale_ptr, routed_ptr, scale_ptr)
    finish = (out_ptr, shared_ptr)
    gl.static_assert(GROUPS == 3)
    gl.warp_specialize(
        [
            (load, (ring, stay, work, rows, inputs, weight_desc, TILES, TOP_K, RANGES, LAG, BUFFERS, GROUPS)),
            (multiply, (
                0, ring, stay, work, rows, finish, TILES, TOP_K, RANGES, LAG, BUFFERS, GROUPS, HAS_SHARED,
            )),
            (multiply, (
                1, ring, stay, work, rows, finish, TILES, TOP_K, RANGES, LAG, BUFFERS, GROUPS, HAS_SHARED,
            )),
            (multiply, (
                2, ring, stay, work, rows, finish, TILES, TOP_K, RANGES, LAG, BUFFERS, GROUPS, HAS_SHARED,
            )),
        ],
        [4, 4, 4], [152, 152, 152],
    )  # fmt: skip


def can_range_down(
    weight: Fp8Weight, num_tokens: int, top_k: int, block_rows: int, dtype: torch.dtype, tiles: RangedTiles
) -> bool:
    """Whether `fp8_ranged_down` takes such a down projection [E, H, I] for so many tokens of `dtype`."""
    _, out_features, in_features = weight.shape
    columns = tiles.columns
    return (
        weight.kind == "block"
        and weight.block_of_row is None
        and block_rows == BLOCK_ROWS
        and dtype.itemsize == 2
        and in_features % STEP.value == 0
        and 0 < in_features <= STAYING_COLUMNS
        and columns in (128, 256, 512)
        and out_features > 0
        and out_features % columns == 0
        and tiles.stages >= 2
        and STAYING.value * BLOCK_ROWS * in_features + tiles.stages * TILE.value * STEP.value <= MAX_BYTES
        # a slot holds whole tokens' rows
        and top_k > 0
        and SLOT.value % (columns * top_k) == 0
        and 1 <= tiles.lag < tiles.buffers
        # a pair's place in a buffer is counted in 32 bits
        and num_tokens * top_k * columns < 2**31
    )


def empty_marks(weight: Fp8Weight, tiles: RangedTiles) -> torch.Tensor:
    """What the programs of one `fp8_ranged_down` tell each other by; made early, it costs no time between."""
    return torch.zeros(2 * (weight.shape[1] // tiles.columns), dtype=torch.int32, device=weight.values.device)


def fp8_ranged_down(
    x: QuantizedRows,
    weight: Fp8Weight,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: RangedTiles,
    topk_weights: torch.Tensor,
    marks: torch.Tensor,
    *,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the sum over each token's experts into `out` [T, H] and return it; see this module's docstring.

    Shapes: x.values [T, K, I] e4m3, x.scales [T K, I / 128]; topk_weights [T, K] float32; shared [T, H].
    `marks`, of `empty_marks`, serve one call.

    Raises:
        ValueError: these do not fit together, or `can_range_down` says no.
    """
    num_tokens, top_k = topk_weights.shape
    _, out_features, in_features = weight.shape
    if not can_range_down(weight, num_tokens, top_k, blocks.block_rows, out.dtype, tiles) or blocks.is_lone:
        raise ValueError(
            f"fp8_ranged_down: {tiles}, blocks of {blocks.block_rows} and {top_k} experts a token do not "
            f"take a {weight.kind} weight {tuple(weight.shape)} for {out.dtype}"
        )
    _check_rows(x, weight, blocks, out, topk_weights, shared)
    ranges = out_features // tiles.columns
    if marks.shape != (2 * ranges,) or marks.dtype != torch.int32 or not marks.is_contiguous():
        raise ValueError(
            f"fp8_ranged_down: marks {marks.dtype} {tuple(marks.shape)}, strides {marks.stride()} for "
            f"{ranges} ranges"
        )
    if num_tokens == 0:
        return out
    box = [1, TILE.value, STEP.value]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
    buffers = min(ranges, tiles.buffers)
    num_processors = torch.cuda.get_device_properties(out.device).multi_processor_count
    may_be_many = blocks.capacity > STAYING.value * num_processors
    rows = out.new_empty((ranges if may_be_many else buffers, num_tokens * top_k, tiles.columns))
    _fp8_ranged_down_kernel[(num_processors,)](
        TensorDescriptor.from_tensor(weight.values, box, layout), out, x.values, x.scales, weight.scales,
        topk_weights, out if shared is None else shared, blocks.order, blocks.blocks, rows, marks,
        blocks.capacity, num_tokens,
        STEPS=in_features // STEP.value, TILES=tiles.columns // TILE.value, TOP_K=top_k, RANGES=ranges,
        LAG=tiles.lag, BUFFERS=buffers, HAS_SHARED=shared is not None, GROUPS=BLOCK_ROWS // ROWS.value,
        STAGES=tiles.stages, PDL=True, num_warps=4, maxnreg=128, launch_pdl=True,
    )  # fmt: skip
    return out


def _check_rows(
    x: QuantizedRows,
    weight: Fp8Weight,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None,
) -> None:
    """Raise ValueError where what goes in or out is not of the tokens, experts and features there are."""
    num_experts, out_features, in_features = weight.shape
    num_tokens, top_k = topk_weights.shape
    pairs = num_tokens * top_k
    wanted = [
        (x.values, (num_tokens, top_k, in_features), weight.values.dtype),
        (x.scales, (pairs, in_features // STEP.value), torch.float32),
        (weight.values, weight.shape, weight.values.dtype),
        (weight.scales, weight.scales.shape, torch.float32),
        (topk_weights, (num_tokens, top_k), torch.float32),
        (out, (num_tokens, out_features), out.dtype),
        (blocks.order, (pairs,), torch.int32),
        (blocks.blocks, (blocks.capacity, 4), torch.int32),
    ]
    if shared is not None:
        wanted.append((shared, (num_tokens, out_features), out.dtype))
    for given, shape, dtype in wanted:
        if given.shape != shape or given.dtype != dtype or not given.is_contiguous():
            raise ValueError(
                f"fp8_ranged_down: {given.dtype} {tuple(given.shape)}, strides {given.stride()}: pass "
                f"contiguous {dtype} {tuple(shape)}"
            )
    if (blocks.num_experts, blocks.top_k) != (num_experts, top_k):
        raise ValueError(
            f"fp8_ranged_down: blocks of {blocks.num_experts} experts, {blocks.top_k} a token: expected "
            f"{num_experts} and {top_k}"
        )
