"""Device code in Gluon: the warps of `fp8_ranged_down`, those that load and those that multiply and sum.

What they share, as tuples:

    ring: weights [STAGES, a box of TILE rows, STEP], of which a slot also takes rows to be summed, as many
          bytes of them; the barriers of slots that are full and of slots that are empty; the weight's scale
          of a step, first in [STAGES, LINE]
    stay: the rows of STAYING blocks [STAYING * STEPS * GROUPS, ROWS, STEP]; the barriers of those that are
          full and of those that are empty [STAYING]; their pairs and after them their number
          [STAYING, SCALES]; their routed weights, then their scales, step by step
          [STAYING * (1 + STEPS), SCALES]
    work: the order of the pairs, the blocks, how many of these there are, tokens
    rows: where a range's rows go: BUFFERS of [pairs, columns of a range]; marks: for each range how many
          programs have stored it, then for each how many have read it; the barriers by which warpgroups say
          that they have stored theirs, of even and of odd ranges
"""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# Branches over constants are one.
# pyright: reportPossiblyUnboundVariable=false
# Gluon's tuples grow by +.
# A slot takes weights or rows.
# ruff: noqa: RUF005, SLF001

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

from lorikeet_kernels.experts.fp8_ranged_items import (
    STAYING,
    buffer_of,
    is_many,
    own_item,
    own_items,
    own_sums,
    ranges_of,
)
from lorikeet_kernels.experts.fp8_warps import ROWS, SCALES, STEP, TILE, copy_rows

LINE = gl.constexpr(32)
"""Places of a line of which one is used."""
SLOT = gl.constexpr(8192)
"""16-bit numbers in a slot's bytes."""


