"""Device code in Gluon: rows of queries over a range of a request's latents, which pass a ring of TMA copies.

What `latent_scan` computes, with three warps that copy latents (half a row each) and keys, so that who
multiplies meets neither their latency nor the table's. A step is STEP latents. They lie in shared memory
once, as the first operand of both products: latents x queries, then latents^T x probabilities; the queries
stay there and the sums [LATENT, ROWS] in registers. Copies are whole pages; what a page holds behind the
sequence's end is hidden in the scores and zeroed as a value, since 0 times what nobody wrote may be NaN.
"""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# Gluon has no public way to see one allocation as pages, panels and steps.
# pyright: reportPrivateUsage=false
# Gluon's tuples grow by +.
# ruff: noqa: RUF005, SLF001

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STEP = gl.constexpr(64)
"""Latents of a step: the rows that a tensor core instruction takes of its first operand."""
PANEL = gl.constexpr(64)
"""Elements of a row that lie side by side in shared memory, 128 bytes."""
COPY_REGISTERS = gl.constexpr(40)
"""Of a thread that copies; with fewer it spills."""
HIDDEN = gl.constexpr(-1.0e30)  # instead of -inf, whose difference with itself is NaN


@gluon.jit
def _find_pages(table, start, last_page, BLOCK_TOKENS: gl.constexpr):
    """The pages of a step from `start` on; behind the last page it repeats, as no other is sure to exist."""
    pages = ()
    for page in gl.static_range(STEP // BLOCK_TOKENS):
        pages = pages + (gl.load(table + gl.minimum(start // BLOCK_TOKENS + page, last_page)),)
    return pages


@gluon.jit
def _copy_columns(
    rows, table, begin, end, last_page, pieces, full, free,
    COLUMN: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr, PANELS: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy panels [FIRST, LAST) of the PANELS from COLUMN on, of all steps in [begin, end), into a ring.

    `pieces` [STAGES * PANELS * pages, BLOCK_TOKENS, PANEL] is that ring: a panel of a step is STEP rows.
    """
    PAGES: gl.constexpr = STEP // BLOCK_TOKENS
    pages = _find_pages(table, begin, last_page, BLOCK_TOKENS)
    slot = 0
    phase = 1  # a barrier that nobody arrived at yet takes the phase before its first for complete
    for start in range(begin, end, STEP):
        following = _find_pages(table, start + STEP, last_page, BLOCK_TOKENS)  # a step ahead of their use
        mbarrier.wait(free.index(slot), phase)
        done = full.index(slot)
        mbarrier.expect(done, (LAST - FIRST) * STEP * PANEL * 2)
        for page in gl.static_range(PAGES):
            for panel in gl.static_range(FIRST, LAST):
                tma.async_copy_global_to_shared(
                    rows, [pages[page] * BLOCK_TOKENS, COLUMN + panel * PANEL], done,
                    pieces.index((slot * PANELS + panel) * PAGES + page),
                )  # fmt: skip
        pages = following
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def _zero_behind(panels, first, left, PANELS: gl.constexpr, WARPS: gl.constexpr):
    """Zero the rows from `left` on of the PANELS panels from `first` on."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, STEP, layout=gl.SliceLayout(1, COPY))[:, None]
    for panel in range(PANELS):
        place = panels.index(first + panel)
        values = place.load(COPY)
        place.store(gl.where(row < left, values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _attend(
    q_at, is_row, position, begin, end, length, scale_log2, latents, panels, keys, latent_full, latent_free,
    key_full, key_free, q_latent, q_key, probabilities,
    ROWS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, WARPS: gl.constexpr, LOADED: gl.constexpr,
    SCORE: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """The products and the softmax between them: (acc [LATENT, ROWS], largest [ROWS], total [ROWS])."""
    d = gl.arange(0, LATENT, layout=gl.SliceLayout(0, LOADED))
    r = gl.arange(0, ROPE, layout=gl.SliceLayout(0, LOADED))
    q_latent.store(gl.load(q_at[:, None] + d[None, :], mask=is_row[:, None], other=0.0))
    q_key.store(gl.load(q_at[:, None] + LATENT + r[None, :], mask=is_row[:, None], other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    dtype: gl.constexpr = probabilities.dtype
    n = gl.arange(0, STEP, layout=gl.SliceLayout(1, SCORE))
    acc = gl.zeros([LATENT, ROWS], gl.float32, layout=ACC)
    none = gl.zeros([STEP, ROWS], gl.float32, layout=SCORE)
    totals = none  # each thread's own: only the largest scores are exchanged in a step
    largest = gl.full([ROWS], HIDDEN, gl.float32, layout=gl.SliceLayout(0, SCORE))
    slot = 0
    phase = 0
    key_slot = 0
    key_phase = 0
    for start in range(begin, end, STEP):
        mbarrier.wait(latent_full.index(slot), phase)
        step = latents.index(slot)
        if start + STEP > length:
            _zero_behind(panels, slot * (LATENT // PANEL), length - start, LATENT // PANEL, WARPS)
        score = warpgroup_mma(step, q_latent.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(key_full.index(key_slot), key_phase)
        score = warpgroup_mma(keys.index(key_slot), q_key.permute((1, 0)), score, is_async=True)
        score = warpgroup_mma_wait(0, (score,))
        gl.thread_barrier()  # all warps' products are done, not this one's alone
        mbarrier.arrive(key_free.index(key_slot), count=1)
        visible = (start + n < length)[:, None]
        if CAUSAL:
            visible = visible & ((start + n)[:, None] <= position[None, :])
        score = gl.where(visible, score * scale_log2, HIDDEN)
        highest = gl.maximum(largest, gl.max(score, axis=0))
        p = gl.exp2(score - highest[None, :])
        shrink = gl.exp2(largest - highest)
        largest = highest
        totals = totals * shrink[None, :] + p
        probabilities.store(p.to(dtype))
        fence_async_shared()
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(0, ACC))[None, :]
        acc = warpgroup_mma(step.permute((1, 0)), probabilities, acc, is_async=True)
        acc = warpgroup_mma_wait(0, (acc,))
        gl.thread_barrier()
        mbarrier.arrive(latent_free.index(slot), count=1)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        key_slot += 1
        if key_slot == KEY_STAGES:
            key_slot = 0
            key_phase ^= 1
    return acc, largest, gl.sum(totals, axis=0)


@gluon.jit
def scan_ring(
    q_at, is_row, position, begin, end, length, rows, table, scale_log2,
    ROWS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    CAUSAL: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, WARPS: gl.constexpr,
    LOADED: gl.constexpr, SCORE: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """(sum of p v [LATENT, ROWS] in ACC, largest score [ROWS], sum of p [ROWS]) over keys [begin, end).

    As `latent_scan.scan_latents`; `rows` describes the cache as [pages * BLOCK_TOKENS, LATENT + ROPE], q_at
    and is_row are in LOADED's rows, position is in SCORE's.
    """
    dtype: gl.constexpr = q_at.dtype.element_ty
    PAGES: gl.constexpr = STEP // BLOCK_TOKENS
    PANELS: gl.constexpr = LATENT // PANEL
    KEY_PANELS: gl.constexpr = ROPE // PANEL
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, ROWS], dtype)
    pieces = gl.allocate_shared_memory(dtype, [STAGES * PANELS * PAGES, BLOCK_TOKENS, PANEL], WIDE)
    key_pieces = gl.allocate_shared_memory(
        dtype, [KEY_STAGES * KEY_PANELS * PAGES, BLOCK_TOKENS, PANEL], WIDE
    )
    latents = pieces._reinterpret(dtype, [STAGES, STEP, LATENT], WIDE)
    panels = pieces._reinterpret(dtype, [STAGES * PANELS, STEP, PANEL], WIDE)
    keys = key_pieces._reinterpret(dtype, [KEY_STAGES, STEP, ROPE], WIDE)
    q_latent = gl.allocate_shared_memory(dtype, [ROWS, LATENT], WIDE)
    q_key = gl.allocate_shared_memory(dtype, [ROWS, ROPE], WIDE)
    probabilities = gl.allocate_shared_memory(dtype, [STEP, ROWS], NARROW)
    latent_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    latent_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_full = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(latent_full.index(slot), count=2)  # both halves
        mbarrier.init(latent_free.index(slot), count=1)
    for slot in gl.static_range(KEY_STAGES):
        mbarrier.init(key_full.index(slot), count=1)
        mbarrier.init(key_free.index(slot), count=1)
    fence_async_shared()
    last_page = gl.maximum(length - 1, 0) // BLOCK_TOKENS
    return gl.warp_specialize(
        [
            (
                _attend,
                (
                    q_at, is_row, position, begin, end, length, scale_log2, latents, panels, keys,
                    latent_full, latent_free, key_full, key_free, q_latent, q_key, probabilities,
                    ROWS, LATENT, ROPE, CAUSAL, STAGES, KEY_STAGES, WARPS, LOADED, SCORE, ACC,
                ),
            ),
            (
                _copy_columns,
                (
                    rows, table, begin, end, last_page, pieces, latent_full, latent_free,
                    0, 0, PANELS // 2, PANELS, BLOCK_TOKENS, STAGES,
                ),
            ),
            (
                _copy_columns,
                (
                    rows, table, begin, end, last_page, pieces, latent_full, latent_free,
                    0, PANELS // 2, PANELS, PANELS, BLOCK_TOKENS, STAGES,
                ),
            ),
            (
                _copy_columns,
                (
                    rows, table, begin, end, last_page, key_pieces, key_full, key_free,
                    LATENT, 0, KEY_PANELS, KEY_PANELS, BLOCK_TOKENS, KEY_STAGES,
                ),
            ),
        ],
        [1, 1, 1],
        [COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
