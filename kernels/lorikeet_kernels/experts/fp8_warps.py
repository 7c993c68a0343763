"""Device code in Gluon: the warps of `fp8_specialized`, those that load and those that multiply.

What they share, as tuples:

    ring: weights [STAGES, a box of TILE rows, STEP], the barriers of slots that are full and of slots that
          are empty, the pairs' rows [STAGES * GROUPS, ROWS, STEP], and without an activation scales
          [STAGES, SCALES], the pairs', then the weight's: beside gate's and up's they would cost a stage
    stay: where rows stay, there are two items' [2 * steps * GROUPS, ROWS, STEP], and this is the barriers of
          those that are full and of those that are empty
    work: the order of the pairs, and the items: blocks, and their number in ranges of tiles
    scales: all of the pairs', all of the weight's
    finish: where the results go, bias, routed weights, delta, then the activation's numbers
"""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# Branches over constants are one.
# pyright: reportPossiblyUnboundVariable=false
# Gluon's tuples grow by +.
# ruff: noqa: RUF005

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

STEP = gl.constexpr(128)
"""Columns of a step, which share a scale."""
TILE = gl.constexpr(128)
"""The matrix's rows of a tile; with an activation 64 of gate's and the same of up's."""
ROWS = gl.constexpr(64)
"""Pairs of a warpgroup."""
SCALES = gl.constexpr(256)
"""Places for a step's scales."""


@gluon.jit
def turn_place(number):
    """Which one of a round's items is this program's: programs take turns forwards and backwards.

    An expert's last block has fewer pairs: where every expert has two, a program would else have all the
    short ones or none.
    """
    program = gl.program_id(0)
    return gl.where(number % 2 == 0, program, gl.num_programs(0) - 1 - program)


@gluon.jit
def _item(items, number, RANGES: gl.constexpr, TILES: gl.constexpr):
    """This program's `number`-th item: its pairs' first place, their number, expert, first tile, last + 1."""
    blocks_ptr, num_items = items
    PER_ITEM: gl.constexpr = (TILES + RANGES - 1) // RANGES
    item = number * gl.num_programs(0) + turn_place(number)
    is_any = item < num_items
    item = gl.where(is_any, item, 0)
    entry = blocks_ptr + item // RANGES * 4
    count = gl.where(is_any, gl.load(entry + 1), 0)
    begin = item % RANGES * PER_ITEM
    return gl.load(entry), count, gl.load(entry + 2), begin, gl.minimum(begin + PER_ITEM, TILES)


@gluon.jit
def copy_rows(x_ring, first, x_at, count, m, offset):
    """Start the copies of a step of the pairs' rows, 64 of them into each of the slots from `first` on."""
    for part in gl.static_range(len(x_at)):
        if count > part * ROWS:
            # rows beyond the pairs are zeros and move nothing
            is_row = (part * ROWS + m < count)[:, None]
            to = x_ring.index(first + part)
            async_copy.async_copy_global_to_shared(to, x_at[part] + offset, mask=is_row)


