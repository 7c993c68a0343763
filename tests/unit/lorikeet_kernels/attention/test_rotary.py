"""Rotation of pairs by position."""

import math

import pytest
import torch

from lorikeet_kernels.attention.rotary import rotary


def table(num_positions: int, half: int) -> torch.Tensor:
    """Random frequencies."""
    angles = torch.outer(torch.arange(num_positions).float(), torch.rand(half))
    return torch.stack((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "dim", "half"), [(1, 1, 2, 1), (7, 3, 16, 8), (13, 2, 12, 3)])
def test_against_a_loop(tokens: int, heads: int, dim: int, half: int, interleaved: bool) -> None:
    """Every pair against sine and cosine; elements beyond the rotated part keep their bits."""
    x, cos_sin = torch.randn(tokens, heads, dim), table(300, half)
    positions = torch.randint(0, 300, (tokens,))
    expected = x.clone()
    for t in range(tokens):
        for h in range(heads):
            for i in range(half):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                cos, sin = (float(cos_sin[positions[t], part, i]) for part in (0, 1))
                a, b = float(x[t, h, first]), float(x[t, h, second])
                expected[t, h, first] = a * cos - b * sin
                expected[t, h, second] = b * cos + a * sin
    rotary(x, positions, cos_sin, interleaved=interleaved)
    assert torch.allclose(x, expected, atol=1e-6)
    assert torch.equal(x[..., 2 * half :], expected[..., 2 * half :])


def test_dot_product_depends_on_distance_only() -> None:
    """The property that rotation is for."""
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01])
    angles = torch.outer(torch.arange(64).float(), frequencies)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)

    def score(i: int, j: int) -> float:
        a, b = q.clone(), k.clone()
        rotary(a, torch.tensor([i]), cos_sin)
        rotary(b, torch.tensor([j]), cos_sin)
        return float((a * b).sum())

    assert score(9, 4) == pytest.approx(score(60, 55), abs=1e-5)
    assert not math.isclose(score(9, 4), score(9, 5), abs_tol=1e-3)


def test_too_wide_table_is_refused() -> None:
    """A table cannot rotate more than the head has."""
    with pytest.raises(ValueError, match="does not fit heads"):
        rotary(torch.ones(1, 1, 4), torch.zeros(1, dtype=torch.int64), table(4, 3))
