"""Grouped GEMM over e4m3 experts for many tokens an expert: some warps load, others multiply (Gluon).

    y[p] = W[expert] x[row(p)] + bias[expert], then what follows it; see fp8_gemm

A program stays on its multiprocessor and takes one item after the other: up to `block_rows` pairs of one
expert and several tiles of 128 of the matrix's rows. One warpgroup fills a ring with steps of 128 columns,
weights by the copy engine, the pairs' rows by asynchronous copies, and runs ahead into the next tile and
item. Rows of few columns come once an item and stay for all its tiles, and the ring holds weights alone. The
other warpgroups have 64 of the pairs each: a step's MMAs leave a sum, which is multiplied by its scales and
added to the accumulator while the tensor cores work for another warpgroup. So an expert's weights come once
for all its pairs, and neither an item's beginning nor its end leaves the memory idle.

Whole blocks of 128 x 128 only, and with an activation gate's rows above up's.
"""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# Gluon's tuples grow by +.
# ruff: noqa: RUF005

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.gated_activation import GatedActivation
from lorikeet_kernels.dense.quantize_rows import QuantizedRows
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks
from lorikeet_kernels.launch.grid_dependency import launch_next_grid, wait_for_grid
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

STEP = gl.constexpr(128)
"""Columns of a step, which share a scale."""
TILE = gl.constexpr(128)
"""The matrix's rows of a tile; with an activation 64 of gate's and the same of up's."""
ROWS = gl.constexpr(64)
"""Pairs of a warpgroup."""
STAYING_COLUMNS = 256
"""Columns up to which the pairs' rows stay in shared memory for an item; those of the next come meanwhile."""
_STEPS = 32  # of an item, at least, as far as the matrix has so many: an item's beginning takes about 1.5 us
_THREAD_REGISTERS = {2: 168, 3: 128}  # by warpgroups that multiply: of 65,536, for one warpgroup more


# What the warps share, as tuples:
#   ring: weights [STAGES, a box of TILE rows, STEP], the barriers of slots that are full and of slots that
#         are empty, and the pairs' rows [STAGES * GROUPS, ROWS, STEP]
#   stay: where rows stay, there are two items' [2 * steps * GROUPS, ROWS, STEP], and this is the barriers of
#         those that are full and of those that are empty
#   work: the order of the pairs, and the items: blocks, and their number in ranges of tiles
#   finish: where the results go, bias, routed weights, delta, then the activation's numbers


@gluon.jit
def _item(items, number, RANGES: gl.constexpr, TILES: gl.constexpr):
    """The pairs' first place and number, their expert, and the tiles from one to before another.

    Of each program's items the `number`-th, programs in turn forwards and backwards: an expert's last block
    has fewer pairs, and where every expert has two, a program would else have all the short ones or none.
    """
    blocks_ptr, num_items = items
    PER_ITEM: gl.constexpr = (TILES + RANGES - 1) // RANGES
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    item = number * programs + gl.where(number % 2 == 0, program, programs - 1 - program)
    is_any = item < num_items
    item = gl.where(is_any, item, 0)
    entry = blocks_ptr + item // RANGES * 4
    count = gl.where(is_any, gl.load(entry + 1), 0)
    begin = item % RANGES * PER_ITEM
    return gl.load(entry), count, gl.load(entry + 2), begin, gl.minimum(begin + PER_ITEM, TILES)


@gluon.jit
def _copy_rows(x_ring, first, x_at, count, m, offset):
    """Start the copies of a step of the pairs' rows, 64 of them into each of the slots from `first` on."""
    for part in gl.static_range(len(x_at)):
        if count > part * ROWS:
            # rows beyond the pairs are zeros and move nothing
            is_row = (part * ROWS + m < count)[:, None]
            to = x_ring.index(first + part)
            async_copy.async_copy_global_to_shared(to, x_at[part] + offset, mask=is_row)


