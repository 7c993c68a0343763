"""Small cases of the room `dense`."""

import torch

from lorikeet_kernels.dense.few_rows_linear import few_rows_linear
from lorikeet_kernels.dense.fp8_few_rows import fp8_few_rows
from lorikeet_kernels.dense.fp8_gemm import dense_fp8_gemm
from lorikeet_kernels.dense.fp8_linear import fp8_linear_reference
from lorikeet_kernels.dense.gated_activation import GatedActivation, activate_rows, gated_activation_reference
from lorikeet_kernels.dense.linear import linear_reference
from lorikeet_kernels.dense.quantize_rows import (
    ActivationScaling,
    launch_quantize,
    quantize_rows_reference,
)
from lorikeet_kernels.dense.rms_norm import norm_rows, rms_norm_reference
from lorikeet_kernels.small_cases.small_case import SmallCase, SmallProblem, moved, poisoned
from lorikeet_kernels.testing import random_fp8_weight
from lorikeet_kernels.tiling.dense_tiles import DenseTiles
from lorikeet_kernels.tiling.few_rows_tiles import FewRowsTiles


def _rms_norm(dtype: torch.dtype) -> SmallProblem:
    """A width that is no power of two; a residual that becomes the sum, and a delta."""
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 3, 45, generator=generator).to(dtype)
    delta, weight = torch.randn(3, 45, generator=generator), torch.rand(45, generator=generator).to(dtype)
    kept = residual.clone()
    expected = rms_norm_reference(x, weight, 1e-5, kept, delta)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, sums, scale, added = moved((x, residual, weight, delta), device)
        out = norm_rows(rows, scale, 1e-5, sums, poisoned(x, device), added)
        plain = norm_rows(rows, scale, 1e-5, None, poisoned(x, device))
        return out, sums, plain

    return SmallProblem((expected, kept, rms_norm_reference(x, weight, 1e-5)), launch)


def _gated_activation(dtype: torch.dtype) -> SmallProblem:
    """A last block of columns in part, in both row orders; a limit, a delta and a NaN."""
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(3, 2, 1202, generator=generator).to(dtype)
    gate_up[0, 1, 7] = float("nan")
    delta, activation = torch.randn(3, 2, 1202, generator=generator), GatedActivation(1.702, 0.5, 1.0)
    expected = (
        gated_activation_reference(gate_up, activation, row_order="interleaved"),
        gated_activation_reference(gate_up, activation, row_order="concatenated", delta=delta),
    )

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, added = moved((gate_up, delta), device)
        outs = [poisoned(out, device) for out in expected]
        activate_rows(rows, outs[0], activation, "interleaved")
        activate_rows(rows, outs[1], activation, "concatenated", added)
        return tuple(outs)

    return SmallProblem(expected, launch)


def _quantize_rows(dtype: torch.dtype) -> SmallProblem:
    """Every scaling, ragged groups, more than a program has, shared rows, a row of zeros: bit for bit."""
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(37, 300, generator=generator) * 9).to(dtype)
    wide = (torch.randn(3, 4300, generator=generator) * 9).to(dtype)
    x[-1] = 0.0
    scalings = (
        ActivationScaling("group"),
        ActivationScaling("token", bound=9.0),
        ActivationScaling("static", torch.tensor([0.03])),
    )
    made = [quantize_rows_reference(x, scaling) for scaling in scalings]

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows = moved(x, device)
        results = [launch_quantize(rows, moved(scaling, device)) for scaling in scalings]
        results.append(launch_quantize(rows, scalings[0], by_group=True))
        results += [launch_quantize(moved(wide, device), moved(scaling, device)) for scaling in scalings[1:]]
        # a group after the other there are more rows than x has
        return tuple(part[: len(x)] for q in results for part in (q.values.view(torch.uint8), q.scales))

    made.append(made[0])
    made += [quantize_rows_reference(wide, scaling) for scaling in scalings[1:]]
    expected = tuple(part for q in made for part in (q.values.view(torch.uint8), q.scales))
    return SmallProblem(expected, launch, tolerance=0.0)


