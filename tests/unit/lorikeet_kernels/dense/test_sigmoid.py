"""The sigmoid's values and that a row's bits are its own."""

import pytest
import torch

from lorikeet_kernels.dense.sigmoid import sigmoid


@pytest.mark.parametrize("width", [1, 7, 24, 40, 64])
def test_a_rows_bits_do_not_depend_on_the_others(width: int) -> None:
    """Whatever a vector loop leaves over."""
    x = 4 * torch.randn(64, width, generator=torch.Generator().manual_seed(width))
    whole = sigmoid(x)
    for count in (1, 2, 3, 5, 63):
        assert torch.equal(sigmoid(x[:count].clone()), whole[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values(dtype: torch.dtype) -> None:
    """Against float64, one rounding; and at the ends."""
    x = (6 * torch.randn(1000, generator=torch.Generator().manual_seed(1))).to(dtype)
    expected = 1 / (1 + torch.exp(-x.double()))
    torch.testing.assert_close(sigmoid(x).double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
    ends = torch.tensor([-1e4, 1e4, float("-inf"), float("inf"), float("nan")]).to(dtype)
    assert sigmoid(ends)[:4].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert sigmoid(ends)[4].isnan()