@gluon.jit
def load(
    ring, stay, work, scales, weight_desc, x_ptr,
    IN: gl.constexpr, OUT: gl.constexpr, X_DIV: gl.constexpr, ACTIVATE: gl.constexpr, RANGES: gl.constexpr,
    GROUPS: gl.constexpr, STAYS: gl.constexpr,
):  # fmt: skip
    """The loading warps: every step of every item into the ring."""
    weight_ring, full, empty, x_ring = ring[:4]
    order_ptr, items = work
    STAGES: gl.constexpr = full.shape[0]
    STEPS: gl.constexpr = IN // STEP
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, COPY))[None, :]
    s = gl.arange(0, SCALES, layout=gl.BlockedLayout([1], [32], [4], [0]))
    turn = 0
    for number in range(gl.cdiv(items[1], gl.num_programs(0))):
        first, count, expert, begin, end = _item(items, number, RANGES, OUT // TILE)
        if count > 0:
            x_at = ()
            for part in gl.static_range(GROUPS):
                place = part * ROWS + m
                pair = gl.load(order_ptr + first + gl.where(place < count, place, 0))
                x_at = x_at + (x_ptr + ((pair // X_DIV).to(gl.int64) * IN)[:, None] + k,)
            if not ACTIVATE:
                pair = gl.load(order_ptr + first + gl.where(s < count, s, 0))
                x_scale_at = scales[0] + (pair // X_DIV).to(gl.int64) * STEPS
                is_scale = (s < count) | (s == GROUPS * ROWS)
            if STAYS:
                # no item without pairs is before one with pairs
                half = number % 2
                mbarrier.wait(stay[1].index(half), number // 2 % 2 ^ 1)
                for step in range(STEPS):
                    copy_rows(x_ring, (half * STEPS + step) * GROUPS, x_at, count, m, step * STEP)
                async_copy.mbarrier_arrive(stay[0].index(half), increment_count=False)
            for tile in range(begin, end):
                if not ACTIVATE:
                    tile_scale_at = scales[1] + (expert.to(gl.int64) * (OUT // TILE) + tile) * STEPS
                    scale_at = gl.where(s < GROUPS * ROWS, x_scale_at, tile_scale_at)
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
                    if not ACTIVATE:
                        slot_scales = ring[4].index(slot)
                        async_copy.async_copy_global_to_shared(slot_scales, scale_at + step, mask=is_scale)
                    if not STAYS:
                        copy_rows(x_ring, slot * GROUPS, x_at, count, m, step * STEP)
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
def _load_scales(scales_at, step):
    x_scale_at, gate_scale_at, up_scale_at = scales_at
    return gl.load(x_scale_at + step), gl.load(gate_scale_at + step), gl.load(up_scale_at + step)


@gluon.jit
def _sum_tile(
    part: gl.constexpr, ring, scales_at, item_slot, turn,
    STEPS: gl.constexpr, ACTIVATE: gl.constexpr, GROUPS: gl.constexpr, STAYS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """A tile's products, each step's times its scales, and how many steps there have been.

    With an activation scales are at `scales_at`: the pairs', gate's, up's.
    """
    weight_ring, full, empty, x_ring = ring[:4]
    STAGES: gl.constexpr = full.shape[0]
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    is_gate = (gl.arange(0, TILE, layout=gl.SliceLayout(0, ACC)) < TILE // 2)[None, :]
    acc = gl.zeros([ROWS, TILE], gl.float32, layout=ACC)
    if ACTIVATE:
        x_scale, gate_scale, up_scale = _load_scales(scales_at, 0)
    for step in range(STEPS):
        slot = turn % STAGES
        mbarrier.wait(full.index(slot), turn // STAGES % 2)
        x_slot = item_slot + step
        if not STAYS:
            x_slot = slot
            fence_async_shared()  # asynchronous copies are not of the tensor cores' proxy
        weights = weight_ring.index(slot).reshape([TILE, STEP]).permute((1, 0))
        started = warpgroup_mma(
            x_ring.index(x_slot * GROUPS + part), weights,
            gl.zeros([ROWS, TILE], gl.float32, layout=ACC), use_acc=False, is_async=True,
        )  # fmt: skip
        if ACTIVATE:
            # the next step's scales come meanwhile
            after = _load_scales(scales_at, gl.minimum(step + 1, STEPS - 1))
            # this one's pass the wait too: the MMAs start before they are there
            done, x_scale = warpgroup_mma_wait(0, (started, x_scale))
            mbarrier.arrive(empty.index(slot), count=1)
            row_factor = x_scale[:, None]
            factor = gl.where(is_gate, row_factor * gate_scale, row_factor * up_scale)
            x_scale, gate_scale, up_scale = after
        else:
            scales = ring[4].index(slot)
            factor = scales.slice(part * ROWS, ROWS).load(ROW)[:, None]
            factor *= scales.slice(GROUPS * ROWS, 1).load(ROW)[:, None]
            done = warpgroup_mma_wait(0, (started,))
            mbarrier.arrive(empty.index(slot), count=1)
        acc += done * factor
        turn += 1
    return acc, turn


@gluon.jit
def multiply(
    part: gl.constexpr, shared,
    IN: gl.constexpr, OUT: gl.constexpr, X_DIV: gl.constexpr, ACTIVATE: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ROUTED: gl.constexpr, HAS_DELTA: gl.constexpr,
    RANGES: gl.constexpr, GROUPS: gl.constexpr, STAYS: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: its ROWS of each item's pairs."""
    ring, stay, work, scales, finish = shared
    full, empty = ring[1], ring[2]
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
                fence_async_shared()
            x_scale_at = scales[0] + (pair // X_DIV).to(gl.int64) * STEPS
            for tile in range(begin, end):
                scales_at = ()
                if ACTIVATE:
                    gate_scale_at = scales[1] + (expert.to(gl.int64) * (OUT // TILE) + tile // 2) * STEPS
                    scales_at = (x_scale_at, gate_scale_at, gate_scale_at + OUT // 2 // TILE * STEPS)
                acc, turn = _sum_tile(
                    part, ring, scales_at, number % 2 * STEPS, turn, STEPS, ACTIVATE, GROUPS, STAYS, ACC
                )
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
