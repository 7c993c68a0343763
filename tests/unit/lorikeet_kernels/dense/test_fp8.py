"""FP8 on the CPU: what quantising does to rows and matrices, and projections, against float64."""

import pytest
import torch

from lorikeet_kernels.dense.fp8_linear import fp8_linear
from lorikeet_kernels.dense.fp8_weight import Fp8Weight, dequantize_fp8, quantize_channels, row_blocks
from lorikeet_kernels.dense.quantize_rows import (
    E4M3,
    PROGRAMS,
    WIDE,
    ActivationScaling,
    QuantizedRows,
    dequantize_rows,
    quantize_rows,
    shares_rows,
)
from lorikeet_kernels.testing import TOLERANCE, relative_error

TOKEN, GROUPS = ActivationScaling("token"), ActivationScaling("group")
# Every finite value of e4m3 that is not negative, from its definition: four bits of exponent with bias 7,
# three of fraction, subnormals below 2**-6, no infinity.
POSITIVE = torch.tensor(
    [
        (code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)
        for code in range(127)
    ],
    dtype=torch.float64,
)


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Float64 rounded to the nearest value of e4m3; at a tie the one with an even code."""
    distance = (values.abs().unsqueeze(-1) - POSITIVE).abs()
    best = distance.amin(dim=-1, keepdim=True)
    codes = torch.arange(127)
    tied = distance == best
    even = torch.where(tied & (codes % 2 == 0), codes, -1).amax(dim=-1)
    code = torch.where(even >= 0, even, tied.to(torch.int64).argmax(dim=-1))
    return POSITIVE[code] * values.sign()


def plain_rows(x: torch.Tensor, group: int) -> torch.Tensor:
    """What quantised rows stand for, a group at a time, in float64 but for the scales' own float32."""
    out = torch.empty_like(x, dtype=torch.float64)
    for first in range(0, x.shape[-1], group):
        part = x[..., first : first + group].float()
        scale = part.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / 448
        out[..., first : first + group] = nearest((part / scale).double()) * scale.double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 128), (7, 300), (3, 2, 13)])