def _fp8_linear(dtype: torch.dtype) -> SmallProblem:
    """Rows beyond a tile, ragged widths, scales of channels and of ragged blocks, a bias."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(19, 200, generator=generator).to(dtype)
    bias = torch.randn(152, generator=generator).to(dtype)
    weights = [
        random_fp8_weight(1, (72, 40, 40), 200, kind, generator).expert(0) for kind in ("channel", "block")
    ]
    quantized = [quantize_rows_reference(x, weight.activations) for weight in weights]
    expected = tuple(fp8_linear_reference(x, weight, bias) for weight in weights)
    ways = (DenseTiles(64, 128, 128, 3, 4), DenseTiles(32, 64, 128, 3, 4, is_matrix_first=True))

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        return tuple(
            dense_fp8_gemm(
                moved(rows, device), moved(weight, device), poisoned(out, device), tiles, moved(bias, device)
            )
            for tiles in ways
            for rows, weight, out in zip(quantized, weights, expected, strict=True)
        )

    return SmallProblem(expected * len(ways), launch)


def _split_fp8_linear(dtype: torch.dtype) -> SmallProblem:
    """Columns that three splits do not divide, most rows of a tile missing."""
    generator = torch.Generator().manual_seed(5)
    x, bias = (
        torch.randn(3, 208, generator=generator).to(dtype),
        torch.randn(152, generator=generator).to(dtype),
    )
    weight = random_fp8_weight(1, (152,), 208, "block", generator).expert(0)
    quantized = quantize_rows_reference(x, weight.activations)
    expected = fp8_linear_reference(x, weight, bias)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, matrix, added = moved((quantized, weight, bias), device)
        tiles = DenseTiles(16, 64, 64, 3, 4, splits=3, is_matrix_first=True)
        return (dense_fp8_gemm(rows, matrix, poisoned(expected, device), tiles, added),)

    return SmallProblem((expected,), launch)


def _fp8_few_rows(dtype: torch.dtype) -> SmallProblem:
    """Outputs that fill no program and inputs that fill no chunk, scales of channels and of ragged blocks."""
    generator = torch.Generator().manual_seed(6)
    x, bias = (
        torch.randn(3, 528, generator=generator).to(dtype),
        torch.randn(157, generator=generator).to(dtype),
    )
    weights = [
        random_fp8_weight(1, (72, 40, 45), 528, kind, generator).expert(0) for kind in ("channel", "block")
    ]
    quantized = [quantize_rows_reference(x, weight.activations) for weight in weights]
    expected = tuple(fp8_linear_reference(x, weight, bias) for weight in weights)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        return tuple(
            fp8_few_rows(
                moved(rows, device), moved(weight, device), poisoned(out, device), FewRowsTiles(4, 1),
                moved(bias, device),
            )
            for rows, weight, out in zip(quantized, weights, expected, strict=True)
        )  # fmt: skip

    return SmallProblem(expected, launch)


def _few_rows(num_rows: int, tiles: FewRowsTiles, dtype: torch.dtype) -> SmallProblem:
    """Outputs that fill no program and inputs that fill no chunk."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(13, 1032, generator=generator).to(dtype)
    bias = torch.randn(13, generator=generator).to(dtype)
    x = torch.randn(num_rows, 1032, generator=generator).to(dtype)
    wide = (x.float(), weight.float())
    plain = linear_reference(*wide)
    expected = (plain.to(dtype), (plain + bias.float()).to(dtype))

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, matrix, added = moved((x, weight, bias), device)
        return tuple(
            few_rows_linear(rows, matrix, b, poisoned(expected[0], device), tiles) for b in (None, added)
        )

    return SmallProblem(expected, launch)


CASES = (
    SmallCase("rms_norm", ("dense.rms_norm._rms_norm_kernel",), _rms_norm),
    SmallCase("gated_activation", ("dense.gated_activation._gated_activation_kernel",), _gated_activation),
    SmallCase(
        "quantize_rows",
        ("dense.quantize_rows._quantize_groups_kernel", "dense.quantize_rows._quantize_rows_kernel"),
        _quantize_rows,
        needs_gpu=True,
    ),
    SmallCase("fp8_linear", ("dense.fp8_gemm._dense_fp8_kernel",), _fp8_linear),
    SmallCase(
        "split_fp8_linear",
        ("dense.fp8_gemm._dense_fp8_kernel", "dense.split_sum._split_sum_kernel"),
        _split_fp8_linear,
    ),
    SmallCase("fp8_few_rows", ("dense.fp8_few_rows._fp8_few_rows_kernel",), _fp8_few_rows),
    SmallCase(
        "few_rows",
        ("dense.few_rows_linear._few_rows_kernel",),
        lambda dtype: _few_rows(3, FewRowsTiles(2, 4), dtype),
    ),
    SmallCase(
        "few_rows_products",
        ("dense.few_rows_products._few_rows_products_kernel",),
        lambda dtype: _few_rows(9, FewRowsTiles(8, 4, products=True), dtype),
        needs_gpu=True,
    ),
)
