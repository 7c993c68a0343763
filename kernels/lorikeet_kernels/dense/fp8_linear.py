"""Dense projection by a matrix in e4m3, its input quantised as the checkpoint asks.

    y = dequantised(quantised(x)) dequantised(W)^T + bias

Shapes: x [T, in] in 16 or 32 bits, weight [out, in], bias [out], result [T, out] in x's dtype. Accumulates in
float32, rounds once. On a GPU the input takes a launch of its own (`quantize_rows`); the product is torch's
scaled one (cuBLAS) for many rows, `fp8_few_rows` for one (of few columns two), and `fp8_gemm` for those
between and for sizes that torch does not take. All multiply the same quantised values: they differ in the
order of sums, and where the tensor cores add up e4m3 in those sums' 13 bits of fraction. With
`batch_invariant` tiles depend on nothing but the weight, and a row's bits not on the number of rows.
"""

import torch

from lorikeet_kernels.dense.fp8_few_rows import fp8_few_rows
from lorikeet_kernels.dense.fp8_gemm import dense_fp8_gemm
from lorikeet_kernels.dense.fp8_weight import Fp8Weight, dequantize_fp8
from lorikeet_kernels.dense.linear import linear_reference
from lorikeet_kernels.dense.quantize_rows import (
    QuantizedRows,
    dequantize_rows,
    quantize_rows,
    quantize_rows_reference,
)
from lorikeet_kernels.launch.hopper import is_hopper
from lorikeet_kernels.tiling.dense_tiles import select_dense, select_lanes, uses_torch


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
    x = x.contiguous()
    is_torch = (
        x.dtype == torch.bfloat16
        and weight.block_of_row is None
        and not batch_invariant
        and uses_torch(num_rows, out_features, in_features, weight.kind, on_hopper=is_hopper(x))
    )
    if is_torch:
        return torch_product(quantize_rows(x, weight.activations, by_group=True), weight, bias)[:num_rows]
    rows = quantize_rows(x, weight.activations)
    out = x.new_empty((num_rows, out_features))
    lanes = None if batch_invariant else select_lanes(num_rows, out_features, in_features)
    if lanes is not None:
        return fp8_few_rows(rows, weight, out, lanes, bias)
    tiles = select_dense(num_rows, out_features, in_features, weight.kind, batch_invariant=batch_invariant)
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
