"""`few_rows_linear` on the tensor cores, for so many rows that multiplying them one by one takes time.

Up to 16 rows of x are one operand, `rows` rows of the weight the other. A lane loads 16 bytes along a row of
either into the very registers that the tensor cores read, so that nothing passes through shared memory but
the sums: every warp multiplies its own share of the columns, 64 of each 64 * warps, and the warps' sums are
added up last. The weight is loaded whole before the wait, x behind it.

A row's bits depend neither on the other rows nor on their number while the tiles are the same.

Measured on an H200, us, 8 and 16 rows (floor, cuBLAS): gpt-oss-20b qkv 14.3 and 14.9 (6.9, 10.1), o 10.4
and 11.5 (5.5, 11.4); Qwen3-30B-A3B o 7.5 and 8.9 (3.9, 9.1).
"""

# A Gluon kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from lorikeet_kernels.launch.grid_dependency import launch_next_grid, wait_for_grid
from lorikeet_kernels.tiling.few_rows_tiles import PRODUCT_COLUMNS, FewRowsTiles

BLOCK_M = 16


@gluon.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["out_ptr", "bias_ptr"])
def _few_rows_products_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, num_rows,
    IN: gl.constexpr, OUT: gl.constexpr, HAS_BIAS: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    DEPTH: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    X: gl.constexpr = gl.DotOperandLayout(0, ACC, 8)
    W: gl.constexpr = gl.DotOperandLayout(1, ACC, 8)
    SUM: gl.constexpr = gl.SliceLayout(0, ACC)
    CHUNK: gl.constexpr = DEPTH * WARPS
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, W)))
    # rows beyond the weight repeat the last one; they are never stored
    row = gl.minimum(row, OUT - 1).to(gl.int64)
    w_warp = DEPTH * gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, W)))
    w_k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, gl.SliceLayout(2, W)))
    w_column = w_warp[:, None, None] + w_k[None, :, None]
    w_place = weight_ptr + row[None, None, :] * IN + w_column
    parts = ()
    for c in gl.static_range(CHUNKS):
        if (c + 1) * CHUNK <= IN:
            part = gl.load(w_place + c * CHUNK)
        else:
            part = gl.load(w_place + c * CHUNK, mask=w_column + c * CHUNK < IN, other=0.0)
        parts = parts + (part,)  # noqa: RUF005 (Gluon unpacks nothing into a tuple)
    to_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SUM))
    to_column = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUM))
    inside = to_column < OUT
    if HAS_BIAS:
        bias = gl.load(bias_ptr + to_column, mask=inside, other=0.0).to(gl.float32)
    if PDL:
        wait_for_grid()
        launch_next_grid()
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))
    x_warp = DEPTH * gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))
    x_k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))
    x_column = x_warp[:, None, None] + x_k[None, None, :]
    x_place = x_ptr + (m * IN)[None, :, None] + x_column
    is_row = (m < num_rows)[None, :, None]
    # two sums in turn: a product need not wait for the one before it
    even = gl.zeros([WARPS, BLOCK_M, ROWS], gl.float32, layout=ACC)
    odd = gl.zeros([WARPS, BLOCK_M, ROWS], gl.float32, layout=ACC)
    for c in gl.static_range(CHUNKS):
        if (c + 1) * CHUNK <= IN:
            x = gl.load(x_place + c * CHUNK, mask=is_row, other=0.0)
        else:
            x = gl.load(x_place + c * CHUNK, mask=is_row & (x_column + c * CHUNK < IN), other=0.0)
        if c % 2 == 0:
            even = mma_v2(x, parts[c], even)
        else:
            odd = mma_v2(x, parts[c], odd)
    y = gl.sum(even + odd, axis=0)
    if HAS_BIAS:
        y += bias[None, :]
    place = out_ptr + to_row[:, None] * OUT + to_column[None, :]
    gl.store(place, y.to(out_ptr.dtype.element_ty), mask=(to_row < num_rows)[:, None] & inside[None, :])


def few_rows_products(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tiles: FewRowsTiles
) -> None:
    """Launch; `few_rows_linear` has looked at the tensors."""
    num_rows, (out_features, in_features) = x.shape[0], weight.shape
    pdl = x.device.type == "cuda"
    _few_rows_products_kernel[(triton.cdiv(out_features, tiles.rows),)](
        out, x, weight, out if bias is None else bias, num_rows,
        IN=in_features, OUT=out_features, HAS_BIAS=bias is not None, BLOCK_M=BLOCK_M, ROWS=tiles.rows,
        DEPTH=PRODUCT_COLUMNS, CHUNKS=triton.cdiv(in_features, PRODUCT_COLUMNS * tiles.num_warps),
        WARPS=tiles.num_warps, PDL=pdl, num_warps=tiles.num_warps,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
