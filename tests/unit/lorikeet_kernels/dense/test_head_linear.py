"""Projections of heads by matrices of their own."""

import pytest
import torch

from lorikeet_kernels.dense.head_linear import head_linear
from lorikeet_kernels.testing import TOLERANCE, relative_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7, 13])
def test_views_match_float64(num_tokens: int, batch_invariant: bool, dtype: torch.dtype) -> None:
    """Rows of the input, of the weight and of the output are parts of wider ones."""
    x = torch.randn(num_tokens, 3, 20).to(dtype)[..., :16]
    weight = torch.randn(3, 30, 24).to(dtype)
    out = torch.zeros(num_tokens, 3, 40, dtype=dtype)
    head_linear(x, weight[:, 5:21], out[..., :24], batch_invariant=batch_invariant)
    expected = torch.einsum("thi,hio->tho", x.double(), weight[:, 5:21].double())
    assert relative_error(out[..., :24], expected) < TOLERANCE[dtype]
    assert not out[..., 24:].any()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_rows_bits_do_not_depend_on_the_others(batch_invariant: bool) -> None:
    """Alone, in a small batch and in a larger one."""
    x, weight = torch.randn(21, 4, 128), torch.randn(4, 128, 512)
    whole = head_linear(x, weight, torch.empty(21, 4, 512), batch_invariant=batch_invariant)
    for count in (1, 2, 6, 9):
        some = head_linear(x[:count], weight, torch.empty(count, 4, 512), batch_invariant=batch_invariant)
        assert torch.equal(some, whole[:count])


def test_sizes_that_do_not_fit_are_refused() -> None:
    """Another number of heads."""
    with pytest.raises(ValueError, match="does not fit"):
        head_linear(torch.zeros(2, 3, 4), torch.zeros(2, 4, 5), torch.zeros(2, 3, 5))
