"""RMS norm with and without residual, and the heads' norm."""

import math

import pytest
import torch

from lorikeet_kernels.attention.head_norm import head_norm
from lorikeet_kernels.dense.rms_norm import rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def naive(row: list[float], weight: list[float], eps: float) -> list[float]:
    """One row in float64."""
    scale = 1 / math.sqrt(sum(v * v for v in row) / len(row) + eps)
    return [v * scale * w for v, w in zip(row, weight, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 13), (3, 300)])
def test_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    """Each row against a loop in float64."""
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)
    expected = torch.tensor([naive(row, weight.tolist(), 1e-5) for row in x.tolist()])
    assert torch.allclose(
        rms_norm(x, weight, 1e-5).float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_added_in_place(dtype: torch.dtype) -> None:
    """The residual holds the rounded sum, and that sum is what is normed."""
    x, residual, weight = (
        torch.randn(5, 13).to(dtype),
        torch.randn(5, 13).to(dtype),
        torch.ones(13, dtype=dtype),
    )
    total = x + residual
    y = rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(residual, total)
    assert torch.equal(y, rms_norm(total, weight, 1e-6))


def test_head_norm_writes_through_views() -> None:
    """Heads are normed inside the fused projection; what lies behind them keeps its bits."""
    fused = torch.randn(7, 5, 16)
    before = fused.clone()
    weight = torch.randn(3, 16)
    head_norm(fused[:, :3], weight, 1e-6)
    for token in range(7):
        for head in range(3):
            expected = naive(before[token, head].tolist(), weight[head].tolist(), 1e-6)
            assert fused[token, head].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert torch.equal(fused[:, 3:], before[:, 3:])


def test_wrong_weight_is_refused() -> None:
    """The message names both shapes."""
    with pytest.raises(ValueError, match=r"\(4,\).*\(2, 5\)"):
        rms_norm(torch.ones(2, 5), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="does not fit heads"):
        head_norm(torch.ones(2, 3, 5), torch.ones(2, 5), 1e-6)
