"""Dense FP8 projections on a GPU against float64: by the rules, by every tile, by lanes, by torch."""

import pytest
import torch

from lorikeet_kernels.dense.fp8_few_rows import fp8_few_rows
from lorikeet_kernels.dense.fp8_gemm import dense_fp8_gemm
from lorikeet_kernels.dense.fp8_linear import fp8_linear
from lorikeet_kernels.dense.fp8_weight import WeightScaling, dequantize_fp8
from lorikeet_kernels.dense.quantize_rows import dequantize_rows, quantize_rows
from lorikeet_kernels.testing import relative_error
from lorikeet_kernels.tiling.dense_tiles import DenseTiles, select_dense, uses_torch
from lorikeet_kernels.tiling.few_rows_tiles import FewRowsTiles
from tests.support.fp8_matrices import GROUPS, fp8_matrices

GPU = torch.device("cuda")
BF16 = torch.bfloat16
# A rounding to bf16, and products of e4m3 that tensor cores add up with 13 bits of fraction, 256 at once.
TOLERANCE = 5e-3
KINDS: tuple[WeightScaling, ...] = ("block", "channel")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heights", [(256, 128, 128), (200, 56)])
@pytest.mark.parametrize("columns", [512, 208])
def test_dense(heights: tuple[int, ...], columns: int, kind: WeightScaling) -> None:
    """By the rule, by every tile, by lanes, by torch; a row's bits in batch-invariant mode."""
    weight = fp8_matrices((sum(heights), columns), kind, heights)
    bias = torch.randn(sum(heights), device=GPU).to(BF16)
    wide = dequantize_fp8(weight, torch.float64)
    for rows in (1, 17, 64, 70, 700):
        x = torch.randn(rows, columns, device=GPU).to(BF16)
        quantized = quantize_rows(x, weight.activations)
        expected = dequantize_rows(quantized).double() @ wide.T + bias.double()
        invariant = fp8_linear(x, weight, bias, batch_invariant=True)
        for got in (fp8_linear(x, weight, bias), invariant):
            assert relative_error(got, expected) < TOLERANCE
        assert relative_error(fp8_linear(x, weight), expected - bias.double()) < TOLERANCE
        assert torch.equal(fp8_linear(x[:1], weight, bias, batch_invariant=True), invariant[:1])
        for tiles in (DenseTiles(64, 128, 64, 3, 4), DenseTiles(128, 128, 128, 3, 8)):
            out = x.new_full(expected.shape, float("nan"))
            assert relative_error(dense_fp8_gemm(quantized, weight, out, tiles, bias), expected) < TOLERANCE
    for rows in (1, 2, 5, 8):
        x = torch.randn(rows, columns, device=GPU).to(BF16)
        quantized = quantize_rows(x, weight.activations)
        expected = dequantize_rows(quantized).double() @ wide.T + bias.double()
        for lanes in (FewRowsTiles(8, 4), FewRowsTiles(1, 1), FewRowsTiles(4, 2, 96)):
            out = x.new_full(expected.shape, float("nan"))
            assert relative_error(fp8_few_rows(quantized, weight, out, lanes, bias), expected) < TOLERANCE
        neighbours = x.clone()
        neighbours[1:] *= -3
        assert torch.equal(fp8_linear(neighbours, weight)[0], fp8_linear(x, weight)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heights", "columns"), [((256, 128, 128), 1024), ((200, 56), 208)])
def test_matrix_first(heights: tuple[int, ...], columns: int, kind: WeightScaling) -> None:
    """The matrix's rows as the MMA's: tiles that x fills or not, ragged sizes, splits; a row's own bits."""
    weight = fp8_matrices((sum(heights), columns), kind, heights)
    bias = torch.randn(sum(heights), device=GPU).to(BF16)
    wide = dequantize_fp8(weight, torch.float64)
    for rows, tiles in (
        (1, select_dense(1, sum(heights), columns, kind)),
        (1, DenseTiles(16, 64, 128, 8, 4, ahead=8, is_matrix_first=True)),
        (31, select_dense(31, sum(heights), columns, kind)),
        (31, DenseTiles(32, 64, 128, 4, 4, splits=2, is_matrix_first=True)),
        (64, DenseTiles(64, 128, 128, 4, 8, is_matrix_first=True)),
        (100, DenseTiles(128, 64, 128, 3, 4, is_matrix_first=True)),
    ):
        x = torch.randn(rows, columns, device=GPU).to(BF16)
        quantized = quantize_rows(x, weight.activations)
        expected = dequantize_rows(quantized).double() @ wide.T + bias.double()
        out = x.new_full(expected.shape, float("nan"))
        assert relative_error(dense_fp8_gemm(quantized, weight, out, tiles, bias), expected) < TOLERANCE
        x[1:] *= -3
        again = dense_fp8_gemm(
            quantize_rows(x, weight.activations), weight, torch.empty_like(out), tiles, bias
        )
        assert torch.equal(again[0], out[0])


@pytest.mark.parametrize("rows", [65, 66, 130, 1000])
def test_torch_takes_whole_blocks(rows: int) -> None:
    """Numbers of rows that torch's product needs filled up, too; the own kernel agrees."""
    weight = fp8_matrices((384, 1024), "block", (384,))
    x = torch.randn(rows, 1024, device=GPU).to(BF16)
    assert uses_torch(rows, 384, 1024, "block", on_hopper=True)
    expected = dequantize_rows(quantize_rows(x, GROUPS)).double() @ dequantize_fp8(weight, torch.float64).T
    got = fp8_linear(x, weight)
    assert got.shape == expected.shape
    assert relative_error(got, expected) < TOLERANCE
    assert relative_error(fp8_linear(x, weight, batch_invariant=True), expected) < TOLERANCE