def test_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """By groups, by rows and by a given scale: the nearest value everywhere; zeros stay zeros."""
    x = (torch.randn(shape) * torch.rand(shape).pow(8) * 50).to(dtype)
    x[0, ..., :5] = 0.0
    for scaling, group in ((GROUPS, 128), (TOKEN, shape[-1])):
        got = quantize_rows(x, scaling)
        assert got.values.dtype == E4M3
        assert torch.allclose(dequantize_rows(got).double(), plain_rows(x, group), rtol=1e-6, atol=0)
    given = quantize_rows(x, ActivationScaling("static", torch.tensor([0.05])))
    expected = nearest((x.float() / torch.tensor(0.05)).double())
    assert torch.equal(given.values.double(), expected)
    assert given.scales.shape == (x.numel() // shape[-1], 1)


def test_a_bound_limits_the_scale() -> None:
    """Values beyond it end at the largest that e4m3 has, the others keep their precision."""
    x = torch.tensor([[1.0, -3.0, 5000.0, -7000.0]])
    got = quantize_rows(x, ActivationScaling("token", bound=1200.0))
    assert got.scales.item() == pytest.approx(1200 / 448)
    assert dequantize_rows(got)[0, 2:].tolist() == pytest.approx([1200.0, -1200.0])


def test_rows_go_by_slices_where_few_or_wide() -> None:
    """One row stays whole: what multiplies it fetches its matrix meanwhile."""
    few = PROGRAMS // 2
    assert [shares_rows(rows, WIDE) for rows in (1, 2, few, few + 1)] == [False, True, True, False]
    assert [shares_rows(rows, WIDE + 1) for rows in (1, 2, few + 1)] == [False, True, True]


def test_rows_that_are_no_numbers_stay_so() -> None:
    """A NaN or an infinity in a row shows in that row and in no other; rows of zeros are numbers."""
    x = torch.ones(4, 256)
    x[1, 3], x[2, 200], x[3] = float("nan"), float("inf"), 0.0
    for scaling in (TOKEN, GROUPS):
        back = dequantize_rows(quantize_rows(x, scaling))
        assert back[1, 3].isnan()
        assert not back[2, 200].isfinite()
        assert back[0].equal(x[0])
        assert back[3].equal(x[3])


def test_channels() -> None:
    """Each row of a matrix by its own largest value, a row of zeros too."""
    matrix = torch.randn(2, 9, 40) * torch.rand(2, 9, 1) * 100
    matrix[1, 3] = 0.0
    weight = Fp8Weight(*quantize_channels(matrix), TOKEN)
    assert weight.kind == "channel"
    assert torch.allclose(dequantize_fp8(weight, torch.float64), plain_rows(matrix, 40), rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_blocks_of_matrices_side_by_side(is_interleaved: bool) -> None:
    """Each matrix has block rows of its own, wherever its rows lie."""
    heights, columns = (150, 150), 200
    parts = [torch.randn(height, columns).to(E4M3) for height in heights]
    scales = [torch.rand(2, 2) for _ in heights]
    expected = [
        values.double() * scale.double().repeat_interleave(128, 0)[:150].repeat_interleave(128, 1)[:, :200]
        for values, scale in zip(parts, scales, strict=True)
    ]

    def joined(matrices: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(matrices, dim=1).flatten(0, 1) if is_interleaved else torch.cat(matrices)

    values = joined([part.view(torch.uint8) for part in parts]).view(E4M3)
    mapped = row_blocks(heights, is_interleaved=is_interleaved)
    weight = Fp8Weight(values, torch.cat(scales), GROUPS, mapped)
    assert torch.equal(dequantize_fp8(weight, torch.float64), joined(expected))
    assert weight.num_bytes == 300 * 200 + 4 * 8 + 4 * 300


def test_whole_blocks_need_no_map() -> None:
    """Also where the last matrix ends within a block."""
    assert row_blocks((256, 128, 70)) is None
    assert row_blocks((64,)) is None
    assert row_blocks((64, 64)) is not None
    assert row_blocks((128, 128), is_interleaved=True) is not None


@pytest.mark.parametrize(
    ("values", "scales", "scaling"),
    [
        ((4, 256), (4,), GROUPS),
        ((4, 256), (1, 2), TOKEN),
        ((4, 256), (1, 1), GROUPS),
        ((4, 256), (3,), TOKEN),
        ((2, 4, 256), (1, 1, 2), GROUPS),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    values: tuple[int, ...], scales: tuple[int, ...], scaling: ActivationScaling
) -> None:
    """Shapes, and activations of another form than the weight's."""
    with pytest.raises(ValueError, match="FP8"):
        Fp8Weight(torch.zeros(values).to(E4M3), torch.ones(scales), scaling)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", ["channel", "block", "static"])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(1, 20, 40), (7, 300, 257), (9, 128, 256)])
def test_linear(rows: int, out_features: int, in_features: int, kind: str, dtype: torch.dtype) -> None:
    """Against float64 of the dequantised matrix and rows quantised by hand; a row's bits are its own."""
    x, bias = torch.randn(rows, in_features).to(dtype), torch.randn(out_features).to(dtype)
    values, scales = quantize_channels(torch.randn(out_features, in_features))
    if kind == "block":
        scales = torch.rand(-(-out_features // 128), -(-in_features // 128)) / 100
        weight, wide = Fp8Weight(values, scales, GROUPS), plain_rows(x, 128)
        factors = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:out_features, :in_features]
    else:
        scaling = ActivationScaling("static", torch.tensor([0.01])) if kind == "static" else TOKEN
        weight, factors = Fp8Weight(values, scales, scaling), scales.unsqueeze(-1)
        wide = plain_rows(x, in_features)
        if kind == "static":
            wide = nearest((x.float() / torch.tensor(0.01)).double()) * 0.01
    expected = wide @ (values.double() * factors.double()).T + bias.double()
    for batch_invariant in (False, True):
        got = fp8_linear(x, weight, bias, batch_invariant=batch_invariant)
        assert got.dtype == dtype
        assert relative_error(got, expected) < 3 * TOLERANCE[dtype]
        alone = fp8_linear(x[:1], weight, bias, batch_invariant=True)
        if batch_invariant:
            assert torch.equal(alone[0], got[0])


def test_scales_of_rows_are_read_as_they_are_laid_out() -> None:
    """Three groups of a row of 300."""
    rows = QuantizedRows(torch.ones(1, 300).to(E4M3), torch.tensor([[1.0, 2.0, 4.0]]))
    assert dequantize_rows(rows)[0, [0, 127, 128, 255, 256, 299]].tolist() == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_no_rows_are_projected_to_none(kind: str) -> None:
    """An empty batch has a shape all the same."""
    values, scales = quantize_channels(torch.randn(20, 40))
    weight = Fp8Weight(values, scales, TOKEN)
    if kind == "block":
        weight = Fp8Weight(values, torch.ones(1, 1), GROUPS)
    assert fp8_linear(torch.empty(0, 40), weight).shape == (0, 20)


def test_what_does_not_fit_a_projection_is_refused() -> None:
    """A bias of one element would be added to every column, one of others' read beyond its end."""
    weight = Fp8Weight(*quantize_channels(torch.randn(20, 40)), TOKEN)
    for size in (1, 19):
        with pytest.raises(ValueError, match=rf"bias \({size},\) does not fit weight \(20, 40\)"):
            fp8_linear(torch.randn(3, 40), weight, torch.zeros(size))
    for x in (torch.randn(40), torch.randn(2, 3, 40), torch.randn(3, 41)):
        with pytest.raises(ValueError, match="does not fit x"):
            fp8_linear(x, weight)
