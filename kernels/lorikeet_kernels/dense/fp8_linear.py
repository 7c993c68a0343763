"""Dense projection by a matrix in e4m3, its input quantised as the checkpoint asks.

    y = dequantised(quantised(x)) dequantised(W)^T + bias

Shapes: x [T, in] in 16 or 32 bits, weight [out, in], bias [out], result [T, out] in x's dtype. Accumulates in
float32, rounds once. On a GPU the input takes a launch of its own (`quantize_rows`); the product is torch's
row-wise scaled one (cuBLAS) for many rows and a scale a channel, and the own kernel for few rows and for
scales of blocks. With `batch_invariant` the own kernel's tiles depend on nothing but the weight, and a row's
bits not on the number of rows.
"""

import torch

from lorikeet_kernels.dense.fp8_gemm import dense_fp8_gemm
from lorikeet_kernels.dense.fp8_weight import Fp8Weight, dequantize_fp8
from lorikeet_kernels.dense.linear import linear_reference
from lorikeet_kernels.dense.quantize_rows import (
    QuantizedRows,
    dequantize_rows,
    quantize_rows,
    quantize_rows_reference,
)
from lorikeet_kernels.tiling.dense_tiles import select_dense, uses_torch


def fp8_linear_reference(
    x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> torch.Tensor:
    """See `fp8_linear`."""
    wide = dequantize_rows(quantize_rows_reference(x, weight.activations))
    matrix = dequantize_fp8(weight, torch.float32)
    return linear_reference(wide, matrix, bias, batch_invariant=batch_invariant).to(x.dtype)


def fp8_linear(
    x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> torch.Tensor:
    """Return the projection, a new tensor."""
    if len(weight.shape) != 2 or x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"fp8_linear: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"fp8_linear: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
    if x.device.type == "cpu":
        return fp8_linear_reference(x, weight, bias, batch_invariant=batch_invariant)
    out_features, in_features = weight.shape
    num_rows = x.shape[0]
    is_torch = (
        x.dtype == torch.bfloat16
        and weight.block_of_row is None
        and not batch_invariant
        and uses_torch(num_rows, out_features, in_features, weight.kind)
    )
    rows = quantize_rows(x.contiguous(), weight.activations, by_group=is_torch)
    if is_torch:
        return torch_product(rows, weight, bias)
    out = x.new_empty((num_rows, out_features))
    tiles = select_dense(1 if batch_invariant else num_rows, out_features, in_features)
    return dense_fp8_gemm(rows, weight, out, tiles, bias)


def torch_product(rows: QuantizedRows, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Torch's scaled product, in bfloat16, of rows quantised `by_group`; `uses_torch` says of which sizes."""
    return torch._scaled_mm(  # noqa: SLF001 # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        rows.values,
        weight.values.t(),
        scale_a=rows.scales,
        scale_b=weight.scales.t() if weight.kind == "block" else weight.scales.view(1, -1),
        bias=bias,
        out_dtype=torch.bfloat16,
    )
