"""Device code: start a run of bytes on its way from DRAM to L2, ahead of the launch that still writes some.

L2 is where all multiprocessors' writes meet, so what was fetched early is never stale.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lorikeet_kernels.lora.output_lanes import PairLane

# of an address and a number of bytes, both multiples of 16; 0 bytes fetch nothing
FETCH_ROW = tl.constexpr(
    "{ .reg .pred p; setp.le.s32 p, $2, 0; @p bra SKIP;"
    " cp.async.bulk.prefetch.L2.global [$1], $2; SKIP: mov.b32 $0, 0; }"
)


@triton.jit
def fetch_row(place, num_bytes):
    """Fetch `num_bytes` from each address of `place`."""
    tl.inline_asm_elementwise(
        FETCH_ROW,
        "=r,l,r",
        [place.to(tl.int64, bitcast=True), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def can_fetch(rows: torch.Tensor, lanes: Sequence[PairLane] = ()) -> bool:
    """Whether every row of `rows`, and within it every lane, starts and ends at a multiple of 16 bytes."""
    columns = (rows.shape[-1], *(lane.column for lane in lanes), *(lane.width for lane in lanes))
    return rows.element_size() == 2 and rows.data_ptr() % 16 == 0 and all(n % 8 == 0 for n in columns)