@gluon.jit
def _load(
    ring, stay, work, weight_desc, x_ptr,
    IN: gl.constexpr, OUT: gl.constexpr, X_DIV: gl.constexpr, ACTIVATE: gl.constexpr, RANGES: gl.constexpr,
    GROUPS: gl.constexpr, STAYS: gl.constexpr,
):  # fmt: skip
    """The loading warps: every step of every item into the ring."""
    weight_ring, full, empty, x_ring = ring
    order_ptr, items = work
    STAGES: gl.constexpr = full.shape[0]
    STEPS: gl.constexpr = IN // STEP
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, COPY))[None, :]
    turn = 0
    for number in range(gl.cdiv(items[1], gl.num_programs(0))):
        first, count, expert, begin, end = _item(items, number, RANGES, OUT // TILE)
        if count > 0:
            x_at = ()
            for part in gl.static_range(GROUPS):
                place = part * ROWS + m
                pair = gl.load(order_ptr + first + gl.where(place < count, place, 0))
                x_at = x_at + (x_ptr + ((pair // X_DIV).to(gl.int64) * IN)[:, None] + k,)
            if STAYS:
                # no item without pairs is before one with pairs
                half = number % 2
                mbarrier.wait(stay[1].index(half), number // 2 % 2 ^ 1)
                for step in range(STEPS):
                    _copy_rows(x_ring, (half * STEPS + step) * GROUPS, x_at, count, m, step * STEP)
                async_copy.mbarrier_arrive(stay[0].index(half), increment_count=False)
            for tile in range(begin, end):
                for step in range(STEPS):
                    slot = turn % STAGES
                    mbarrier.wait(empty.index(slot), turn // STAGES % 2 ^ 1)
                    landed = full.index(slot)
                    mbarrier.expect(landed, TILE * STEP)
                    if ACTIVATE:
                        at = [2 * expert, tile * (TILE // 2), step * STEP]
                    else:
                        at = [expert, tile * TILE, step * STEP]
                    tma.async_copy_global_to_shared(weight_desc, at, landed, weight_ring.index(slot))
                    if not STAYS:
                        _copy_rows(x_ring, slot * GROUPS, x_at, count, m, step * STEP)
                        async_copy.mbarrier_arrive(landed, increment_count=False)
                    turn += 1


@gluon.jit
def _round(value, dtype: gl.constexpr):
    """Float32 of what `value` rounds to in `dtype`.

    Bfloat16 by pairs: conversions one by one share a unit with exponentials, 4 a clock and scheduler.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; "
            "and.b32 $1, pair, 0xffff0000; }",
            "=r,=r,r,r", [value], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return value.to(dtype).to(gl.float32)


@gluon.jit
def _store(
    acc, finish, held, count, expert, tile, OUT: gl.constexpr, ACTIVATE: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ROUTED: gl.constexpr, HAS_DELTA: gl.constexpr,
    ACC: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """What follows the product of a tile, for `count` pairs.

    `held` are the pairs of the accumulator's rows, those of the rows that are stored, and routed weights.
    """
    out_ptr, bias_ptr, _, delta_ptr, alpha, limit, up_offset = finish
    pair, stored, routed = held
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, ACC))
    HALVES: gl.constexpr = 2 if ACTIVATE else 1
    WIDTH: gl.constexpr = TILE // HALVES
    row = tile * WIDTH + column % WIDTH + column // WIDTH * (OUT // 2)
    if HAS_BIAS:
        acc += gl.load(bias_ptr + expert.to(gl.int64) * OUT + row).to(gl.float32)[None, :]
    if ACTIVATE:
        value = _round(acc, dtype)
        if HAS_DELTA:
            at = delta_ptr + (pair.to(gl.int64) * OUT)[:, None] + row[None, :]
            delta = gl.load(at, mask=(r < count)[:, None], other=0.0)
            value = _round(value + delta.to(gl.float32), dtype)
        gate, up = gl.split(value.reshape([ROWS, 2, WIDTH]).permute([0, 2, 1]))
        if HAS_LIMIT:  # comparisons keep a NaN, minimum and maximum may not
            gate = gl.where(gate > limit, limit, gate)
            up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        y = (gate / (1.0 + gl.exp(-alpha * gate)) * (up + up_offset)).to(dtype)
    else:
        if HAS_ROUTED:
            acc *= routed[:, None]
        y = acc.to(dtype)
    y = gl.convert_layout(y, WIDE)
    w = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    to = tile * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WIDE))
    at = out_ptr + (stored.to(gl.int64) * (OUT // HALVES))[:, None] + to[None, :]
    gl.store(at, y, mask=(w < count)[:, None])


@gluon.jit
def _multiply(
    part: gl.constexpr, ring, stay, work, finish, x_scale_ptr, scale_ptr,
    IN: gl.constexpr, OUT: gl.constexpr, X_DIV: gl.constexpr, ACTIVATE: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ROUTED: gl.constexpr, HAS_DELTA: gl.constexpr,
    RANGES: gl.constexpr, GROUPS: gl.constexpr, STAYS: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: its ROWS of each item's pairs."""
    weight_ring, full, empty, x_ring = ring
    order_ptr, items = work
    STAGES: gl.constexpr = full.shape[0]
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 32]
    )
    # rows are stored by neighbouring lanes, 16 bytes each
    WIDTH: gl.constexpr = TILE // 2 if ACTIVATE else TILE
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    STEPS: gl.constexpr = IN // STEP
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    w = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    is_gate = (gl.arange(0, TILE, layout=gl.SliceLayout(0, ACC)) < TILE // 2)[None, :]
    turn = 0
    for number in range(gl.cdiv(items[1], gl.num_programs(0))):
        first, count, expert, begin, end = _item(items, number, RANGES, OUT // TILE)
        first += part * ROWS
        own = count - part * ROWS
        if own > 0:
            # loaded once an item: a tile's end would wait for each of these loads, one after the other
            pair = gl.load(order_ptr + first + gl.where(r < own, r, 0))
            stored = gl.load(order_ptr + first + gl.where(w < own, w, 0))
            routed = pair
            if HAS_ROUTED:
                routed = gl.load(finish[2] + pair)
            if STAYS:
                mbarrier.wait(stay[0].index(number % 2), number // 2 % 2)
                fence_async_shared()  # asynchronous copies are not of the tensor cores' proxy
            x_scale_at = x_scale_ptr + (pair // X_DIV).to(gl.int64) * STEPS
            for tile in range(begin, end):
                # gate's scales, or the only ones, and up's
                scale_row = tile // 2 if ACTIVATE else tile
                scale_at = scale_ptr + (expert.to(gl.int64) * (OUT // TILE) + scale_row) * STEPS
                up_scale_at = scale_at + OUT // 2 // TILE * STEPS
                acc = gl.zeros([ROWS, TILE], gl.float32, layout=ACC)
                x_scale = gl.load(x_scale_at)
                scale = gl.load(scale_at)
                up_scale = scale
                if ACTIVATE:
                    up_scale = gl.load(up_scale_at)
                for step in range(STEPS):
                    slot = turn % STAGES
                    mbarrier.wait(full.index(slot), turn // STAGES % 2)
                    x_slot = number % 2 * STEPS + step
                    if not STAYS:
                        x_slot = slot
                        fence_async_shared()
                    weights = weight_ring.index(slot).reshape([TILE, STEP]).permute((1, 0))
                    started = warpgroup_mma(
                        x_ring.index(x_slot * GROUPS + part), weights,
                        gl.zeros([ROWS, TILE], gl.float32, layout=ACC), use_acc=False, is_async=True,
                    )  # fmt: skip
                    # the next step's scales come meanwhile
                    after = gl.minimum(step + 1, STEPS - 1)
                    next_x_scale = gl.load(x_scale_at + after)
                    next_scale = gl.load(scale_at + after)
                    next_up_scale = next_scale
                    if ACTIVATE:
                        next_up_scale = gl.load(up_scale_at + after)
                    # this one's pass here too: they are not waited for before the MMAs start
                    done, x_scale = warpgroup_mma_wait(0, (started, x_scale))
                    mbarrier.arrive(empty.index(slot), count=1)
                    factor = x_scale[:, None] * scale
                    if ACTIVATE:
                        factor = gl.where(is_gate, factor, x_scale[:, None] * up_scale)
                    acc += done * factor
                    x_scale, scale, up_scale = next_x_scale, next_scale, next_up_scale
                    turn += 1
                _store(
                    acc, finish, (pair, stored, routed), own, expert, tile, OUT, ACTIVATE, HAS_LIMIT,
                    HAS_BIAS, HAS_ROUTED, HAS_DELTA, ACC, WIDE,
                )  # fmt: skip
        elif count > 0:
            # the others' steps pass by: a slot is empty when every warpgroup has said so
            for _ in range((end - begin) * STEPS):
                slot = turn % STAGES
                mbarrier.wait(full.index(slot), turn // STAGES % 2)
                mbarrier.arrive(empty.index(slot), count=1)
                turn += 1
        if STAYS and count > 0:
            mbarrier.arrive(stay[1].index(number % 2), count=1)


@gluon.jit(do_not_specialize=["num_items"], do_not_specialize_on_alignment=["num_items"])
def _fp8_specialized_kernel(
    weight_desc, out_ptr, x_ptr, x_scale_ptr, scale_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr,
    blocks_ptr, num_items, alpha, limit, up_offset,
    IN: gl.constexpr, OUT: gl.constexpr, X_DIV: gl.constexpr, ACTIVATE: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ROUTED: gl.constexpr, HAS_DELTA: gl.constexpr,
    RANGES: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, STAYS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The launch's own warpgroup loads, GROUPS others multiply."""
    if PDL:
        wait_for_grid()
        launch_next_grid()
    RING: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    E4M3: gl.constexpr = x_ptr.dtype.element_ty
    X_STEPS: gl.constexpr = 2 * (IN // STEP) if STAYS else STAGES
    x_ring = gl.allocate_shared_memory(E4M3, [X_STEPS * GROUPS, ROWS, STEP], RING)
    weight_ring = gl.allocate_shared_memory(E4M3, [STAGES] + weight_desc.block_shape, weight_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stay = ()
    for slot in gl.static_range(STAGES):
        # the copy engine's bytes, and each loading thread's copies
        mbarrier.init(full.index(slot), count=1 if STAYS else 1 + 128)
        mbarrier.init(empty.index(slot), count=GROUPS)
    if STAYS:
        x_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        x_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for half in gl.static_range(2):
            mbarrier.init(x_full.index(half), count=128)
            mbarrier.init(x_empty.index(half), count=GROUPS)
        stay = (x_full, x_empty)
    fence_async_shared()  # the copy engine's proxy must see the barriers before its first bytes arrive
    ring = (weight_ring, full, empty, x_ring)
    work = (order_ptr, (blocks_ptr, num_items))
    finish = (out_ptr, bias_ptr, routed_ptr, delta_ptr, alpha, limit, up_offset)
    # Registers of a multiprocessor: 512 threads have 128 each, 384 have 168; the loading warps keep 56 or 72.
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_load, (
                    ring, stay, work, weight_desc, x_ptr, IN, OUT, X_DIV, ACTIVATE, RANGES, GROUPS, STAYS,
                )),
                (_multiply, (
                    0, ring, stay, work, finish, x_scale_ptr, scale_ptr, IN, OUT, X_DIV, ACTIVATE,
                    HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA, RANGES, GROUPS, STAYS,
                )),
                (_multiply, (
                    1, ring, stay, work, finish, x_scale_ptr, scale_ptr, IN, OUT, X_DIV, ACTIVATE,
                    HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA, RANGES, GROUPS, STAYS,
                )),
                (_multiply, (
                    2, ring, stay, work, finish, x_scale_ptr, scale_ptr, IN, OUT, X_DIV, ACTIVATE,
                    HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA, RANGES, GROUPS, STAYS,
                )),
            ],
            [4, 4, 4], [152, 152, 152],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize(
            [
                (_load, (
                    ring, stay, work, weight_desc, x_ptr, IN, OUT, X_DIV, ACTIVATE, RANGES, GROUPS, STAYS,
                )),
                (_multiply, (
                    0, ring, stay, work, finish, x_scale_ptr, scale_ptr, IN, OUT, X_DIV, ACTIVATE,
                    HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA, RANGES, GROUPS, STAYS,
                )),
                (_multiply, (
                    1, ring, stay, work, finish, x_scale_ptr, scale_ptr, IN, OUT, X_DIV, ACTIVATE,
                    HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA, RANGES, GROUPS, STAYS,
                )),
            ],
            [4, 4], [216, 216],
        )  # fmt: skip


def launch_specialized(
    x: QuantizedRows,
    weight: Fp8Weight,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: ExpertTiles,
    bias: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    activation: GatedActivation | None,
    delta: torch.Tensor | None,
) -> torch.Tensor:
    """See `fp8_gemm`, which has checked what it is given."""
    constants = activation or GatedActivation()
    limit, unused = constants.limit, x.scales
    num_experts, out_features, in_features = weight.shape
    num_tiles, num_steps = out_features // TILE.value, in_features // STEP.value
    ranges = triton.cdiv(num_tiles, max(1, _STEPS // num_steps))
    groups = tiles.block_rows // ROWS.value
    # a tile's rows of gate and of up in one box
    halves = 2 if activation else 1
    rows = weight.values.view(num_experts * halves, out_features // halves, in_features)
    box = [halves, TILE.value // halves, STEP.value]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
    num_items = blocks.capacity * ranges
    num_processors = torch.cuda.get_device_properties(out.device).multi_processor_count
    _fp8_specialized_kernel[(min(num_items, num_processors),)](
        TensorDescriptor.from_tensor(rows, box, layout), out, x.values, x.scales, weight.scales,
        unused if bias is None else bias, unused if topk_weights is None else topk_weights,
        unused if delta is None else delta, blocks.order, blocks.blocks, num_items,
        constants.alpha, 0.0 if limit is None else limit, constants.up_offset,
        IN=in_features, OUT=out_features, X_DIV=blocks.top_k if x.values.dim() == 2 else 1,
        ACTIVATE=activation is not None, HAS_LIMIT=limit is not None, HAS_BIAS=bias is not None,
        HAS_ROUTED=topk_weights is not None, HAS_DELTA=delta is not None, RANGES=ranges,
        GROUPS=groups, STAGES=tiles.stages, STAYS=in_features <= STAYING_COLUMNS, PDL=True,
        num_warps=4, maxnreg=_THREAD_REGISTERS[groups], launch_pdl=True,
    )  # fmt: skip
    return out
