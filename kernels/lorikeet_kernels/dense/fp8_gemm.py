"""Dense projection by an e4m3 matrix on a GPU, of rows quantised before.

    y[r] = sum over groups g of s[r, g] t[row block, g] (W q[r]) over g's columns + bias      (blocks)
    y[r] = s[r] t[out] (W q[r]) + bias                                                        (channels)

Shapes: rows' values [T, in]; weight [out, in]; bias [out]; out [T, out]. Accumulates in float32 (see
`fp8_accumulate`), rounds once. A row's bits depend on no other row. The reference is `fp8_linear_reference`.

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
from lorikeet_kernels.tiling.dense_tiles import DenseTiles


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["num_rows"])
def _dense_fp8_kernel(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, num_rows,
    IN: tl.constexpr, OUT: tl.constexpr, SCALES: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    STEPS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, inside = r < num_rows, column < OUT
    # places beyond the rows or the matrix repeat the first; they are never stored
    x_row = tl.where(is_row, r, 0).to(tl.int64)
    weight_row = tl.where(inside, column, 0)
    k = tl.arange(0, BLOCK_K)
    if SCALES == 0:
        x_scale_at = (x_scale_ptr + x_row)[:, None]
        scale_at = (scale_ptr + weight_row)[None, :]
    else:
        x_scale_at = (x_scale_ptr + x_row * GROUPS)[:, None]
        scale_row = weight_row[None, :] if SCALES == BY_ROW else tl.program_id(1) * BLOCK_N
        block = tl.load(map_ptr + scale_row) if HAS_MAP else scale_row // GROUP
        scale_at = scale_ptr + block * GROUPS
    acc = accumulate(
        x_ptr + x_row[:, None] * IN + k[None, :],
        weight_ptr + weight_row.to(tl.int64)[None, :] * IN + k[:, None],
        x_scale_at, scale_at, scale_ptr, 0, IN, BLOCK_M, BLOCK_N, BLOCK_K, STEPS, IN % BLOCK_K == 0, STAGES,
        SCALES, GROUP,
    )  # fmt: skip
    if SCALES == 0:
        acc *= tl.load(x_scale_at) * tl.load(scale_at)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + r.to(tl.int64)[:, None] * OUT + column[None, :]
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
    _dense_fp8_kernel[(triton.cdiv(num_rows, tiles.block_m), triton.cdiv(out_features, tiles.block_n))](
        out, x.values, x.scales, weight.values, weight.scales,
        x.scales if weight.block_of_row is None else weight.block_of_row,
        x.scales if bias is None else bias, num_rows,
        IN=in_features, OUT=out_features,
        SCALES=(BY_TILE.value if shares else BY_ROW.value) if is_blocked else 0,
        HAS_MAP=weight.block_of_row is not None, HAS_BIAS=bias is not None, GROUP=GROUP,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.step, STAGES=tiles.stages, PDL=on_gpu,
        num_warps=tiles.num_warps, **dependent,
    )  # fmt: skip
    return out
