"""Device code: start rows on their way from DRAM to L2, ahead of the launch that still writes some of them.

L2 is where all multiprocessors' writes meet, so what was fetched early is never stale.
"""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lorikeet_kernels.lora.output_lanes import PairLane

# of an address and a number of bytes, both multiples of 16; 0 bytes fetch nothing
FETCH = gl.constexpr(
    "{ .reg .pred p; setp.le.s32 p, $2, 0; @p bra SKIP;"
    " cp.async.bulk.prefetch.L2.global [$1], $2; SKIP: mov.b32 $0, 0; }"
)


@gluon.jit
def fetch_rows(
    base_ptr, pairs_ptr, block, left, column, width,
    STRIDE: gl.constexpr, BLOCK: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Fetch [column, min(column + BLOCK, width)) of the rows of a block of `group_blocks`."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    i = gl.arange(0, 32 * WARPS, layout=FLAT)  # a thread a row, so that the first warp has them all
    is_row = (i < left) & (i < BLOCK_M)
    token = gl.load(pairs_ptr + block * BLOCK_M + i, mask=is_row, other=0)
    place = base_ptr + token.to(gl.int64) * STRIDE + column
    size = gl.where(is_row, gl.minimum(BLOCK, width - column) * 2, 0)
    gl.inline_asm_elementwise(
        FETCH, "=r,l,r", [place.to(gl.int64, bitcast=True), size], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fetch_run(place, size, WARPS: gl.constexpr):
    """Fetch `size` bytes from `place` on, where that is more than none."""
    i = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(
        FETCH, "=r,l,r", [(place + i * 0).to(gl.int64, bitcast=True), gl.where(i == 0, size, 0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def can_fetch(rows: torch.Tensor, lanes: Sequence[PairLane] = ()) -> bool:
    """Whether every row of `rows`, and within it every lane, starts and ends at a multiple of 16 bytes."""
    columns = (rows.shape[-1], *(lane.column for lane in lanes), *(lane.width for lane in lanes))
    return rows.element_size() == 2 and rows.data_ptr() % 16 == 0 and all(n % 8 == 0 for n in columns)