@gluon.jit
def _await_full(full, turn):
    """The slot of a turn, when what was copied there has landed."""
    STAGES: gl.constexpr = full.shape[0]
    slot = turn % STAGES
    mbarrier.wait(full.index(slot), turn // STAGES % 2)
    return slot


@gluon.jit
def _await_empty(empty, turn):
    """The slot of a turn, when every warpgroup is done with what was there."""
    STAGES: gl.constexpr = empty.shape[0]
    slot = turn % STAGES
    mbarrier.wait(empty.index(slot), turn // STAGES % 2 ^ 1)
    return slot


@gluon.jit
def _read_mark(mark_ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [mark_ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _await_mark(mark_ptr, wanted):
    """Until a mark is `wanted`: the programs are all on the card, as many as it has multiprocessors."""
    seen = _read_mark(mark_ptr)
    while seen < wanted:
        seen = _read_mark(mark_ptr)


@gluon.jit
def _mark_stored(rows, phase, num_own):
    """Say to all programs that this one has stored a phase's rows, when its warpgroups have said so.

    The loading warps do it, ahead by a ring: a fence waits for all that is on its way to the L2, 0.5 to 1 us,
    in which those that multiply could not go on. Who sees the mark finds what all of them have stored.
    """
    _, marks_ptr, stored = rows
    # without items nothing would keep the others from being two phases ahead, which a barrier can not tell
    mbarrier.wait(stored.index(phase % 2), phase // 2 % 2, pred=num_own > 0)
    gl.atomic_add(marks_ptr + phase, 1, sem="release", scope="gpu")


@gluon.jit
def _copy_block(stay, entry, order_ptr, inputs, index, GROUPS: gl.constexpr):
    """Start the copies of all that stays of a block: rows, pairs and their number, routed weights, scales."""
    x_stay, x_full, x_empty, places, factors = stay
    x_ptr, x_scale_ptr, routed_ptr, _ = inputs
    STEPS: gl.constexpr = x_stay.shape[0] // (STAYING * GROUPS)
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, COPY))[None, :]
    s = gl.arange(0, SCALES, layout=gl.BlockedLayout([1], [32], [4], [0]))
    place = index % STAYING
    line = place * (1 + STEPS)
    first = gl.load(entry)
    count = gl.load(entry + 1)
    x_at = ()
    for part in gl.static_range(GROUPS):
        row = part * ROWS + m
        pair = gl.load(order_ptr + first + gl.where(row < count, row, 0))
        x_at = x_at + (x_ptr + (pair.to(gl.int64) * (STEPS * STEP))[:, None] + k,)
    is_pair = s < count
    pair = gl.load(order_ptr + first + gl.where(is_pair, s, 0))
    mbarrier.wait(x_empty.index(place), index // STAYING % 2 ^ 1)
    for step in gl.static_range(STEPS):
        copy_rows(x_stay, (place * STEPS + step) * GROUPS, x_at, count, m, step * STEP)
        scale_at = x_scale_ptr + pair.to(gl.int64) * STEPS + step
        async_copy.async_copy_global_to_shared(factors.index(line + 1 + step), scale_at, mask=is_pair)
    async_copy.async_copy_global_to_shared(factors.index(line), routed_ptr + pair, mask=is_pair)
    is_count = s == GROUPS * ROWS
    pair_at = gl.where(is_count, entry + 1, order_ptr + first + s)
    async_copy.async_copy_global_to_shared(places.index(place), pair_at, mask=is_pair | is_count)
    async_copy.mbarrier_arrive(x_full.index(place), increment_count=False)


@gluon.jit
def _copy_weights(
    ring, weight_desc, scale_ptr, expert, begin, end, turn, STEPS: gl.constexpr, ALL_TILES: gl.constexpr,
):  # fmt: skip
    """Start the copies of some of an expert's tiles, step by step; returns the next turn."""
    weight_ring, full, empty, weight_scales = ring
    one = gl.arange(0, LINE, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for step in range(begin * STEPS, end * STEPS):
        slot = _await_empty(empty, turn)
        landed = full.index(slot)
        mbarrier.expect(landed, TILE * STEP)
        at = [expert, step // STEPS * TILE, step % STEPS * STEP]
        tma.async_copy_global_to_shared(weight_desc, at, landed, weight_ring.index(slot))
        scale_at = scale_ptr + expert.to(gl.int64) * (ALL_TILES * STEPS) + step
        async_copy.async_copy_global_to_shared(weight_scales.index(slot), scale_at + one, mask=one == 0)
        async_copy.mbarrier_arrive(landed, increment_count=False)
        turn += 1
    return turn


@gluon.jit
def _copy_summed(ring, rows_ptr, buffer, num_tokens, turn, WIDTH: gl.constexpr, TOP_K: gl.constexpr):
    """Start the copies of the rows that this program sums of a range; returns the next turn."""
    weight_ring, full, empty = ring[:3]
    TOKENS: gl.constexpr = SLOT // (WIDTH * TOP_K)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    summed = gl.arange(0, SLOT, layout=gl.BlockedLayout([8], [32], [4], [0]))
    for sum_number in range(own_sums(num_tokens, TOKENS)):
        token = (sum_number * gl.num_programs(0) + gl.program_id(0)) * TOKENS
        slot = _await_empty(empty, turn)
        at = rows_ptr + (buffer.to(gl.int64) * (num_tokens * TOP_K) + token * TOP_K) * WIDTH
        to = weight_ring.index(slot)._reinterpret(rows_ptr.dtype.element_ty, [SLOT], PLAIN)
        is_row = summed < (num_tokens - token) * (TOP_K * WIDTH)
        # past the L1, which may hold a buffer's former rows
        async_copy.async_copy_global_to_shared(to, at + summed, mask=is_row, cache_modifier=".cg")
        mbarrier.arrive(full.index(slot), count=1)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        turn += 1
    return turn


@gluon.jit
def load(
    ring, stay, work, rows, inputs, weight_desc,
    TILES: gl.constexpr, TOP_K: gl.constexpr, RANGES: gl.constexpr, LAG: gl.constexpr,
    BUFFERS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The loading warps: of every range each own block's weights, then what is summed of a former range.

    `inputs`: the pairs' values and scales, routed weights, the weight's scales.
    """
    order_ptr, blocks_ptr, used, num_tokens = work
    rows_ptr, marks_ptr, _ = rows
    STEPS: gl.constexpr = stay[0].shape[0] // (STAYING * GROUPS)
    programs = gl.num_programs(0)
    has_many = is_many(used)
    phases = gl.where(has_many, 1, RANGES)
    num_own = own_items(used)
    turn = 0
    for phase in range(phases + LAG):
        # Asynchronous copies and the copy engine write the same slots. Whoever read one has fenced already;
        # Triton does not know, and without this one it puts a fence before each step.
        fence_async_shared()
        if phase < phases:
            if phase >= BUFFERS:
                _await_mark(marks_ptr + RANGES + phase - BUFFERS, programs)
            for index in range(num_own):
                block, begin, end = own_item(index, phase, has_many, RANGES)
                entry = blocks_ptr + block * 4
                if phase == 0:
                    _copy_block(stay, entry, order_ptr, inputs, index, GROUPS)
                expert = gl.load(entry + 2)
                turn = _copy_weights(
                    ring, weight_desc, inputs[3], expert, begin * TILES, end * TILES, turn, STEPS,
                    RANGES * TILES,
                )  # fmt: skip
        if (phase > 0) & (phase <= phases):
            _mark_stored(rows, phase - 1, num_own)
        if phase >= LAG:
            _await_mark(marks_ptr + phase - LAG, programs)
            begin, end = ranges_of(phase - LAG, has_many, RANGES)
            for number in range(begin, end):
                buffer = buffer_of(number, has_many, BUFFERS)
                turn = _copy_summed(ring, rows_ptr, buffer, num_tokens, turn, TILES * TILE, TOP_K)


@gluon.jit
def _multiply_step(
    part: gl.constexpr, ring, stay, place, step, turn,
    STEPS: gl.constexpr, GROUPS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """A step's products times their scales."""
    weight_ring, full, empty, weight_scales = ring
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    slot = _await_full(full, turn)
    weights = weight_ring.index(slot).reshape([TILE, STEP]).permute((1, 0))
    started = warpgroup_mma(
        stay[0].index((place * STEPS + step) * GROUPS + part), weights,
        gl.zeros([ROWS, TILE], gl.float32, layout=ACC), use_acc=False, is_async=True,
    )  # fmt: skip
    x_scales = stay[4].index(place * (1 + STEPS) + 1 + step).slice(part * ROWS, ROWS)
    factor = x_scales.load(ROW)[:, None] * weight_scales.index(slot).slice(0, 1).load(ROW)[:, None]
    done = warpgroup_mma_wait(0, (started,))
    mbarrier.arrive(empty.index(slot), count=1)
    return done * factor


@gluon.jit
def _multiply_block(
    part: gl.constexpr, ring, stay, place, to_ptr, turn, dtype: gl.constexpr,
    TILES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Multiply this warpgroup's pairs of a block by a range, and store their rows; returns the next turn."""
    full, empty = ring[1], ring[2]
    places, factors = stay[3], stay[4]
    STEPS: gl.constexpr = stay[0].shape[0] // (STAYING * GROUPS)
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 32]
    )
    # rows are stored by neighbouring lanes, 16 bytes each
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    w = gl.arange(0, ROWS, layout=ROW)
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, WIDE))[None, :]
    own = gl.max(places.index(place).slice(GROUPS * ROWS, 1).load(ROW), 0) - part * ROWS
    if own > 0:
        for tile in range(TILES):
            acc = gl.zeros([ROWS, TILE], gl.float32, layout=ACC)
            for step in range(STEPS):
                acc += _multiply_step(part, ring, stay, place, step, turn, STEPS, GROUPS, ACC)
                turn += 1
            routed = factors.index(place * (1 + STEPS)).slice(part * ROWS, ROWS)
            acc *= routed.load(gl.SliceLayout(1, ACC))[:, None]
            y = gl.convert_layout(acc.to(dtype), WIDE)
            # only now: beside two accumulators there are no registers for addresses
            stored = places.index(place).slice(part * ROWS, ROWS).load(ROW)
            at = to_ptr + (stored.to(gl.int64) * (TILES * TILE) + tile * TILE)[:, None] + column
            # the rows are to stay in the L2, what streams by is not: so far as a store can say
            gl.store(at, y, mask=(w < own)[:, None], eviction_policy="evict_last")
    else:
        # the others' steps pass by: a slot is empty when every warpgroup has said so
        for _ in range(TILES * STEPS):
            mbarrier.arrive(empty.index(_await_full(full, turn)), count=1)
            turn += 1
    return turn


@gluon.jit
def _sum_range(
    part: gl.constexpr, ring, finish, range_number, num_tokens, turn,
    WIDTH: gl.constexpr, TOP_K: gl.constexpr, OUT: gl.constexpr, GROUPS: gl.constexpr,
    HAS_SHARED: gl.constexpr,
):  # fmt: skip
    """Sum this warpgroup's share of the tokens over their experts; returns the next turn."""
    weight_ring, full, empty = ring[:3]
    out_ptr, shared_ptr = finish
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    TOKENS: gl.constexpr = SLOT // (WIDTH * TOP_K)
    LANES: gl.constexpr = 32 if WIDTH > TILE else 16
    SUM: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, SUM))
    column = range_number * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, SUM))[None, :]
    for sum_number in range(own_sums(num_tokens, TOKENS)):
        token = (sum_number * gl.num_programs(0) + gl.program_id(0)) * TOKENS + t
        is_own = (sum_number + range_number) % GROUPS == part
        at = (token.to(gl.int64) * OUT)[:, None] + column
        is_token = (token < num_tokens)[:, None]
        if HAS_SHARED:  # asked for before the wait
            shared = gl.load(shared_ptr + at, mask=is_token & is_own, other=0.0)
        slot = _await_full(full, turn)
        if is_own:
            summed = weight_ring.index(slot)._reinterpret(dtype, [TOKENS, TOP_K * WIDTH], PLAIN)
            total = gl.zeros([TOKENS, WIDTH], gl.float32, layout=SUM)
            for expert in gl.static_range(TOP_K):
                total += summed.slice(expert * WIDTH, WIDTH, dim=1).load(SUM).to(gl.float32)
            fence_async_shared()  # the copy engine writes here next
            mbarrier.arrive(empty.index(slot), count=1)
            if HAS_SHARED:
                total = total.to(dtype).to(gl.float32) + shared.to(gl.float32)
            gl.store(out_ptr + at, total.to(dtype), mask=is_token, eviction_policy="evict_first")
        else:
            mbarrier.arrive(empty.index(slot), count=1)
        turn += 1
    return turn


