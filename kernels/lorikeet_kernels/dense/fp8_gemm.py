"""Dense projection by an e4m3 matrix on a GPU, of rows quantised before.

    y[r] = sum over groups g of s[r, g] t[row block, g] (W q[r]) over g's columns + bias      (blocks)
    y[r] = s[r] t[out] (W q[r]) + bias                                                        (channels)

Shapes: rows' values [T, in]; weight [out, in]; bias [out]; out [T, out]. Accumulates in float32 (see
`fp8_accumulate`), rounds once; split columns are added up in order by a launch of their own (`split_sum`). A
row's bits depend on no other row. The reference is `fp8_linear_reference`.

Of few rows those that are there are read alone: on an H200 16 times the same row, by all programs at once,
made one row slower than 16 (8192 x 8192, channels: 44.8 us and 29.1). The first columns of a program's part
of the matrix start on their way to L2 before it waits for the launch before.

Floor for few rows: the matrix's bytes at 4.3 TB/s; for many 1,580 TFLOP/s.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.fp8_accumulate import BY_ROW, BY_TILE, accumulate
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.quantize_rows import GROUP, QuantizedRows
from lorikeet_kernels.dense.split_sum import split_sum
from lorikeet_kernels.tiling.dense_tiles import MAX_OWN_ROWS, DenseTiles

LINE = tl.constexpr(128)
"""Bytes that come to L2 together."""


@triton.jit
def _fetch(at):
    """Start the lines at these addresses on their way to L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# projections of as many columns share a kernel, whatever their rows
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["num_rows"])
def _dense_fp8_kernel(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, num_rows, num_columns,
    IN: tl.constexpr, SCALES: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, MATRIX_FIRST: tl.constexpr,
    FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With SPLITS > 1 `out_ptr` takes float32 parts [SPLITS, num_rows, num_columns]."""
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    STEPS: tl.constexpr = (IN + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)
    split = tl.program_id(2)
    begin = split * STEPS
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, inside = r < num_rows, column < num_columns
    # places beyond the rows or the matrix repeat the first; they are never stored
    x_row = tl.where(is_row, r, 0).to(tl.int64)
    weight_row = tl.where(inside, column, 0)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        if FEW:
            ahead = tl.minimum(begin * BLOCK_K + tl.arange(0, AHEAD) * LINE, IN - 1)
            _fetch(weight_ptr + weight_row.to(tl.int64)[:, None] * IN + ahead[None, :])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SCALES == 0:
        x_scale_at, scale_at = x_scale_ptr + x_row, scale_ptr + weight_row
    else:
        x_scale_at = x_scale_ptr + x_row * GROUPS
        scale_row = weight_row if SCALES == BY_ROW else tl.program_id(1) * BLOCK_N
        block = tl.load(map_ptr + scale_row) if HAS_MAP else scale_row // GROUP
        scale_at = scale_ptr + block * GROUPS
    weight_at = weight_ptr + weight_row.to(tl.int64) * IN
    x_at = x_ptr + x_row * IN
    EVEN: tl.constexpr = IN % (BLOCK_K * SPLITS) == 0
    if MATRIX_FIRST:
        acc = accumulate(
            weight_at[:, None] + k[None, :], x_at[None, :] + k[:, None],
            scale_at[:, None] if SCALES == BY_ROW else scale_at, x_scale_at[None, :], scale_ptr, begin,
            IN, BLOCK_N, BLOCK_M, BLOCK_K, STEPS, EVEN, STAGES, SCALES, GROUP, is_row if FEW else None,
        ).T  # fmt: skip
    else:
        acc = accumulate(
            x_at[:, None] + k[None, :], weight_at[None, :] + k[:, None],
            x_scale_at[:, None], scale_at[None, :] if SCALES == BY_ROW else scale_at, scale_ptr, begin,
            IN, BLOCK_M, BLOCK_N, BLOCK_K, STEPS, EVEN, STAGES, SCALES, GROUP,
        )  # fmt: skip
    if SCALES == 0:
        acc *= tl.load(x_scale_at)[:, None] * tl.load(scale_at)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + (split * num_rows + r).to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & inside[None, :])


def dense_fp8_gemm(
    x: QuantizedRows, weight: Fp8Weight, out: torch.Tensor, tiles: DenseTiles, bias: torch.Tensor | None
) -> torch.Tensor:
    """Write the projection into `out` [T, out] and return it; see this module's docstring."""
    num_rows, (out_features, in_features) = out.shape[0], weight.shape
    is_blocked = weight.kind == "block"
    if x.values.shape != (num_rows, in_features) or out.shape[1] != out_features:
        raise ValueError(f"dense_fp8_gemm: x {tuple(x.values.shape)}, out {tuple(out.shape)}")
    tensors = (x.values, x.scales, weight.values, weight.scales, out)
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("dense_fp8_gemm: x, weight, their scales and out must be contiguous")
    if is_blocked and GROUP % tiles.step:
        raise ValueError(f"dense_fp8_gemm: {tiles}: a step must lie within {GROUP} columns")
    if num_rows == 0:
        return out
    shares = weight.block_of_row is None and GROUP % tiles.block_n == 0
    on_gpu = out.device.type == "cuda"
    dependent = {"launch_pdl": True} if on_gpu else {}
    is_split = tiles.splits > 1
    target = out.new_empty((tiles.splits, *out.shape), dtype=torch.float32) if is_split else out
    added = None if is_split else bias
    grid = triton.cdiv(num_rows, tiles.block_m), triton.cdiv(out_features, tiles.block_n), tiles.splits
    _dense_fp8_kernel[grid](
        target, x.values, x.scales, weight.values, weight.scales,
        x.scales if weight.block_of_row is None else weight.block_of_row,
        x.scales if added is None else added, num_rows, out_features,
        IN=in_features,
        SCALES=(BY_TILE.value if shares else BY_ROW.value) if is_blocked else 0,
        HAS_MAP=weight.block_of_row is not None, HAS_BIAS=added is not None, GROUP=GROUP,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.step, STAGES=tiles.stages,
        SPLITS=tiles.splits, AHEAD=tiles.ahead, MATRIX_FIRST=tiles.is_matrix_first,
        FEW=num_rows <= max(MAX_OWN_ROWS, tiles.block_m), PDL=on_gpu, num_warps=tiles.num_warps, **dependent,
    )  # fmt: skip
    return split_sum(target, out, bias) if is_split else out