@gluon.jit
def multiply(
    part: gl.constexpr, ring, stay, work, rows, finish,
    TILES: gl.constexpr, TOP_K: gl.constexpr, RANGES: gl.constexpr, LAG: gl.constexpr,
    BUFFERS: gl.constexpr, GROUPS: gl.constexpr, HAS_SHARED: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies its ROWS of each own block's pairs, and sums its share of the tokens.

    `finish`: where the sums go, and the rows that are added to them.
    """
    x_full, x_empty = stay[1], stay[2]
    used, num_tokens = work[2], work[3]
    rows_ptr, marks_ptr, stored = rows
    dtype: gl.constexpr = rows_ptr.dtype.element_ty
    WIDTH: gl.constexpr = TILES * TILE
    has_many = is_many(used)
    phases = gl.where(has_many, 1, RANGES)
    num_own = own_items(used)
    turn = 0
    for phase in range(phases + LAG):
        if phase < phases:
            for index in range(num_own):
                _, begin, end = own_item(index, phase, has_many, RANGES)
                place = index % STAYING
                mbarrier.wait(x_full.index(place), index // STAYING % 2, pred=phase == 0)
                if phase == 0:
                    fence_async_shared()  # asynchronous copies are not of the tensor cores' proxy
                for number in range(begin, end):
                    buffer = buffer_of(number, has_many, BUFFERS)
                    to_ptr = rows_ptr + buffer.to(gl.int64) * (num_tokens * TOP_K) * WIDTH
                    turn = _multiply_block(part, ring, stay, place, to_ptr, turn, dtype, TILES, GROUPS)
                if has_many:
                    mbarrier.arrive(x_empty.index(place), count=1)
            gl.thread_barrier()
            mbarrier.arrive(stored.index(phase % 2), count=1)
        if phase >= LAG:
            begin, end = ranges_of(phase - LAG, has_many, RANGES)
            for number in range(begin, end):
                turn = _sum_range(
                    part, ring, finish, number, num_tokens, turn, WIDTH, TOP_K, RANGES * WIDTH, GROUPS,
                    HAS_SHARED,
                )  # fmt: skip
            if part == 0:
                # what it counts are copies that have landed here: nothing is left to be ordered
                gl.thread_barrier()
                gl.atomic_add(marks_ptr + RANGES + phase - LAG, 1, sem="relaxed", scope="gpu")
